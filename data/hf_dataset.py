"""`data=hf_dataset`: a Hugging Face dataset on this machine's disk, mapped into memory by Arrow.

Nothing is downloaded. Columns must be numbers of one shape: tokenising and padding text, decoding
and resizing images are the user's `map` before `save_to_disk`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import Batch, Dataset, Indices, RowDataset, hold_back
from whale_train.data.paths import UserPath, missing_path, path_error
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.strategies.graph.operation_graph import InputField

_READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


class HfDatasetOptions(BaseModel):
    """`path`: what `save_to_disk` wrote, or a folder of parquet, json, jsonl or csv files.
    `split`: which one, where several were saved together. `columns`: forward argument -> column;
    None takes every column under its own name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["hf_dataset"] = "hf_dataset"
    path: UserPath
    split: str | None = None
    columns: Mapping[str, str] | None = None
    shuffle: bool = True
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)


def open_hf_dataset(options: HfDatasetOptions) -> Dataset:
    """Return a dataset of one field a column. Integers become int64 and floats float32; shapes
    are those of the first row. Upper bounds are known of `ClassLabel` columns only: others would
    have to be read whole.

    Raises ConfigError when the package, the files, the split or a column is missing, when a column
    is not numbers, and, when such a row is read, for rows of another shape than the first.
    """
    table = _select_split(_load(options.path), options)
    columns = _columns(table.column_names, options)
    if not len(table):
        raise path_error(options.path, "holds no rows", "save at least one")
    table = table.select_columns(list(dict.fromkeys(columns.values()))).with_format("numpy")
    first = {column: np.asarray(value) for column, value in table[0].items()}
    faults = [
        _not_numbers(name, column)
        for name, column in columns.items()
        if first[column].dtype.kind not in "biuf"
    ]
    if faults:
        raise ConfigError(faults)
    fields = tuple(
        InputField(
            name,
            first[column].shape,
            _handed_over(first[column]),
            getattr(table.features[column], "num_classes", 0),
        )
        for name, column in columns.items()
    )

    def read_rows(rows: Indices) -> Batch:
        read = table[rows.tolist()]
        return {
            field.name: _stacked(read[columns[field.name]], field, columns[field.name])
            for field in fields
        }

    return RowDataset(fields, hold_back(len(table), options.evaluation_fraction), read_rows)


def _load(path: str) -> Any:
    """Return the `Dataset` or `DatasetDict` at `path`."""
    try:
        import datasets
    except ImportError as error:
        rule = "needs the package datasets, which is not installed"
        raise ConfigError([Fault("data", "hf_dataset", rule, "install whale-train[hf]")]) from error
    folder = Path(path)
    if not folder.exists():
        raise missing_path(path)
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return datasets.load_from_disk(path)
    files = sorted(file for file in folder.glob("*") if file.suffix in _READERS)
    readers = {_READERS[file.suffix] for file in files}
    if len(readers) != 1:
        found = f"holds {' and '.join(sorted(readers))} files" if readers else "is not a dataset"
        remedy = "name a folder that save_to_disk wrote, or one of parquet, json or csv files alone"
        raise path_error(path, found, remedy)
    return datasets.load_dataset(
        readers.pop(), data_files=[str(file) for file in files], split="train"
    )


def _select_split(loaded: Any, options: HfDatasetOptions) -> Any:
    if not isinstance(loaded, dict):
        if options.split is not None:
            rule = f"names a split, but {options.path} holds a single dataset"
            raise ConfigError([Fault("data.split", options.split, rule, "leave it out")])
        return loaded
    split = options.split or "train"
    if split not in loaded:
        rule = f"is not a split of {options.path}"
        raise ConfigError([Fault("data.split", split, rule, nearest(split, loaded))])
    return loaded[split]


def _columns(present: list[str], options: HfDatasetOptions) -> dict[str, str]:
    columns = dict(options.columns or {name: name for name in present})
    faults = [
        Fault(
            f"data.columns.{name}",
            column,
            f"is not a column of {options.path}",
            nearest(column, present),
        )
        for name, column in columns.items()
        if column not in present
    ]
    if faults:
        raise ConfigError(faults)
    return columns


def _not_numbers(name: str, column: str) -> Fault:
    return Fault(
        f"data.columns.{name}",
        column,
        "is not numbers of one shape",
        "turn it into numbers before saving (map), or name only the columns the model takes",
    )


def _handed_over(value: NDArray[Any]) -> str:
    return {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}[value.dtype.kind]


def _stacked(values: Any, field: InputField, column: str) -> NDArray[Any]:
    """Return the column's values as `[n, *field.shape]`; Arrow's lists may be of any length."""
    for value in values:
        if np.shape(value) != field.shape:
            fault = Fault(
                f"data.columns.{field.name}",
                column,
                f"has a row of shape {list(np.shape(value))} where the first one has "
                f"{list(field.shape)}",
                "pad or cut its rows to one shape before saving (map)",
            )
            raise ConfigError([fault])
    return np.stack([np.asarray(value, dtype=field.dtype) for value in values])
