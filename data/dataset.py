"""What a dataset is to the rest of the house, and how one set of rows becomes two parts.

A dataset answers for single samples by number; which numbers an optimizer step takes is decided
in `order.py`, never here.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from whale_train.data.permutation import permute
from whale_train.data.random_bits import stream_key
from whale_train.strategies.graph.operation_graph import InputField

Indices = NDArray[np.int64]
Batch = dict[str, NDArray[Any]]


class Dataset(Protocol):
    """Samples by index. Reading some touches only what they need, in whatever rank asks."""

    @property
    def fields(self) -> tuple[InputField, ...]:
        """The tensors of one sample, named like the model's forward arguments."""

    @property
    def num_samples(self) -> int:
        """Samples to train on; at least one."""

    @property
    def num_evaluation_samples(self) -> int:
        """Samples held back, none of which is a training sample."""

    def samples(self, indices: Indices) -> Batch:
        """Training samples `indices` (int64 `[n]`, each in 0..num_samples-1): per field an array
        `[n, *field.shape]` of the field's dtype, in the order asked for."""

    def evaluation_samples(self, indices: Indices) -> Batch:
        """Return the samples held back, as `samples` those to train on; each index in
        0..num_evaluation_samples-1."""


@dataclass(frozen=True, eq=False)
class HeldBackRows:
    """Which of `num_rows` rows are held back: the same ones for every seed and on every machine.

    `rows` are theirs, ascending. They are drawn at random, because a file is often sorted (by
    class, by name), and the rest keep their order, so that `shuffle=false` reads a file as it is.
    """

    num_rows: int
    rows: Indices

    def training_rows(self, indices: Indices) -> Indices:
        """Return the rows of training samples `indices`."""
        training_before = self.rows - np.arange(len(self.rows))
        return indices + np.searchsorted(training_before, indices, side="right")


def hold_back(num_rows: int, fraction: float) -> HeldBackRows:
    """Hold back the nearest whole number of rows to `fraction` (0 <= fraction < 1) of `num_rows`;
    at least one when any are asked for, and never all."""
    wanted = max(1, round(fraction * num_rows)) if fraction else 0
    count = min(wanted, num_rows - 1)
    drawn = permute(np.arange(count), num_rows, stream_key("held back", 0))
    return HeldBackRows(num_rows, np.sort(drawn))


@dataclass(frozen=True)
class Note:
    """What a plan says of the data: of which key, what it is taken for, and why."""

    key: str
    value: str
    reason: str


@dataclass(frozen=True, eq=False)
class RowDataset:
    """A dataset over rows that are read by `read_rows`, some of them held back.

    `read_field` reads one field of rows that follow each other (None: data that the project has or
    makes itself); `notes` are what a plan should say of the data.
    """

    fields: tuple[InputField, ...]
    held_back: HeldBackRows
    read_rows: Callable[[Indices], Batch]
    read_field: Callable[[InputField, slice], NDArray[Any]] | None = None
    notes: tuple[Note, ...] = ()

    @property
    def num_samples(self) -> int:
        return self.held_back.num_rows - self.num_evaluation_samples

    @property
    def num_evaluation_samples(self) -> int:
        return len(self.held_back.rows)

    def samples(self, indices: Indices) -> Batch:
        return self.read_rows(self.held_back.training_rows(indices))

    def evaluation_samples(self, indices: Indices) -> Batch:
        return self.read_rows(self.held_back.rows[indices])


@dataclass(frozen=True)
class Place:
    """Where data has an integer, and the integer."""

    row: int
    value: int


_CHUNK_BYTES = 1 << 26


def can_be_searched(dataset: Dataset) -> bool:
    """Return whether the data has rows that somebody may have written wrongly."""
    return isinstance(dataset, RowDataset) and dataset.read_field is not None


def first_row(
    dataset: Dataset, field: InputField, chosen: Callable[[NDArray[Any]], NDArray[Any]]
) -> Place | None:
    """Return the first row with integers in `field` that are `chosen`, held back or not, and the
    first of them; None where there is no such row.

    `chosen` returns those of some rows' values `[n, *field.shape]`. The field is read through, of
    data that can be searched.
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
