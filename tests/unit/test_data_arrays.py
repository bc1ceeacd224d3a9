"""The user's own arrays: what comes out of an .npz, and every fault of one, word for word."""

import os
import socket
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from whale_train.data import paths
from whale_train.data.dataset import Dataset
from whale_train.data.open import open_dataset
from whale_train.data.sources.arrays import ArraysOptions
from whale_train.data.sources.hf_dataset import HfDatasetOptions
from whale_train.data.sources.text import TextOptions
from whale_train.errors import ConfigError
from whale_train.launcher.planning.check_data import padded_labels
from whale_train.strategies.graph.operation_graph import InputField

SAVERS = [np.savez, np.savez_compressed]


def opened(path: Path, **options: Any) -> Dataset:
    return open_dataset(ArraysOptions(path=str(path), **options))


@pytest.mark.parametrize("save", SAVERS)
def test_arrays_come_out_as_they_went_in(tmp_path: Path, save: Callable[..., None]) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 3, 2))
    fortran = np.asfortranarray(generator.normal(size=(20, 5)).astype(np.float32))
    big_endian = generator.integers(0, 50, (20, 4)).astype(">i4")
    labels = np.arange(20) % 7 - 1
    flags = labels > 2
    save(tmp_path / "a.npz", x=x, fortran=fortran, ids=big_endian, labels=labels, flags=flags)
    dataset = opened(tmp_path / "a.npz")
    assert dataset.fields == (
        InputField("x", (3, 2), "float32"),
        InputField("fortran", (5,), "float32"),
        InputField("ids", (4,), "int64", int(big_endian.max()) + 1),
        InputField("labels", (), "int64", 6, -1),
        InputField("flags", (), "bool"),
    )
    assert (dataset.num_samples, dataset.num_evaluation_samples) == (20, 0)
    rows = np.array([19, 3, 3, 0])
    batch = dataset.samples(rows)
    assert list(batch) == ["x", "fortran", "ids", "labels", "flags"]
    np.testing.assert_array_equal(batch["x"], x[rows].astype(np.float32))
    np.testing.assert_array_equal(batch["fortran"], fortran[rows])
    np.testing.assert_array_equal(batch["ids"], big_endian[rows])
    np.testing.assert_array_equal(batch["labels"], labels[rows])
    np.testing.assert_array_equal(batch["flags"], flags[rows])
    for field in dataset.fields:
        assert batch[field.name].dtype == np.dtype(field.dtype)
        assert batch[field.name].dtype.isnative


def test_columns_name_the_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, picture=np.ones((4, 2)), kind=np.arange(4), more=np.zeros(4))
    columns = {"pixel_values": "picture", "labels": "kind"}
    dataset = open_dataset(ArraysOptions(path=str(path), columns=columns))
    assert [field.name for field in dataset.fields] == ["pixel_values", "labels"]
    assert dataset.samples(np.array([2]))["labels"].tolist() == [2]
    with pytest.raises(ConfigError) as caught:
        open_dataset(ArraysOptions(path=str(path), columns={"labels": "kinds"}))
    assert str(caught.value) == (
        f"data.columns.labels=kinds is not an array of {path}; did you mean kind? One of: kind, "
        "more, picture"
    )


def test_labels_of_padding_are_told_of(tmp_path: Path) -> None:
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    labels = np.array([[5, 6, 7], [5, -100, 0]])
    np.savez(tmp_path / "a.npz", attention_mask=mask, labels=labels)
    (note,) = padded_labels(opened(tmp_path / "a.npz"))
    assert note.reason == (
        "2 of 3 padded places in the first 2 samples have a label that the loss counts; write -100 "
        "there to leave them out"
    )
    np.savez(tmp_path / "b.npz", attention_mask=mask, labels=np.where(mask, labels, -100))
    assert not padded_labels(opened(tmp_path / "b.npz"))


def test_uncompressed_arrays_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((1000, 4000)), ids=np.zeros((1000, 1000), np.int64))
    tracemalloc.start()
    try:
        opened(tmp_path / "a.npz").samples(np.array([999, 0]))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2_000_000  # of 40,000,000


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int64", "float16", "float32"])
def test_other_dtypes_are_kept(tmp_path: Path, dtype: str) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((2, 2), dtype))
    dataset = opened(tmp_path / "a.npz")
    assert dataset.fields[0].dtype == dtype
    assert dataset.samples(np.array([1]))["x"].dtype == dtype


def test_a_share_is_held_back_when_asked_for(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(50))
    dataset = opened(tmp_path / "a.npz", evaluation_fraction=0.2)
    training = dataset.samples(np.arange(40))["x"].tolist()
    held = dataset.evaluation_samples(np.arange(10))["x"].tolist()
    assert training == sorted(training)
    assert sorted(training + held) == list(range(50))


def test_the_upper_bound_of_ignored_labels_is_unknown(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", labels=np.full((3, 2), -100))
    assert opened(tmp_path / "a.npz").fields[0].upper_bound == 0


def message(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        opened(path)
    return str(raised.value)


def test_no_such_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=np.ones(3))
    path = tmp_path / "trian.npz"
    assert message(path) == f"data.path={path} does not exist; did you mean {tmp_path}/train.npz?"


def test_a_path_is_relative_to_where_the_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra goes to the run directory (hydra.job.chdir=true) before paths are read."""
    np.savez(tmp_path / "train.npz", x=np.ones(3))
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(paths, "_STARTED_IN", str(tmp_path))
    monkeypatch.chdir(tmp_path / "run")
    assert message(Path("train.npz")) == (
        f"data.path={tmp_path}/run/train.npz does not exist: relative paths begin at the run "
        f"directory, as hydra.job.chdir=true says; use {tmp_path}/train.npz, or "
        "hydra.job.chdir=false"
    )
    assert message(Path("other.npz")) == (
        f"data.path={tmp_path}/run/other.npz does not exist; nothing in {tmp_path}/run has a name "
        "like it"
    )


@pytest.mark.parametrize(
    ("path", "kind"), [("/dev/zero", "device"), ("pipe", "pipe"), ("socket", "socket")]
)
@pytest.mark.parametrize("options", [ArraysOptions, TextOptions, HfDatasetOptions])
def test_what_is_no_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, options: type[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises(ConfigError) as raised:
            open_dataset(options(path=path))
    absolute = tmp_path / path
    assert str(raised.value) == (
        f"data.path={absolute} is a {kind}; name a file or folder on a disk"
    )


@pytest.mark.parametrize("options", [ArraysOptions, TextOptions, HfDatasetOptions])
@pytest.mark.parametrize("path", ["x" * 300, f"{'x' * 300}/a", "a\0b"])
def test_names_that_no_file_can_have(options: type[Any], path: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_dataset(options(path=path))


def test_not_an_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("notes.txt", "hello, this is no array")
    remedy = "write one with numpy.savez(path, name=array, ...)"
    assert message(tmp_path / "a.npy") == (
        f"data.path={tmp_path}/a.npy is not an .npz file; {remedy}"
    )
    assert message(tmp_path / "b.zip") == (
        f"data.path={tmp_path}/b.zip is not an .npz file: its member notes.txt is not an array; "
        f"{remedy}"
    )
    assert message(tmp_path) == f"data.path={tmp_path} is a folder, not an .npz file; {remedy}"


@pytest.mark.parametrize("save", SAVERS)
def test_unequal_first_axes(tmp_path: Path, save: Callable[..., None]) -> None:
    save(tmp_path / "a.npz", input_ids=np.ones((4, 2)), labels=np.ones(5))
    assert message(tmp_path / "a.npz") == (
        f"data.path={tmp_path}/a.npz has arrays with different first axes (input_ids 4, labels 5);"
        " the first axis is the sample: give every array the same number"
    )


def test_nothing_inside(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz")
    np.savez(tmp_path / "empty.npz", x=np.ones((0, 3)))
    assert message(tmp_path / "none.npz") == (
        f"data.path={tmp_path}/none.npz holds no arrays; write one array per forward argument"
    )
    assert message(tmp_path / "empty.npz") == (
        f"data.path={tmp_path}/empty.npz has the empty array x of shape [0, 3]; "
        "save at least one sample"
    )


def test_all_faults_of_a_file_come_together(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        ragged=np.array([[1], [1, 2]], dtype=object),
        names=np.array(["a", "b"]),
        scale=np.float64(3.0),
        x=np.ones((3, 1)),
    )
    start = f"data.path={tmp_path}/a.npz"
    assert message(tmp_path / "a.npz").splitlines() == [
        f"{start} holds Python objects in array ragged, which are never unpickled; "
        "save numbers: sequences padded to one length, for instance",
        f"{start} has array names of dtype str32; "
        "save it as one of: bool, uint8, int8, int16, int32, int64, float16, float32, float64",
        f"{start} has array scale without a first axis to be the sample; save one entry per sample",
        f"{start} has arrays with different first axes (ragged 2, names 2, x 3); "
        "the first axis is the sample: give every array the same number",
    ]


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.ones(3, np.complex64), "complex64"),
        (np.ones(3, np.longdouble), np.dtype(np.longdouble).name),
        (np.ones(3, np.uint64), "uint64"),
        (np.array(["2020-01-01"] * 3, "M8[D]"), "datetime64[D]"),
        (np.ones(3, [("a", np.int64), ("b", np.float32)]), "void96"),
        (np.ma.masked_array(np.ones(3, [("a", np.int64)]), [True, False, True]), "void64"),
    ],
)
def test_values_of_other_kinds(tmp_path: Path, array: NDArray[Any], dtype: str) -> None:
    np.savez(tmp_path / "a.npz", x=array)
    assert message(tmp_path / "a.npz") == (
        f"data.path={tmp_path}/a.npz has array x of dtype {dtype}; "
        "save it as one of: bool, uint8, int8, int16, int32, int64, float16, float32, float64"
    )
