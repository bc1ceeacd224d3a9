"""`data=hf_dataset`: a Hugging Face dataset on this machine's disk, mapped into memory by Arrow.

Nothing is downloaded. Columns must be numbers of one shape: the user tokenises and pads text, and
decodes and resizes images, by `map` before `save_to_disk`.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import (
    Batch,
    Dataset,
    EvaluationSets,
    Indices,
    Note,
    RowDataset,
    hold_back,
)
from whale_train.data.files import files_in, place_of, read_files, read_saved
from whale_train.data.paths import (
    UserPath,
    missing_path,
    path_error,
    refuse_special,
    unreadable,
)
from whale_train.data.sources.columns import Column, WrongRow, dtype_of, examined
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.extras import how_to_install
from whale_train.strategies.graph.operation_graph import InputField


class HfDatasetOptions(BaseModel):
    """Options of `data=hf_dataset`.

    path: folder that `save_to_disk` wrote, or folder of parquet, json, jsonl or csv files.
    split: the split to use, where several were saved together.
    columns: column of each forward argument; None takes every column under its own name.
    shuffle: whether epochs are permuted.
    evaluation_fraction: fraction of the samples that is held back.
    evaluation: evaluation sets by name, each this data with other options; None has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["hf_dataset"] = "hf_dataset"
    path: UserPath
    split: str | None = None
    columns: Mapping[str, str] | None = None
    shuffle: bool = True
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)
    evaluation: EvaluationSets | None = None


def open_hf_dataset(options: HfDatasetOptions) -> Dataset:
    """Return a dataset with one field for each column.

    Integers become int64 and floats float32; shapes are those of the first row. Bounds of integers
    are known for `ClassLabel` columns, and for columns that can be read in a second. Null floats
    become NaN, and a note says so.

    Raises ConfigError when the package, the files, the split or a column is missing, when a file
    cannot be read, and when a column is not numbers of one shape, lacks a value, or has integers
    that int64 cannot hold. Columns that `datasets` decodes, such as images, are checked as they are
    read.
    """
    source = _load(options.path)
    table = _select_split(source.table, options)
    columns = _columns(table.column_names, options)
    if not len(table):
        raise path_error(options.path, "holds no rows", "save at least one")
    table = table.select_columns(list(dict.fromkeys(columns.values())))
    kinds = {name: dtype_of(table.data.schema.field(name).type) for name in table.column_names}
    examinations = {name: examined(table, name) for name, kind in kinds.items() if kind}
    table = table.with_format("numpy")
    faults: list[Fault] = []
    fields: list[InputField] = []
    notes: list[Note] = []
    for name, column in columns.items():
        examination = examinations.get(column) or _decoded(table, column, kinds[column])
        if examination is None:
            faults.append(_not_numbers(name, column))
        elif examination.wrong is not None:
            faults.append(_wrong_row(name, column, examination.wrong, source))
        elif 0 in examination.shape:
            rule = f"has empty lists, of shape {list(examination.shape)}"
            remedy = "save at least one number a row, or name other columns"
            faults.append(Fault(f"data.columns.{name}", column, rule, remedy))
        else:
            fields.append(_field(name, examination, table.features[column]))
            notes += _notes(name, column, examination, source.reader)
    if faults:
        raise ConfigError(faults)

    def read_rows(rows: Indices, draws: Indices) -> Batch:
        read = table[rows.tolist()]
        return {x.name: _stacked(read[columns[x.name]], x, columns[x.name]) for x in fields}

    def read_field(field: InputField, rows: slice) -> NDArray[Any]:
        column = columns[field.name]
        return _stacked(table.select_columns([column])[rows][column], field, column)

    held_back = hold_back(len(table), options.evaluation_fraction)
    return RowDataset(tuple(fields), held_back, read_rows, read_field, tuple(notes))


@dataclass(frozen=True)
class _Source:
    """Rows on the disk.

    table: a `Dataset` or `DatasetDict`.
    reader: reader of the files; '' for a table saved by `save_to_disk`.
    files: files that the table is made of; none for a table saved by `save_to_disk`.
    """

    table: Any
    reader: str = ""
    files: tuple[str, ...] = ()

    def place(self, row: int) -> str:
        """Return the place of row `row` as text for messages."""
        if not self.files:
            return f"in row {row} (from 0 on)"
        file, row = place_of(row, self.reader, self.files)
        return f"in row {row} (from 0 on) of {file}"


def _load(path: str) -> _Source:
    """Return the rows at `path`. Raises ConfigError where they cannot be read."""
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        rule = "needs the package datasets, which is not installed"
        raise ConfigError(
            [Fault("data", "hf_dataset", rule, how_to_install("datasets"))]
        ) from error
    if not os.path.exists(path):
        raise missing_path(path)
    folder = Path(path)
    try:
        refuse_special(path)
        if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
            return _Source(read_saved(path))
        reader, files = files_in(folder)
    except OSError as error:
        raise unreadable(error, path) from error
    return _Source(read_files(reader, files), reader, tuple(files))


def _select_split(loaded: Any, options: HfDatasetOptions) -> Any:
    """Return the table of the split that `options` name, `train` by default. Raises ConfigError."""
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
    """Return the column of each forward argument.

    Raises ConfigError for columns that are not in `present`.
    """
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


def _wrong_row(name: str, column: str, wrong: WrongRow, source: _Source) -> Fault:
    rule = wrong.rule.format(place=source.place(wrong.row))
    return Fault(f"data.columns.{name}", column, rule, wrong.remedy)


def _notes(name: str, column: str, examination: Column, reader: str) -> Iterator[Note]:
    """Yield the notes on a column: on nulls that become NaN, and on integers read as floats."""
    key = f"data.columns.{name}"
    if examination.nulls:
        reason = (
            f"for what is null in column {column}, {examination.nulls} in all, the first in row "
        )
        yield Note(key, "NaN", f"{reason}{examination.first_null} (from 0 on)")
    if examination.is_beyond and reader == "json":
        reason = f"of column {column}, as whole numbers beyond int64 are read too"
        yield Note(key, "floats", reason)


def _decoded(table: Any, column: str, kind: str | None) -> Column | None:
    """Return the column of arrays that `datasets` decodes from a column without numbers on disk.

    Shape and dtype are those of the first row. Returns None where `datasets` decodes no numbers
    either, or where the column has none (`kind` "").
    """
    if kind is not None:
        return None
    first = np.asarray(table[0][column])
    if first.dtype.kind not in "biuf":
        return None
    dtypes = {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}
    return Column(dtypes[first.dtype.kind], first.shape)


def _field(name: str, examination: Column, feature: Any) -> InputField:
    largest = -1 if examination.largest is None else examination.largest
    bound = max(getattr(feature, "num_classes", None) or 0, largest + 1)
    return InputField(
        name, examination.shape, examination.dtype, bound, min(0, examination.least or 0)
    )


def _stacked(values: Any, field: InputField, column: str) -> NDArray[Any]:
    """Return the values of a column as `[n, *field.shape]`, in the field's dtype.

    Raises ConfigError where a row has another shape than the first, as images may have.
    """
    is_array = isinstance(values, np.ndarray) and values.dtype != object
    if is_array and values.shape[1:] == field.shape:
        return np.asarray(values, dtype=field.dtype)
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
