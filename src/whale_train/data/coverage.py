"""Count how often the samples of a run were taken, from the places of the run that were trained on.

A run takes the places 0, 1, 2, ... of an order that is a function of the seed and the sizes of the
data. The places of one epoch are a permutation of the samples. So whole epochs are counted without
a table, and only missing and repeated places are looked up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from whale_train.data.dataset import Indices
from whale_train.data.mixture import MixedOrder
from whale_train.data.order import indices_from

Places = tuple[int, int]  # an interval [start, stop) of places of a run
CHECKED = 2**20  # places at either end of an order that are looked up one by one


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a run takes samples.

    num_samples: number of samples to train on.
    seed: the seed of the order.
    shuffle: whether samples are shuffled.
    mixture: the sources and their shares; None where there is one source.
    """

    num_samples: int
    seed: int
    shuffle: bool
    mixture: MixedOrder | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of samples of each source."""
        return (self.num_samples,) if self.mixture is None else self.mixture.sizes

    def samples(self, places: Places) -> Indices:
        """Return the numbers of the samples at `places`, int64 `[stop - start]`."""
        start, stop = places
        if self.mixture is None:
            return indices_from(start, self.num_samples, stop - start, self.seed, self.shuffle)
        at = np.arange(start, stop, dtype=np.int64)
        return self.mixture.indices_at(at, self.seed, self.shuffle)

    def epochs(self, places: Places) -> Indices:
        """Return the epoch, counted from 0, in which each of the samples at `places` is taken;
        int64 `[stop - start]`. In a mixture, it is the epoch of the sample's source."""
        at = np.arange(*places, dtype=np.int64)
        if self.mixture is None:
            return at // self.num_samples
        sources, taken = self.mixture.taken_at(at, self.seed)
        return taken // np.array(self.mixture.sizes, np.int64)[sources]

    def taken_before(self, place: int) -> tuple[int, ...]:
        """Return the number of samples of each source that are taken at places before `place`."""
        return (place,) if self.mixture is None else self.mixture.taken_before(place, self.seed)


def missing_places(taken: Iterable[Places], stop: int) -> list[Places]:
    """Return the places from 0 to `stop` - 1 that are in none of the intervals `taken`,
    ascending."""
    ordered = sorted(taken)
    gaps, reached = list[Places](), 0
    for start, end in [*ordered, (stop, stop)]:
        if start > reached:
            gaps.append((reached, min(start, stop)))
        reached = max(reached, end)
    return [places for places in gaps if places[0] < places[1]]


def repeated_places(taken: Iterable[Places]) -> list[Places]:
    """Return the places that are in more than one of the intervals `taken`, ascending."""
    ordered = sorted(places for places in taken if places[0] < places[1])
    repeated, reached = list[Places](), 0
    for start, stop in ordered:
        if start < reached:
            repeated.append((start, min(stop, reached)))
        reached = max(reached, stop)
    return repeated


def taken_twice(order: SampleOrder, stop: int) -> tuple[int, ...]:
    """Return the samples that the order takes twice in an epoch: none if an epoch is a permutation.

    Only the first and the last `CHECKED` places before `stop` are looked up.
    """
    twice: set[int] = set()
    for places in {(0, min(stop, CHECKED)), (max(0, stop - CHECKED), stop)}:
        samples, epochs = order.samples(places), order.epochs(places)
        numbered = (epochs - epochs.min(initial=0)) * order.num_samples + samples
        pairs, counts = np.unique(numbered, return_counts=True)
        twice |= {int(pair) % order.num_samples for pair in pairs[counts > 1]}
    return tuple(sorted(twice))


def not_tiled(replicas: Sequence[Iterable[Places]], batch: int) -> tuple[Places, ...]:
    """Return the places of a batch that the replicas of a part of the model do not take exactly
    once.

    replicas: the places of the batch that each replica takes.
    batch: number of places of the batch.
    """
    taken = [places for replica in replicas for places in dict.fromkeys(replica)]
    outside = [(max(start, batch), stop) for start, stop in taken if stop > batch]
    return (*missing_places(taken, batch), *repeated_places(taken), *outside)
