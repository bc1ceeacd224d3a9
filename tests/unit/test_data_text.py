"""Bytes of files as sequences: what is read, in which order, and what is masked."""

import os
from pathlib import Path

import numpy as np
import pytest

from whale_train.data.open import open_dataset
from whale_train.data.sources.text import TextOptions
from whale_train.errors import ConfigError
from whale_train.strategies.graph.operation_graph import InputField


def everything(options: TextOptions) -> bytes:
    """All training sequences of a dataset, one after the other."""
    dataset = open_dataset(options)
    rows = dataset.samples(np.arange(dataset.num_samples))["input_ids"]
    return bytes(rows.astype(np.uint8).ravel())


def test_a_file_is_read_as_bytes_in_windows(tmp_path: Path) -> None:
    content = "naïve café\n".encode("latin-1") * 3 + bytes(range(256))
    (tmp_path / "text.bin").write_bytes(content)
    path = str(tmp_path / "text.bin")
    options = TextOptions(path=path, sequence_length=8, evaluation_fraction=0)
    dataset = open_dataset(options)
    assert dataset.fields == (
        InputField("input_ids", (8,), "int64", 256),
        InputField("labels", (8,), "int64", 256),
    )
    assert (dataset.num_samples, dataset.num_evaluation_samples) == (len(content) // 8, 0)
    batch = dataset.samples(np.array([2, 0, 2]))
    assert batch["input_ids"].tolist() == [list(content[s : s + 8]) for s in (16, 0, 16)]
    assert batch["labels"].tolist() == batch["input_ids"].tolist()
    assert all(array.dtype == np.int64 for array in batch.values())
    assert not np.shares_memory(batch["labels"], batch["input_ids"])


def test_a_folder_is_joined_by_name_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"BBB")
    (tmp_path / "a.md").write_bytes(b"AAAA")
    (tmp_path / ".hidden").write_bytes(b"xxxx")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c").write_bytes(b"CCC")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d").write_bytes(b"xxxx")
    options = TextOptions(path=str(tmp_path), sequence_length=2, evaluation_fraction=0)
    assert everything(options) == b"AAAA\nBBB\nCCC"


@pytest.mark.parametrize("limit", [2, 4, 5, 6, 8, 100])
def test_max_bytes_cuts_a_folder_and_a_file(tmp_path: Path, limit: int) -> None:
    (tmp_path / "a").write_bytes(b"AAAA")
    (tmp_path / "b").write_bytes(b"BBB")
    whole = b"AAAA\nBBB"[:limit]
    for path, expected in ((tmp_path, whole), (tmp_path / "a", b"AAAA"[:limit])):
        options = TextOptions(
            path=str(path), sequence_length=2, max_bytes=limit, evaluation_fraction=0
        )
        assert everything(options) == expected[: len(expected) // 2 * 2]


def test_the_default_is_the_standard_library() -> None:
    dataset = open_dataset(TextOptions())
    total = dataset.num_samples + dataset.num_evaluation_samples
    assert 4_000_000 < total * 64 <= 8_000_000
    assert dataset.num_evaluation_samples == round(0.1 * total)
    first = min(path for path in Path(os.__file__).parent.glob("*.py")).read_bytes()[:64]
    whole = open_dataset(TextOptions(evaluation_fraction=0))
    assert bytes(whole.samples(np.arange(1))["input_ids"][0].astype(np.uint8)) == first


def test_of_the_standard_library_only_its_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = ["site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"]
    for folder in ("json", "json/tests", "xml", *left_out):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(f"{folder};")
    (tmp_path / "xml" / "notes.txt").write_text("not source")
    (tmp_path / "b.py").write_text("b;")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    whole = everything(TextOptions(sequence_length=2, evaluation_fraction=0))
    assert whole == b"b;\njson;\nxml;"[:12]


def test_held_back_sequences_are_not_trained_on(tmp_path: Path) -> None:
    content = np.arange(400, dtype="<u2").tobytes()  # every window of 4 bytes is another
    (tmp_path / "text").write_bytes(content)
    options = TextOptions(path=str(tmp_path / "text"), sequence_length=4, evaluation_fraction=0.25)
    dataset = open_dataset(options)
    assert (dataset.num_samples, dataset.num_evaluation_samples) == (150, 50)
    training = {bytes(row) for row in dataset.samples(np.arange(150))["input_ids"].astype("u1")}
    held = {
        bytes(row) for row in dataset.evaluation_samples(np.arange(50))["input_ids"].astype("u1")
    }
    assert not training & held
    assert training | held == {content[s : s + 4] for s in range(0, 800, 4)}


def test_masked_leaves_about_15_percent_and_uneven_numbers(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abcdefgh" * 8 * 1000)
    path = str(tmp_path / "text")
    dataset = open_dataset(TextOptions(path=path, objective="masked", evaluation_fraction=0))
    assert [field.upper_bound for field in dataset.fields] == [257, 256]
    batch = dataset.samples(np.arange(1000))
    targets = batch["labels"] != -100
    assert abs(targets.mean() - 0.15) < 0.005
    per_sample = targets.sum(axis=1)
    assert len(set(per_sample.tolist())) > 10
    assert abs(per_sample.std() - (64 * 0.15 * 0.85) ** 0.5) < 0.5
    original = np.tile(np.arange(97, 105), (1000, 8))  # the codes of a to h
    assert (batch["input_ids"] == np.where(targets, 256, original)).all()
    assert (batch["labels"] == np.where(targets, original, -100)).all()
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}


def test_masks_depend_on_the_sample_and_not_on_its_batch() -> None:
    dataset = open_dataset(TextOptions(objective="masked", max_bytes=100_000))
    together = dataset.samples(np.array([5, 9, 7]))
    alone = dataset.samples(np.array([7]))
    for name, array in alone.items():
        assert array[0].tolist() == together[name][2].tolist()
    assert (together["labels"][0] != together["labels"][1]).any()


def message(options: TextOptions) -> str:
    with pytest.raises(ConfigError) as raised:
        open_dataset(options)
    return str(raised.value)


def test_faults(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"0123456789")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    at = str(tmp_path)
    assert message(TextOptions(path=f"{at}/corpsu.txt")) == (
        f"data.path={at}/corpsu.txt does not exist; did you mean {at}/corpus.txt?"
    )
    assert message(TextOptions(path=f"{at}/zzz")) == (
        f"data.path={at}/zzz does not exist; nothing in {at} has a name like it"
    )
    assert message(TextOptions(path=f"{at}/no/such/file")) == (
        f"data.path={at}/no/such/file does not exist; the path exists only as far as {at}"
    )
    assert message(TextOptions(path=f"{at}/corpus.txt")) == (
        f"data.path={at}/corpus.txt holds 10 bytes, less than one sequence of "
        "data.sequence_length=64; use data.sequence_length=10 or less, or more text"
    )
    for path in ("empty.txt", "folder"):
        assert message(TextOptions(path=f"{at}/{path}")) == (
            f"data.path={at}/{path} holds 0 bytes, less than one sequence of "
            "data.sequence_length=64; name a file or folder of text"
        )
    assert message(TextOptions(max_bytes=32)) == (
        "data.max_bytes=32 is less than one sequence of data.sequence_length=64 bytes; "
        "use at least 64"
    )


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert TextOptions(path="corpus").path == str(tmp_path / "corpus")
