"""Hugging Face datasets from disk; the package is optional."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whale_train.data.hf_dataset import HfDatasetOptions
from whale_train.data.open import open_dataset
from whale_train.errors import ConfigError
from whale_train.strategies.graph.operation_graph import InputField

ROWS = {
    "tokens": [[i, i + 1, i + 2] for i in range(10)],
    "weight": [i / 4 for i in range(10)],
    "label": [i % 3 for i in range(10)],
}


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return module


def message(**options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        open_dataset(HfDatasetOptions(**options)).samples(np.arange(2))
    return str(raised.value)


def test_saved_columns_come_out_under_the_models_names(datasets: Any, tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({**ROWS, "text": ["a"] * 10})
    table = table.cast_column("label", datasets.ClassLabel(names=["x", "y", "z"]))
    table.save_to_disk(str(tmp_path / "saved"))
    dataset = open_dataset(
        HfDatasetOptions(
            path=str(tmp_path / "saved"),
            columns={"input_ids": "tokens", "labels": "label", "weight": "weight"},
        )
    )
    assert dataset.fields == (
        InputField("input_ids", (3,), "int64"),
        InputField("labels", (), "int64", 3),
        InputField("weight", (), "float32"),
    )
    assert dataset.num_samples == 10
    batch = dataset.samples(np.array([7, 0, 7]))
    assert batch["input_ids"].tolist() == [[7, 8, 9], [0, 1, 2], [7, 8, 9]]
    assert batch["labels"].tolist() == [1, 0, 1]
    assert batch["weight"].tolist() == [1.75, 0, 1.75]
    assert [batch[field.name].dtype for field in dataset.fields] == ["int64", "int64", "float32"]


def test_one_of_several_splits(datasets: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    parts = {n: datasets.Dataset.from_dict({"x": [i] * 4}) for i, n in enumerate(("train", "test"))}
    datasets.DatasetDict(parts).save_to_disk(path)
    for split, expected in ((None, 0), ("test", 1)):
        dataset = open_dataset(HfDatasetOptions(path=path, split=split))
        assert dataset.samples(np.array([3]))["x"].tolist() == [expected]
    assert message(path=path, split="tset") == (
        f"data.split=tset is not a split of {path}; did you mean test? One of: test, train"
    )


@pytest.mark.parametrize("kind", ["parquet", "json", "csv"])
def test_a_folder_of_files(datasets: Any, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(2):
        rows = {"x": [number * 2, number * 2 + 1], "y": [0.5, 1.5]}
        getattr(datasets.Dataset.from_dict(rows), f"to_{kind}")(str(folder / f"{number}.{kind}"))
    dataset = open_dataset(HfDatasetOptions(path=str(folder), evaluation_fraction=0.25))
    assert (dataset.num_samples, dataset.num_evaluation_samples) == (3, 1)
    training = dataset.samples(np.arange(3))["x"].tolist()
    held = dataset.evaluation_samples(np.arange(1))["x"].tolist()
    assert sorted(training + held) == [0, 1, 2, 3]


def test_faults(datasets: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    rows = {"ids": [[1, 2], [1, 2, 3]], "text": ["a", "b"]}
    datasets.Dataset.from_dict(rows).save_to_disk(path)
    assert message(path=f"{tmp_path}/svaed") == (
        f"data.path={tmp_path}/svaed does not exist; did you mean {path}?"
    )
    assert message(path=path) == (
        "data.columns.text=text is not numbers of one shape; turn it into numbers before saving "
        "(map), or name only the columns the model takes"
    )
    assert message(path=path, columns={"input_ids": "idz"}) == (
        f"data.columns.input_ids=idz is not a column of {path}; did you mean ids? One of: ids, text"
    )
    assert message(path=path, columns={"input_ids": "ids"}) == (
        "data.columns.input_ids=ids has a row of shape [3] where the first one has [2]; "
        "pad or cut its rows to one shape before saving (map)"
    )
    assert message(path=path, split="train") == (
        f"data.split=train names a split, but {path} holds a single dataset; leave it out"
    )
    (tmp_path / "nothing").mkdir()
    assert message(path=f"{tmp_path}/nothing") == (
        f"data.path={tmp_path}/nothing is not a dataset; "
        "name a folder that save_to_disk wrote, or one of parquet, json or csv files alone"
    )


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert message(path=str(tmp_path)) == (
        "data=hf_dataset needs the package datasets, which is not installed; "
        "install whale-train[hf]"
    )
