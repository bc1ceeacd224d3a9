"""Datasets: single samples by index, and one set of rows split into training and evaluation.

Which indices an optimizer step takes is decided in `order.py`, never here.
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

Indices = NDArray[np.int64]
LENGTHS = " lengths"  # ends the names of arrays `[n]` in a batch: rows of a field before padding
Batch = dict[str, NDArray[Any]]
EvaluationSets = Mapping[
    Annotated[str, StringConstraints(pattern=r"^[A-Za-z]\w*$")], Mapping[str, Any]
]


class Dataset(Protocol):
    """Samples by index. Reading some samples touches only what they need, in whatever rank asks."""

    @property
    def fields(self) -> tuple[InputField, ...]:
        """Return the tensors of one sample, named like the model's forward arguments."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples to train on; at least one."""

    @property
    def num_evaluation_samples(self) -> int:
        """Return the number of samples held back, none of which is a training sample."""

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        """Return the training samples `indices`, in the order asked for.

        `indices` are int64 `[n]`, each in 0..num_samples-1. `draws`, int64 `[n]`, choose all that
        is random in the samples; those of a run follow from its seed and the samples' places in
        it. None: the indices. The result has, per field, an array `[n, *field.shape]` of the
        field's dtype.
        """

    def evaluation_samples(self, indices: Indices) -> Batch:
        """Return the samples `indices` of those held back, in the order asked for.

        `indices` are int64 `[n]`, each in 0..num_evaluation_samples-1. The result is as that of
        `samples`.
        """


@dataclass(frozen=True, eq=False)
class HeldBackRows:
    """Rows of a dataset that are held back: the same ones for every seed and on every machine.

    num_rows: number of all rows.
    rows: numbers of the rows held back, int64, ascending.

    Rows are drawn at random, because a file is often sorted (by class, by name). The other rows
    keep their order, so that `shuffle=false` reads a file as it is.
    """

    num_rows: int
    rows: Indices

    def training_rows(self, indices: Indices) -> Indices:
        """Return the row of each of the training samples `indices`, int64 `[n]`."""
        training_before = self.rows - np.arange(len(self.rows))
        return indices + np.searchsorted(training_before, indices, side="right")


def hold_back(num_rows: int, fraction: float) -> HeldBackRows:
    """Return the rows to hold back: the nearest whole number to `fraction` of `num_rows`.

    `fraction` is at least 0 and below 1. At least one row is held back where it is above 0 and
    there are two rows or more, and never all are.
    """
    wanted = max(1, round(fraction * num_rows)) if fraction else 0
    count = min(wanted, num_rows - 1)
    drawn = permute(np.arange(count), num_rows, stream_key("held back", 0))
    return HeldBackRows(num_rows, np.sort(drawn))


@dataclass(frozen=True)
class Note:
    """Remark of a plan on the data.

    key: key of the config that the remark is on.
    value: what the data of that key is taken for.
    reason: why.
    """

    key: str
    value: str
    reason: str


@dataclass(frozen=True, eq=False)
class RowDataset:
    """A dataset over rows, some of which are held back.

    fields: tensors of one sample.
    held_back: rows that are held back.
    read_rows: returns the rows of given numbers, int64 `[n]`, as a batch; their draws, int64 `[n]`,
        choose what is random in them.
    read_field: returns one field of rows that follow each other, `[n, *field.shape]`; None for data
        that the project has or makes itself.
    notes: what a plan says of the data.
    workers: processes of each rank that read samples to train on; 0: a thread of the rank does.
    longest: fields whose batches are cut to their longest row. Beside each of them, batches have
        the rows' own lengths, int64 `[n]`, under its name and `LENGTHS`.
    read_held_back: as `read_rows`, of rows that are held back; None: `read_rows` does.
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

    row: number of the row, held back or not, from 0 on.
    value: the integer.
    """

    row: int
    value: int


_CHUNK_BYTES = 1 << 26


def can_be_searched(dataset: Dataset) -> bool:
    """Return whether the data has rows that somebody may have written wrongly."""
    return isinstance(dataset, RowDataset) and dataset.read_field is not None


def first_row(
    dataset: Dataset, field: InputField, chosen: Callable[[NDArray[Any]], NDArray[Any]]
) -> Place | None:
    """Return the first row with `chosen` integers in `field`, and the first of these integers.

    Rows that are held back count. Return None where there is no such row. `chosen` takes the values
    of some rows, `[n, *field.shape]`, and returns those of them that are looked for. The field is
    read from its first row on. The data must be one that can be searched (`can_be_searched`).
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
