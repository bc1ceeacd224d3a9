"""Examine an Arrow table's columns before training: numbers of one shape, none missing.

The columns' short lists of nulls and lengths are always read; the numbers themselves only where
they are few.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

MOST_READ = 1 << 26  # the most numbers of a column that are read for their bounds: half a GB
_ROWS = 1 << 16  # rows that are read at once
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class WrongRow:
    """First row with a value that a column cannot have.

    row: number of the row, from 0 on.
    rule: what is wrong; `{place}` stands for the place of the row.
    remedy: what the user can do.
    """

    row: int
    rule: str
    remedy: str


@dataclass
class Column:
    """Column of numbers.

    dtype: dtype that the model gets.
    shape: shape of a row.
    least: smallest integer; None where integers were not read.
    largest: largest integer; None where integers were not read.
    is_beyond: whether a float that was read is outside the range of int64.
    nulls: number of floats that are null.
    first_null: number of the first row with a null.
    wrong: the first wrong row and its fault; None where all rows fit.
    """

    dtype: str
    shape: tuple[int, ...]
    least: int | None = None
    largest: int | None = None
    is_beyond: bool = False
    nulls: int = 0
    first_null: int = 0
    wrong: WrongRow | None = field(default=None)


def dtype_of(kind: Any) -> str | None:
    """Return the dtype that the model gets for numbers of an Arrow type, at any depth of nested
    lists.

    Return "" for a type without numbers, and None for a type that only `datasets` can decode
    (images).
    """
    import pyarrow.types as types

    leaf = _leaf(kind)
    if types.is_boolean(leaf):
        return "bool"
    if types.is_integer(leaf):
        return "int64"
    if types.is_floating(leaf):
        return "float32"
    return None if types.is_struct(leaf) or types.is_dictionary(leaf) else ""


def examined(table: Any, name: str) -> Column:
    """Return the Column of column `name` of a `datasets.Dataset`.

    `dtype_of` the column must be the dtype of numbers. Reading stops at the first wrong row.
    """
    view = table.select_columns([name]).with_format("arrow")
    kind = table.data.schema.field(name).type
    column = Column(dtype_of(kind) or "", _shape_of_first(next(_chunks(view, name))[1]))
    few = prod(column.shape) * len(table) <= MOST_READ
    reads = column.dtype != "bool" and (few or str(_leaf(kind)) == "uint64")
    for start, chunk in _chunks(view, name):
        if not _fits(chunk, column.shape, column.dtype):
            row = _first(chunk, column.shape, column.dtype)
            column.wrong = _wrong(start + row, chunk[row].as_py(), column)
            return column
        leaf = _leaf_of(chunk)
        if leaf.null_count:
            if not column.nulls:
                column.first_null = start + _first(chunk, column.shape, "")
            column.nulls += leaf.null_count
        if reads and len(leaf) > leaf.null_count:
            _read(column, leaf)
            if column.largest is not None and column.largest > _INT64.max:
                row = _first_above(chunk)
                rule = f"has {column.largest} {{place}}, more than int64 holds"
                column.wrong = WrongRow(start + row, rule, "save it as smaller numbers, or floats")
                return column
    return column


def _read(column: Column, leaf: Any) -> None:
    """Update the bounds in `column` with the numbers of a piece of the column."""
    import pyarrow.compute as compute

    ends = compute.min_max(leaf).as_py()
    if column.dtype == "float32":
        column.is_beyond |= not -(2.0**63) <= ends["min"] <= ends["max"] < 2.0**63
        return
    column.least = min(ends["min"], ends["min"] if column.least is None else column.least)
    column.largest = max(ends["max"], ends["max"] if column.largest is None else column.largest)


def _wrong(row: int, value: Any, column: Column) -> WrongRow:
    """Return the fault of row `row`, whose `value` does not fit the column."""
    if _has_null(value):
        kind = {"bool": "truth values", "int64": "whole numbers"}.get(column.dtype, "lists")
        rule = f"has no value (null) for one of its {kind} {{place}}"
        return WrongRow(
            row, rule, "write a number there, or leave the row out, before saving (map)"
        )
    try:
        shape = str(list(np.shape(value)))
    except ValueError:  # lists of different lengths within the row
        shape = "no one shape"
    rule = f"has shape {shape} {{place}}, where the first row has {list(column.shape)}"
    return WrongRow(row, rule, "pad or cut its rows to one shape before saving (map)")


def _has_null(value: Any) -> bool:
    """Return whether a value, or a value in nested lists, is None."""
    return any(map(_has_null, value)) if isinstance(value, list) else value is None


def _chunks(view: Any, name: str) -> Iterator[tuple[int, Any]]:
    """Yield the column in pieces: the number of the first row, and an Arrow array."""
    for start in range(0, len(view), _ROWS):
        for chunk in view[start : start + _ROWS].column(name).chunks:
            if len(chunk):
                yield start, _storage(chunk)
            start += len(chunk)


def _fits(array: Any, shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether all rows of `array` have the shape `shape`, and no nulls that are not allowed.

    Nulls are allowed only for floats (`dtype` "float32").
    """
    import pyarrow.compute as compute

    array = _storage(array)
    if not _is_list(array.type):
        return not shape and (dtype == "float32" or not array.null_count)
    if not shape or array.null_count:
        return False
    if not len(array):
        return True
    ends = compute.min_max(compute.list_value_length(array)).as_py()
    if (ends["min"], ends["max"]) != (shape[0], shape[0]):
        return False
    return _fits(array.flatten(), shape[1:], dtype)


def _first(array: Any, shape: tuple[int, ...], dtype: str) -> int:
    """Return the number of the first row of `array` that does not fit. At least one row must not
    fit."""
    rows = range(len(array))
    return bisect_left(rows, True, key=lambda i: not _fits(array.slice(0, i + 1), shape, dtype))


def _first_above(array: Any) -> int:
    """Return the number of the first row with an integer that int64 cannot hold.

    At least one row must have such an integer.
    """
    import pyarrow.compute as compute

    def is_above(row: int) -> bool:
        return bool(compute.max(_leaf_of(array.slice(0, row + 1))).as_py() > _INT64.max)

    return bisect_left(range(len(array)), True, key=is_above)


def _shape_of_first(array: Any) -> tuple[int, ...]:
    """Return the shape of the first row, from the first list at every depth."""
    shape: tuple[int, ...] = ()
    array = _storage(array).slice(0, 1)
    while _is_list(array.type):
        inner = _storage(array.flatten())
        length = len(inner) if len(array) == 1 and array.null_count == 0 else 0
        shape = (*shape, length)
        array = inner.slice(0, 1)
    return shape


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in lists)


def _storage(array: Any) -> Any:
    """Return the storage array of an extension array, or any other array unchanged."""
    return getattr(array, "storage", array)


def _leaf(kind: Any) -> Any:
    """Return the Arrow type of the innermost elements of nested lists."""
    kind = getattr(kind, "storage_type", kind) if not _is_json(kind) else kind
    return _leaf(kind.value_type) if _is_list(kind) else kind


def _is_json(kind: Any) -> bool:
    return str(getattr(kind, "extension_name", "")) == "arrow.json"


def _leaf_of(array: Any) -> Any:
    """Return the innermost elements of nested lists as one flat array."""
    array = _storage(array)
    return _leaf_of(array.flatten()) if _is_list(array.type) else array
