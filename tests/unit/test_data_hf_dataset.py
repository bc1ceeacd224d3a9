"""Hugging Face datasets from disk; the package is optional."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whale_train.data.dataset import Note, RowDataset
from whale_train.data.open import open_dataset
from whale_train.data.sources.hf_dataset import HfDatasetOptions
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
        InputField("input_ids", (3,), "int64", 12),
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
    ragged = (
        "=ids has shape [3] in row 1 (from 0 on), where the first row has [2]; "
        "pad or cut its rows to one shape before saving (map)"
    )
    assert message(path=path) == (
        f"data.columns.ids{ragged}\n"
        "data.columns.text=text is not numbers of one shape; turn it into numbers before saving "
        "(map), or name only the columns the model takes"
    )
    assert message(path=path, columns={"input_ids": "idz"}) == (
        f"data.columns.input_ids=idz is not a column of {path}; did you mean ids? One of: ids, text"
    )
    assert message(path=path, columns={"input_ids": "ids"}) == f"data.columns.input_ids{ragged}"
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
        "pip install 'datasets>=3'"
    )


def lines(rows: Iterable[Mapping[str, object]]) -> str:
    return "\n".join(map(json.dumps, rows))


def folder_of(parent: Path, files: Mapping[str, str]) -> Path:
    folder = parent / "files"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


NULL = "write a number there, or leave the row out, before saving (map)"
WHOLE = "write the file again, or copy it whole"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"a.jsonl": lines({"x": None if i == 3 else i} for i in range(5))},
            "data.columns.x=x has no value (null) for one of its whole numbers in row 3 (from 0 "
            f"on) of FOLDER/a.jsonl; {NULL}",
        ),
        (
            {
                "a.jsonl": lines({"x": i} for i in range(5)),
                "b.jsonl": lines({"x": None if i == 2 else i} for i in range(5)),
            },
            "data.columns.x=x has no value (null) for one of its whole numbers in row 2 (from 0 "
            f"on) of FOLDER/b.jsonl; {NULL}",
        ),
        (
            {"a.jsonl": lines({"x": [i, None if i == 3 else 2]} for i in range(5))},
            "data.columns.x=x has no value (null) for one of its whole numbers in row 3 (from 0 "
            f"on) of FOLDER/a.jsonl; {NULL}",
        ),
        (
            {"a.jsonl": lines({"x": i < 3 if i else None} for i in range(5))},
            "data.columns.x=x has no value (null) for one of its truth values in row 0 (from 0 "
            f"on) of FOLDER/a.jsonl; {NULL}",
        ),
        (
            {"a.jsonl": lines({"x": None if i == 3 else [0.5]} for i in range(5))},
            "data.columns.x=x has no value (null) for one of its lists in row 3 (from 0 on) of "
            f"FOLDER/a.jsonl; {NULL}",
        ),
        (
            {"a.jsonl": lines({"x": "b" if i == 3 else i} for i in range(5))},
            "data.columns.x=x is not numbers of one shape; turn it into numbers before saving "
            "(map), or name only the columns the model takes",
        ),
        (
            {"a.csv": f"x\n1\n{2**64 - 1}\n"},
            f"data.columns.x=x has {2**64 - 1} in row 1 (from 0 on) of FOLDER/a.csv, more than "
            "int64 holds; save it as smaller numbers, or floats",
        ),
        (
            {"a.jsonl": lines({"x": i} for i in range(5))[:-3]},
            "data.path=FOLDER/a.jsonl cannot be read as json (ArrowInvalid: JSON parse error: "
            f"Invalid value. in row 4); {WHOLE}",
        ),
        (
            {"a.jsonl": ""},
            "data.path=FOLDER/a.jsonl is empty; write the file again, or take it away",
        ),
        (
            {"a.jsonl": lines([{"x": 1}]), "b.jsonl": lines([{"y": 1, "x": 1}])},
            "data.path=FOLDER/b.jsonl has other columns than FOLDER/a.jsonl: it has y; give all "
            "files the same columns, or name one of them",
        ),
        (
            {"a.csv": "x\n1\n", "b.csv": "x\n1.5\n"},
            "data.path=FOLDER/b.csv has another kind of column x than FOLDER/a.csv (float64, there "
            "int64); give the column one kind in all files",
        ),
        (
            {"a.csv": "<html>not found</html>"},
            f"data.path=FOLDER/a.csv cannot be read as csv (it has no rows); {WHOLE}",
        ),
        (
            {"a.parquet": "version https://git-lfs.github.com/spec/v1"},
            "data.path=FOLDER/a.parquet cannot be read as parquet (ArrowInvalid: Parquet magic "
            "bytes not found in footer. Either the file is corrupted or this is not a parquet "
            f"file.); {WHOLE}",
        ),
        (
            {"a.jsonl": "{}", "b.csv": "x"},
            "data.path=FOLDER holds csv and json files; name a folder that save_to_disk wrote, or "
            "one of parquet, json or csv files alone",
        ),
    ],
)
def test_files_that_cannot_be_trained_on(
    datasets: Any, tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    folder = folder_of(tmp_path, files)
    assert message(path=str(folder)) == expected.replace("FOLDER", str(folder))


def test_values_of_parquet_are_refused_by_their_type(datasets: Any, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    day = datetime(2020, 1, 1)
    columns = {
        "decimal": [Decimal("1.5")] * 2,
        "date": [day.date()] * 2,
        "moment": [day] * 2,
        "bytes": [b"a"] * 2,
        "mapping": [{"a": 1}] * 2,
        "none": [None] * 2,
    }
    (tmp_path / "files").mkdir()
    parquet.write_table(arrow.table(columns), tmp_path / "files" / "a.parquet")
    said = message(path=str(tmp_path / "files")).splitlines()
    assert [line.split(";")[0] for line in said] == [
        f"data.columns.{name}={name} is not numbers of one shape" for name in columns
    ]


def test_a_float_that_is_null_is_said_to_be_nan(datasets: Any, tmp_path: Path) -> None:
    rows = ({"x": None if i == 3 else i / 2, "y": 1e30} for i in range(5))
    dataset = open_dataset(
        HfDatasetOptions(path=str(folder_of(tmp_path, {"a.jsonl": lines(rows)})))
    )
    assert np.isnan(dataset.samples(np.arange(5))["x"]).tolist() == [False] * 3 + [True, False]
    assert isinstance(dataset, RowDataset)
    nulls = "for what is null in column x, 1 in all, the first in row 3 (from 0 on)"
    beyond = "of column y, as whole numbers beyond int64 are read too"
    assert dataset.notes == (
        Note("data.columns.x", "NaN", nulls),
        Note("data.columns.y", "floats", beyond),
    )


def test_a_pipe_in_the_folder_is_not_waited_for(datasets: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a.jsonl": lines([{"x": 1}])})
    os.mkfifo(folder / "b.jsonl")
    assert message(path=str(folder)) == (
        f"data.path={folder}/b.jsonl is a pipe; name a file or folder on a disk"
    )


def test_a_saved_dataset_that_is_damaged(datasets: Any, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    datasets.Dataset.from_dict(ROWS).save_to_disk(str(path))
    (arrow,) = path.glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:300])
    said = message(path=str(path))
    assert said.startswith(f"data.path={path} is not what save_to_disk wrote (ArrowInvalid: ")
    assert said.endswith("); save it again, or copy the folder whole")
