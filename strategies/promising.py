"""Which strategies promise most: what a search resolves first, before it proves anything.

Bounds order these badly where kinds of devices have stages of their own, as stages on unlike
devices wait in ways that no bound sees. Under 1F1B they wait for most and under zero_bubble for
least, so that the sum of both bounds says more than either.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from whale_train.strategies.space import Arrangement, Batched, Candidate, Opening, Space
from whale_train.strategies.used_bounds import UsedBounds

_OF_FAMILY = 4  # tried, until one of them can be
_OF_WIDTH = 2  # unordered stages looked at again, of as many copies and shards
_NEAR = 1.25  # times the most promising: what is further off is not looked at again


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

    def of_each_family(self, openings: Iterable[Opening]) -> list[list[tuple[float, Candidate]]]:
        """Of every family of copies that follow each other, what one would write by hand, the most
        promising first: candidates with their bounds."""
        batched: defaultdict[str, list[tuple[float, Batched]]] = defaultdict(list)
        for opening in openings:
            for each in self.space.batched(opening) if not opening.arrangement.by_kind else ():
                batched[each.family].append((self.bounds.least_of_batched(each), each))
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
        widths: defaultdict[tuple[int, int], list[_Look]] = defaultdict(list)
        for orders in self._orders(openings):
            numbers = self._micro_batches(orders[0])
            for look in self._looks(orders[0], numbers[2 * len(numbers) // 3 :][:1], orders):
                widths[orders[0].copies, orders[0].shards].append(look)
        best = [
            look for each in widths.values() for look in nsmallest(_OF_WIDTH, each, key=_promise)
        ]
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

    def _orders(self, openings: Mapping[Opening, float]) -> Iterator[list[Arrangement]]:
        """Arrangements by kind that differ in the order of their stages, those of the least bound
        first."""
        alike: defaultdict[object, list[tuple[float, Arrangement]]] = defaultdict(list)
        for opening, bound in openings.items():
            shape = opening.arrangement
            if shape.by_kind and opening.rounds == 1:
                key = (shape.devices, shape.copies, *sorted(shape.parts))
                alike[key].append((bound, shape))
        for listed in alike.values():
            yield [shape for _, shape in sorted(listed)]

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


def _promise(look: _Look) -> float:
    return look.promise
