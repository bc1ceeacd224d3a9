"""Samples of several sources in fixed proportions.

All samples have one numbering: first those of the first source, then those of the second, and so
on. The sample at a place of a run is a function of the place alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from whale_train.data.dataset import Batch, Dataset, Indices, Note
from whale_train.data.permutation import permute
from whale_train.data.random_bits import random_bits, stream_key
from whale_train.strategies.graph.operation_graph import InputField

BLOCK = 1000  # places of a run in which the proportions are exact


@dataclass(frozen=True, eq=False)
class MixedDataset:
    """A dataset of several sources, all with the same fields.

    sources: the sources.
    shares: places of every `BLOCK` places that each source has.
    notes: the plan's notes on the data.
    """

    sources: tuple[Dataset, ...]
    shares: tuple[int, ...]
    notes: tuple[Note, ...] = ()

    @property
    def fields(self) -> tuple[InputField, ...]:
        return self.sources[0].fields

    @property
    def num_samples(self) -> int:
        return sum(source.num_samples for source in self.sources)

    @property
    def num_evaluation_samples(self) -> int:
        return sum(source.num_evaluation_samples for source in self.sources)

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        draws = indices if draws is None else draws
        places, batches = [], []
        for number, first, stop in self._ranges([x.num_samples for x in self.sources]):
            own = np.flatnonzero((indices >= first) & (indices < stop))
            if len(own):
                places.append(own)
                batches.append(self.sources[number].samples(indices[own] - first, draws[own]))
        return _merged(places, batches)

    def evaluation_samples(self, indices: Indices) -> Batch:
        places, batches = [], []
        for number, first, stop in self._ranges([x.num_evaluation_samples for x in self.sources]):
            own = np.flatnonzero((indices >= first) & (indices < stop))
            if len(own):
                places.append(own)
                batches.append(self.sources[number].evaluation_samples(indices[own] - first))
        return _merged(places, batches)

    @staticmethod
    def _ranges(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the number, the first index and the index after the last of each source."""
        stops = np.cumsum(sizes)
        return [(i, int(stops[i]) - size, int(stops[i])) for i, size in enumerate(sizes)]

    @cached_property
    def order(self) -> "MixedOrder":
        """Return the order in which samples are taken."""
        return MixedOrder(tuple(source.num_samples for source in self.sources), self.shares)


@dataclass(frozen=True)
class MixedOrder:
    """The order in which samples of several sources are taken.

    sizes: number of samples of each source.
    shares: places of every `BLOCK` places that each source has.
    """

    sizes: tuple[int, ...]
    shares: tuple[int, ...]

    @property
    def first(self) -> Indices:
        """Return the index of the first sample of each source, int64 `[sources]`."""
        sizes = np.array(self.sizes, np.int64)
        return np.cumsum(sizes) - sizes

    def indices_at(self, positions: Indices, seed: int, shuffle: bool) -> Indices:
        """Return the samples at places `positions` of the whole run, int64 `[n]`.

        Every source is read from beginning to end repeatedly. With `shuffle`, each pass is a new
        permutation.
        """
        sources, taken = self.taken_at(positions, seed)
        indices, first = np.empty(len(positions), np.int64), self.first
        for number, size in enumerate(self.sizes):
            own = sources == number
            passes, places = np.divmod(taken[own], size)
            if shuffle:
                key = random_bits(stream_key(f"order of source {number}", seed), passes)
                places = permute(places, size, key)
            indices[own] = first[number] + places
        return indices

    def taken_at(self, positions: Indices, seed: int) -> tuple[Indices, Indices]:
        """Return the source of each place in `positions`, and the number of earlier places in the
        run with the same source; both int64 `[n]`."""
        blocks, slots = np.divmod(positions, BLOCK)
        sources, taken = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks):
            own = blocks == block
            of_slot, before = self._block(int(block), seed)
            sources[own] = of_slot[slots[own]]
            taken[own] = before[slots[own]] + block * np.asarray(self.shares)[sources[own]]
        return sources, taken

    def taken_before(self, position: int, seed: int) -> tuple[int, ...]:
        """Return the number of samples of each source that are taken before place `position`."""
        blocks, slots = divmod(position, BLOCK)
        of_slot, _ = self._block(blocks, seed)
        begun = np.bincount(of_slot[:slots], minlength=len(self.sizes))
        return tuple(blocks * share + int(n) for share, n in zip(self.shares, begun, strict=True))

    def _block(self, block: int, seed: int) -> tuple[Indices, Indices]:
        """Return the source of each place of a block, and the number of earlier places in the block
        with the same source; both int64 `[BLOCK]`."""
        key = random_bits(stream_key("mixture", seed), np.array([block]))
        order = permute(np.arange(BLOCK), BLOCK, key)
        sources = np.searchsorted(np.cumsum(self.shares), order, side="right")
        before = np.empty(BLOCK, np.int64)
        for number, share in enumerate(self.shares):
            before[sources == number] = np.arange(share)
        return sources, before


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the number of places in every `BLOCK` for sources with `weights`.

    The numbers are proportional to the weights, rounded by the largest-remainder method, and sum to
    `BLOCK`. A source may get 0.
    """
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    shares = np.floor(exact).astype(np.int64)
    most = np.argsort(shares - exact, kind="stable")[: BLOCK - int(shares.sum())]
    shares[most] += 1
    return tuple(int(share) for share in shares)


def _merged(places: Sequence[Indices], batches: Sequence[Batch]) -> Batch:
    """Return several batches as one. The samples of each batch go to its `places`."""
    count = sum(map(len, places))
    merged: Batch = {}
    for name, first in batches[0].items():
        merged[name] = np.empty((count, *first.shape[1:]), first.dtype)
        for own, batch in zip(places, batches, strict=True):
            merged[name][own] = batch[name]
    return merged
