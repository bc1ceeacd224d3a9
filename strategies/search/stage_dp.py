"""Where a pipeline is cut: a dynamic programme over the blocks of a model and the stages.

After Alpa (OSDI 2022, section 5.2) and DAPPLE (PPoPP 2021): of all cuts whose slowest stage takes
no longer than some time, the one that takes least in all, for the slowest times worth it; what is
minimised is `(micro_batches - 1) x slowest + sum`. Stages have limits of memory, by the number of
micro-batches each has in flight, and may compute their blocks again where that makes room.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

Prefix = Sequence[float]

_ROUNDING = 1 + 1e-9
_HALVINGS = 12  # of the interval in which the least slowest time is: to a four-thousandth
_SLOWER = (
    1.0,
    1.03,
    1.1,
    1.25,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
)  # times that least, tried for the sake of a smaller sum


@dataclass(frozen=True)
class Stage:
    """A stage on `copies` of a shard group. Prefix sums over the units: the `seconds` of a
    micro-batch, as they are and where blocks are computed `again`; the bytes `held` whatever the
    schedule, those `saved` of a micro-batch, those that enter blocks (`entering`). `in_flight` is
    how many micro-batches a copy has at once, `room` the bytes of a device. `can_again`: the stage
    may compute blocks again."""

    seconds: Prefix
    again: Prefix
    held: Prefix
    saved: Prefix
    entering: Prefix
    in_flight: float
    room: float
    copies: int = 1
    can_again: bool = True

    @cached_property
    def needs(self) -> Prefix:
        """Prefix sums of the bytes that the stage needs where it saves all."""
        return [h + self.in_flight * s for h, s in zip(self.held, self.saved, strict=True)]

    @cached_property
    def needs_again(self) -> Prefix:
        """The same where it computes blocks again, the largest of which is there once more."""
        return [h + self.in_flight * s for h, s in zip(self.held, self.entering, strict=True)]

    @cached_property
    def room_again(self) -> float:
        """The room that is left beside the largest block."""
        return self.room - max(b - a for a, b in pairwise(self.saved))

    def end(self, first: int, slowest: float) -> int:
        """Return the last unit before which a stage that begins at `first` may end."""
        limit = slowest * self.copies * _ROUNDING
        in_time = bisect_right(self.seconds, self.seconds[first] + limit) - 1
        in_room = bisect_right(self.needs, self.needs[first] + self.room) - 1
        if in_room >= in_time or not self.can_again:
            return min(in_time, in_room)
        again = bisect_right(self.again, self.again[first] + limit) - 1
        room = bisect_right(self.needs_again, self.needs_again[first] + self.room_again) - 1
        return max(in_room, min(again, room))

    def beginning(self, last: int, slowest: float) -> int:
        """Return the first unit with which a stage that ends before `last` may begin."""
        limit = slowest * self.copies * _ROUNDING
        in_time = bisect_left(self.seconds, self.seconds[last] - limit)
        in_room = bisect_left(self.needs, self.needs[last] - self.room)
        if in_room <= in_time or not self.can_again:
            return max(in_time, in_room)
        again = bisect_left(self.again, self.again[last] - limit)
        room = bisect_left(self.needs_again, self.needs_again[last] - self.room_again)
        return min(in_room, max(again, room))

    def is_again(self, first: int, last: int) -> bool:
        """Whether the stage computes its blocks again, as it has no room to save all."""
        return self.needs[last] - self.needs[first] > self.room

    def takes(self, first: int, last: int) -> float:
        """Return the seconds of a micro-batch on one copy."""
        prefix = self.again if self.is_again(first, last) else self.seconds
        return prefix[last] - prefix[first]


@dataclass(frozen=True)
class Hop:
    """What sends a micro-batch to the next stage: `latency_s` and seconds a byte."""

    latency_s: float
    byte_s: float


@dataclass(frozen=True)
class Cut:
    """The units where stages begin and the last one ends, and the seconds that are minimised."""

    ends: tuple[int, ...]
    seconds: float


def cut(
    stages: Sequence[Stage], hops: Sequence[Hop], crossing: Prefix, micro_batches: int
) -> Cut | None:
    """Return the best cut of the units among `stages`, each of which has one at least. A
    micro-batch has `crossing` bytes before every unit, and `hops` say what sends them. None where
    no cut has room."""
    units = len(crossing) - 1
    if len(stages) > units or _ends(stages, units, inf) is None:
        return None
    if len(stages) == 1:
        return Cut((0, units), micro_batches * stages[0].takes(0, units))
    least, best = _slowest(stages, units), None
    for factor in _SLOWER:
        slowest = least * factor
        if best is not None and (micro_batches - 1) * slowest >= best.seconds:
            break
        found = _least_sum(stages, hops, crossing, units, slowest)
        if found is None:
            continue
        times = (
            stage.takes(*ends) / stage.copies
            for stage, ends in zip(stages, pairwise(found), strict=True)
        )
        listed = list(times)
        total = sum(time * stage.copies for time, stage in zip(listed, stages, strict=True))
        total += _sent(hops, crossing, found)
        seconds = (micro_batches - 1) * max(listed) + total
        if best is None or seconds < best.seconds:
            best = Cut(found, seconds)
    return best


def _sent(hops: Sequence[Hop], crossing: Prefix, ends: Sequence[int]) -> float:
    """Return the seconds in which a micro-batch is sent from stage to stage, and back."""
    return sum(
        2 * (hop.latency_s + hop.byte_s * crossing[end])
        for hop, end in zip(hops, ends[1:-1], strict=True)
    )


def _ends(stages: Sequence[Stage], units: int, slowest: float) -> list[int] | None:
    """Return where stages end at the latest, none taking longer than `slowest`; None where they
    do not reach the last unit."""
    found, place = [0], 0
    for number, stage in enumerate(stages):
        end = min(stage.end(place, slowest), units - (len(stages) - number - 1))
        if end <= place:
            return None
        found.append(end)
        place = end
    return found if place == units else None


def _beginnings(stages: Sequence[Stage], units: int, slowest: float) -> list[int]:
    """Return where stages end at the earliest, for times in which there is a cut."""
    found, place = [units], units
    for number in range(len(stages) - 1, -1, -1):
        place = max(stages[number].beginning(place, slowest), number)
        found.append(place)
    return found[::-1]


def _slowest(stages: Sequence[Stage], units: int) -> float:
    """Return the least time that the slowest stage takes in any cut, by bisection: a stage that
    takes as much as it may leaves the least to the later ones."""
    rate = sum(stage.copies / max(stage.seconds[units], 1e-30) for stage in stages)
    low = high = 1 / rate
    while _ends(stages, units, high) is None:
        low, high = high, 2 * high
    for _ in range(_HALVINGS if high > low else 0):
        middle = (low + high) / 2
        if _ends(stages, units, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _least_sum(
    stages: Sequence[Stage], hops: Sequence[Hop], crossing: Prefix, units: int, slowest: float
) -> tuple[int, ...] | None:
    """Return the cut with the least sum of seconds, no stage taking longer than `slowest`; of equal
    sums, the most even."""
    latest = _ends(stages, units, slowest)
    if latest is None:
        return None
    earliest = _beginnings(stages, units, slowest)
    limit = slowest * _ROUNDING
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for number, stage in enumerate(stages):
        hop = hops[number] if number < len(hops) else None
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        low = min(earliest[number + 1], latest[number + 1])
        for last in range(low, latest[number + 1] + 1):
            sent = 2 * (hop.latency_s + hop.byte_s * crossing[last]) if hop else 0.0
            for first, (before, ends) in best.items():
                if first >= last or stage.end(first, slowest) < last:
                    continue
                time = stage.takes(first, last)
                if time > limit * stage.copies:
                    continue
                total = before + sent + time * (1 + 1e-3 * time / (limit * stage.copies))
                if last not in found or total < found[last][0]:
                    found[last] = (total, (*ends, last))
        best = found
    return best[units][1] if units in best else None
