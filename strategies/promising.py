"""Which strategies promise most: what a search simulates first.

Bounds order these badly where kinds of devices have stages of their own, as stages on unlike
devices wait in ways that no bound sees. Under 1F1B they wait for most and under zero_bubble for
least, so that the sum of both bounds says more than either.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import TypeVar

from whale_train.strategies.space import Arrangement, Batched, Candidate, Opening, Space
from whale_train.strategies.used_bounds import UsedBounds

T = TypeVar("T")

_OF_FAMILY = 4  # tried, until one of them can be
_OF_WIDTH = 2  # unordered stages looked at again, of as many copies and shards
_NEAR = 1.25  # times the most promising: what is further off is not looked at again
_FAR = 1.5  # times the most promising: what is like the first looked at is not looked at


@dataclass(frozen=True)
class _Look:
    """What an arrangement with so many micro-batches promises, less being better; `orders` are
    all those of its stages."""

    promise: float
    asked: Candidate
    orders: Sequence[Arrangement]


@dataclass(frozen=True)
class Promising:
    """What promises most in `space`."""

    space: Space
    bounds: UsedBounds

    def of_each_family(
        self, openings: Iterable[Opening], best_s: float
    ) -> list[list[tuple[float, Candidate]]]:
        """Of every family of copies that follow each other, what one would write by hand, the most
        promising first: candidates with their bounds, where a step of `best_s` is known."""
        batched: defaultdict[str, list[tuple[float, Batched]]] = defaultdict(list)
        looked: defaultdict[str, list[tuple[float, Sequence[Batched]]]] = defaultdict(list)
        for opening in (each for each in openings if each.ordered):
            every = list(self.space.batched(opening))
            pipelines = [each for each in every if each.micro_batches]
            for first in _one_of(pipelines):
                looked[opening.family].append((self.bounds.least_of_batched(first), pipelines))
            batched[opening.family] += [(0.0, each) for each in every if not each.micro_batches]
        for family, firsts in looked.items():
            nearest = min(best_s, *(least for least, _ in firsts))
            for each in (each for least, of in firsts if least <= _FAR * nearest for each in of):
                batched[family].append((self.bounds.least_of_batched(each), each))
        families: defaultdict[str, list[tuple[float, Candidate]]] = defaultdict(list)
        for listed in batched.values():
            for _, each in nsmallest(_OF_FAMILY, listed):
                for candidate in self.space.candidates(each):
                    if self.bounds.shortfall_bytes(candidate) <= 0:
                        least = self.bounds.least(candidate)
                        families[candidate.family].append((least, candidate))
        return sorted(nsmallest(_OF_FAMILY, each) for each in families.values())

    def of_kinds(self, openings: Mapping[Opening, float]) -> list[Candidate]:
        """Pipelines with stages on every kind of device, the most promising first; `openings` come
        with their bounds. Of stages that differ in their order alone, one order is looked at, and
        all of it, in other numbers of micro-batches too, where that promises much."""
        widths = self._of_widths(openings)
        firsts = [self._first_of(alike) for alike in widths]
        nearest = min((look.promise for first in firsts for look in first), default=0.0)
        best = list[_Look]()
        for alike, first in zip(widths, firsts, strict=True):
            is_far = all(look.promise > _FAR * nearest for look in first)
            best += first if is_far else self._best_of(alike)
        nearest = min((look.promise for look in best), default=0.0)
        found = list(best)
        for look in best:
            if look.promise <= _NEAR * nearest:
                shape, number = look.asked.arrangement, look.asked.micro_batches
                for order in look.orders[1:]:
                    found += self._looks(order, [number], look.orders)
                others = [each for each in self._micro_batches(shape) if each != number]
                found += self._looks(shape, others, look.orders)
        return [replace(each.asked, schedule="zero_bubble") for each in sorted(found, key=_promise)]

    def _of_widths(self, openings: Mapping[Opening, float]) -> list[list[tuple[float, Opening]]]:
        """Pipelines with stages by kind, of as many copies and shards, with their bounds, the least
        of these first."""
        widths: defaultdict[tuple[int, int], list[tuple[float, Opening]]] = defaultdict(list)
        for opening, bound in openings.items():
            if not opening.ordered and opening.rounds == 1:
                shape = opening.arrangement
                widths[shape.copies, shape.shards].append((bound, opening))
        return [sorted(each) for each in widths.values()]

    def _first_of(self, alike: Sequence[tuple[float, Opening]]) -> list[_Look]:
        """The one with the least bound that may fit."""
        looks = (self._looks_at(opening) for _, opening in alike)
        return next((look for look in looks if look), [])

    def _best_of(self, alike: Sequence[tuple[float, Opening]]) -> list[_Look]:
        """The most promising of them."""
        best = list[_Look]()
        for bound, opening in alike:
            if len(best) == _OF_WIDTH and best[-1].promise <= 2 * bound:
                break  # nor does any of the others promise more
            best = nsmallest(_OF_WIDTH, best + self._looks_at(opening), key=_promise)
        return best

    def _looks_at(self, opening: Opening) -> list[_Look]:
        """At its parts in the order whose bound is least, with many micro-batches."""
        orders = sorted((self.bounds.least_of(each), each) for each in self.space.orders(opening))
        shapes = [each.arrangement for _, each in orders]
        return list(self._looks(shapes[0], _one_of(self._micro_batches(shapes[0])), shapes))

    def _micro_batches(self, shape: Arrangement) -> list[int]:
        return [each.micro_batches for each in self.space.batched(Opening(shape))]

    def _looks(
        self, shape: Arrangement, numbers: Iterable[int], orders: Sequence[Arrangement]
    ) -> Iterator[_Look]:
        """At the arrangement with each of these numbers of micro-batches."""
        for number in numbers:
            asked = Candidate(shape, number)
            if self.bounds.shortfall_bytes(asked) <= 0:
                least = self.bounds.least(replace(asked, schedule="zero_bubble"))
                yield _Look(self.bounds.least(asked) + least, asked, orders)


def _one_of(numbers: Sequence[T]) -> Sequence[T]:
    """Of these, the fewest first, one with many; none of none."""
    return numbers[2 * len(numbers) // 3 :][:1]


def _promise(look: _Look) -> float:
    return look.promise
