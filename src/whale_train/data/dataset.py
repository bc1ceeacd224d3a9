"""Datasets: single samples by index, and one set of rows split into training and evaluation.

The indices of an optimizer step are chosen in `order.py`, never here.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import StringConstraints

from whale_train.data.permutation import permute
from whale_train.data.random_bits import stream_key
from whale_train.strategies.graph.operation_graph import InputField
from whale_train.validation import IDENTIFIER

Indices = NDArray[np.int64]
LENGTHS = " lengths"  # suffix of a batch's arrays `[n]` with the lengths of a field before padding
Batch = dict[str, NDArray[Any]]
EvaluationSets = Mapping[Annotated[str, StringConstraints(pattern=IDENTIFIER)], Mapping[str, Any]]


class Dataset(Protocol):
    """Samples by index. Any rank may read any samples, at the cost of those samples alone."""

    @property
    def fields(self) -> tuple[InputField, ...]:
        """Return the tensors of one sample, named like the model's forward arguments."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples to train on; at least one."""

    @property
    def num_evaluation_samples(self) -> int:
        """Return the number of samples that are held back from training."""

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        """Return the training samples `indices`, in the order asked for.

        indices: int64 `[n]`, each in 0..num_samples-1.
        draws: int64 `[n]`, seeds of all that is random in the samples; None takes the indices. In a
            run they follow from the seed and each sample's place in the run.

        The result has an array `[n, *field.shape]` of the field's dtype for each field.
        """

    def evaluation_samples(self, indices: Indices) -> Batch:
        """Return the held-back samples `indices`, in the order asked for.

        `indices` are int64 `[n]`, each in 0..num_evaluation_samples-1. The result has the form of
        the result of `samples`.
        """


@dataclass(frozen=True, eq=False)
class HeldBackRows:
    """Rows of a dataset that are held back: the same rows for every seed and on every machine.

    num_rows: number of all rows.
    rows: numbers of the rows held back, int64, ascending.

    Rows are drawn at random, because a file is often sorted (by class, by name). The other rows
    keep their order, so that `shuffle=false` reads a file in order.
    """

    num_rows: int
    rows: Indices

    def training_rows(self, indices: Indices) -> Indices:
        """Return the row number of each training sample in `indices`, int64 `[n]`."""
        training_before = self.rows - np.arange(len(self.rows))
        return indices + np.searchsorted(training_before, indices, side="right")


def hold_back(num_rows: int, fraction: float) -> HeldBackRows:
    """Return the rows to hold back: `fraction` of `num_rows`, rounded to the nearest whole number.

    `fraction` is at least 0 and below 1. A fraction above 0 of two or more rows holds back at least
    one row, and at least one row is left to train on.
    """
    wanted = max(1, round(fraction * num_rows)) if fraction else 0
    count = min(wanted, num_rows - 1)
    drawn = permute(np.arange(count), num_rows, stream_key("held back", 0))
    return HeldBackRows(num_rows, np.sort(drawn))


@dataclass(frozen=True)
class Note:
    """A plan's remark on the data.

    key: key of the config that the remark is on.
    value: what the data of that key is taken for.
    reason: the reason.
    """

    key: str
    value: str
    reason: str


@dataclass(frozen=True, eq=False)
class RowDataset:
    """A dataset over rows, some of which are held back.

    fields: tensors of one sample.
    held_back: rows that are held back.
    read_rows: function that returns the rows of given numbers, int64 `[n]`, as a batch. The second
        argument, int64 `[n]`, seeds what is random in each row.
    read_field: function that returns one field of consecutive rows, `[n, *field.shape]`; None where
        `first_row` cannot search the data.
    notes: the plan's notes on the data.
    workers: processes of each rank that read training samples; 0 reads in a thread of the rank.
    longest: fields whose batches are cut to their longest row. A batch also has the rows' lengths,
        int64 `[n]`, under the field's name followed by `LENGTHS`.
    read_held_back: as `read_rows`, for held-back rows; None takes `read_rows`.
    """

    fields: tuple[InputField, ...]
    held_back: HeldBackRows
    read_rows: Callable[[Indices, Indices], Batch]
    read_field: Callable[[InputField, slice], NDArray[Any]] | None = None
    notes: tuple[Note, ...] = ()
    workers: int = 0
    longest: tuple[str, ...] = ()
    read_held_back: Callable[[Indices, Indices], Batch] | None = None

    @property
    def num_samples(self) -> int:
        return self.held_back.num_rows - self.num_evaluation_samples

    @property
    def num_evaluation_samples(self) -> int:
        return len(self.held_back.rows)

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        draws = indices if draws is None else draws
        return self.read_rows(self.held_back.training_rows(indices), draws)

    def evaluation_samples(self, indices: Indices) -> Batch:
        read = self.read_held_back or self.read_rows
        return read(self.held_back.rows[indices], indices)


@dataclass(frozen=True)
class Place:
    """Place of an integer in the data.

    row: number of the row, from 0 on, among all rows including those held back.
    value: the integer.
    """

    row: int
    value: int


_CHUNK_BYTES = 1 << 26


def can_be_searched(dataset: Dataset) -> bool:
    """Return whether `first_row` can search the dataset."""
    return isinstance(dataset, RowDataset) and dataset.read_field is not None


def first_row(
    dataset: Dataset, field: InputField, chosen: Callable[[NDArray[Any]], NDArray[Any]]
) -> Place | None:
    """Return the first row with `chosen` integers in `field`, and the first of these integers, or
    None where there is no such row.

    chosen: function that takes the values of some rows, `[n, *field.shape]`, and returns the values
        that are looked for.

    Rows that are held back count. The field is read from its first row on. `can_be_searched` must
    be true for the dataset.
    """
    assert isinstance(dataset, RowDataset)
    assert dataset.read_field is not None
    num_rows = dataset.held_back.num_rows
    step = max(1, _CHUNK_BYTES // (8 * math.prod(field.shape)))
    for start in range(0, num_rows, step):
        values = dataset.read_field(field, slice(start, min(start + step, num_rows)))
        if not chosen(values).size:
            continue
        row = bisect_left(
            range(len(values)), True, key=lambda i: bool(chosen(values[: i + 1]).size)
        )
        return Place(start + row, int(chosen(values[row : row + 1]).flat[0]))
    return None
