"""Cut a pipeline by a dynamic program over the blocks of a model and the stages.

After Alpa (OSDI 2022, section 5.2) and DAPPLE (PPoPP 2021). Several limits on the time of the
slowest stage are tried. For each limit, the program finds the cut with the smallest total time in
which no stage exceeds it. The best of these cuts minimises `(micro_batches - 1) x slowest + sum`.
Stages have memory limits, by the number of micro-batches each has in flight, and may recompute
their blocks where that makes room.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

Prefix = Sequence[float]

_ROUNDING = 1 + 1e-9
_HALVINGS = 12  # bisections for the smallest time of the slowest stage: to a four-thousandth
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
)  # factors on the smallest time of the slowest stage, tried for a smaller sum


@dataclass(frozen=True)
class StageCosts:
    """Costs of a stage on copies of a shard group. A `Prefix` has prefix sums over the units.

    seconds: seconds of a micro-batch.
    forward: seconds of the forward, a part of `seconds`.
    elements: trained elements.
    saved: bytes that autograd saves for one sample.
    entering: bytes of one sample that enter blocks.
    element_bytes: bytes that a copy holds for each trained element.
    samples: samples of a micro-batch, rounded up for the allocator.
    in_flight: micro-batches that a copy has in flight at once.
    room: bytes of a device that the stage may use.
    copies: copies of the stage, which take turns.
    can_recompute: True if the stage may recompute blocks.
    """

    seconds: Prefix
    forward: Prefix
    elements: Prefix
    saved: Prefix
    entering: Prefix
    element_bytes: float
    samples: float
    in_flight: float
    room: float
    copies: int = 1
    can_recompute: bool = True

    @cached_property
    def recomputed(self) -> Prefix:
        """Return the prefix sums of the seconds with recomputation of blocks."""
        return [s + f for s, f in zip(self.seconds, self.forward, strict=True)]

    @cached_property
    def needs(self) -> Prefix:
        """Return the prefix sums of the bytes that the stage needs without recomputation."""
        return self._needs(self.saved)

    @cached_property
    def needs_recomputed(self) -> Prefix:
        """Return the prefix sums of the bytes that the stage needs, besides its largest block, with
        recomputation."""
        return self._needs(self.entering)

    def _needs(self, values: Prefix) -> Prefix:
        """Return the prefix sums of bytes needed. `values` are prefix sums of the bytes saved for a
        sample."""
        element_bytes, flight = self.element_bytes, self.in_flight * self.samples
        return [element_bytes * e + flight * v for e, v in zip(self.elements, values, strict=True)]

    @cached_property
    def room_recomputed(self) -> float:
        """Return the bytes of the device that the largest block leaves free."""
        return self.room - self.samples * max(b - a for a, b in pairwise(self.saved))

    def end(self, first: int, slowest: float) -> int:
        """Return the last place where a stage that starts at unit `first` may end (exclusive).

        `slowest` is the limit on the seconds that the stage takes for a micro-batch, divided by the
        number of its copies.
        """
        limit = slowest * self.copies * _ROUNDING
        in_time = bisect_right(self.seconds, self.seconds[first] + limit) - 1
        in_room = bisect_right(self.needs, self.needs[first] + self.room) - 1
        if in_room >= in_time or not self.can_recompute:
            return min(in_time, in_room)
        seconds, needs = self.recomputed, self.needs_recomputed
        in_time = bisect_right(seconds, seconds[first] + limit) - 1
        fits = bisect_right(needs, needs[first] + self.room_recomputed) - 1
        return max(in_room, min(in_time, fits))

    def beginning(self, last: int, slowest: float) -> int:
        """Return the first unit at which a stage that ends before `last` may start. `slowest` is as
        in `end`."""
        limit = slowest * self.copies * _ROUNDING
        in_time = bisect_left(self.seconds, self.seconds[last] - limit)
        in_room = bisect_left(self.needs, self.needs[last] - self.room)
        if in_room <= in_time or not self.can_recompute:
            return max(in_time, in_room)
        seconds, needs = self.recomputed, self.needs_recomputed
        in_time = bisect_left(seconds, seconds[last] - limit)
        fits = bisect_left(needs, needs[last] - self.room_recomputed)
        return min(in_room, max(in_time, fits))

    def recomputes(self, first: int, last: int) -> bool:
        """Return True if a stage of the units [first, last) must recompute because its saved
        tensors do not fit."""
        return self.needs[last] - self.needs[first] > self.room

    def takes(self, first: int, last: int) -> float:
        """Return the seconds of a micro-batch on one copy of a stage of the units [first, last)."""
        prefix = self.recomputed if self.recomputes(first, last) else self.seconds
        return prefix[last] - prefix[first]


@dataclass(frozen=True)
class StageLink:
    """Cost of sending a micro-batch to the next stage.

    latency_s: seconds of an empty message.
    byte_s: seconds per byte.
    """

    latency_s: float
    byte_s: float


@dataclass(frozen=True)
class StagePartition:
    """Cut of a model into stages.

    ends: units where stages start and, last, the number of units.
    seconds: objective of the dynamic program, in seconds.
    """

    ends: tuple[int, ...]
    seconds: float


def cut(
    stages: Sequence[StageCosts], hops: Sequence[StageLink], crossing: Prefix, micro_batches: int
) -> StagePartition | None:
    """Return the best cut of the units into `stages`, or None where no cut fits the memory.

    Each stage gets at least one unit. `crossing[unit]` are the bytes of a micro-batch before every
    unit; `hops` are the costs of a send from each stage to the next.
    """
    units = len(crossing) - 1
    if len(stages) > units or _ends(stages, units, inf) is None:
        return None
    if len(stages) == 1:
        return StagePartition((0, units), micro_batches * stages[0].takes(0, units))
    min_bottleneck, best = _slowest(stages, units), None
    for factor in _SLOWER:
        slowest = min_bottleneck * factor
        if best is not None and (micro_batches - 1) * slowest >= best.seconds:
            break
        boundaries = _least_sum(stages, hops, crossing, units, slowest)
        if boundaries is None:
            continue
        times = (
            stage.takes(*ends) / stage.copies
            for stage, ends in zip(stages, pairwise(boundaries), strict=True)
        )
        stage_times = list(times)
        total = sum(time * stage.copies for time, stage in zip(stage_times, stages, strict=True))
        total += _sent(hops, crossing, boundaries)
        seconds = (micro_batches - 1) * max(stage_times) + total
        if best is None or seconds < best.seconds:
            best = StagePartition(boundaries, seconds)
    return best


def short_of_room(stages: Sequence[StageCosts], units: int) -> float:
    """Return the further bytes that every device would need for a cut to fit.

    The bytes are exact to a part in some thousands, and infinite where there are fewer units than
    stages.
    """
    if len(stages) > units:
        return inf

    def fits(more: float) -> bool:
        roomier = [replace(stage, room=stage.room + more) for stage in stages]
        return _ends(roomier, units, inf) is not None

    low, high = 0.0, 1.0
    while not fits(high):
        low, high = high, 4 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _sent(hops: Sequence[StageLink], crossing: Prefix, ends: Sequence[int]) -> float:
    """Return the seconds to send a micro-batch through all stages and its gradients back."""
    return sum(
        2 * (hop.latency_s + hop.byte_s * crossing[end])
        for hop, end in zip(hops, ends[1:-1], strict=True)
    )


def _ends(stages: Sequence[StageCosts], units: int, slowest: float) -> list[int] | None:
    """Return the latest possible end of each stage if none takes longer than `slowest` seconds.

    The list starts with 0. Returns None where the stages do not reach the last unit.
    """
    ends, place = [0], 0
    for number, stage in enumerate(stages):
        end = min(stage.end(place, slowest), units - (len(stages) - number - 1))
        if end <= place:  # from an earlier start, the stage may have a unit that it can take
            return _ends_of_all(stages, units, slowest)
        ends.append(end)
        place = end
    return ends if place == units else None


def _ends_of_all(stages: Sequence[StageCosts], units: int, slowest: float) -> list[int] | None:
    """Return the result of `_ends` by trying every unit where a stage may end."""
    ends, places = [0], [0]
    for number, stage in enumerate(stages):
        last = units - (len(stages) - number - 1)
        reached: set[int] = set()
        for place in places:
            reached.update(range(place + 1, min(stage.end(place, slowest), last) + 1))
        if not reached:
            return None
        places = sorted(reached)
        ends.append(places[-1])
    return ends if ends[-1] == units else None


def _beginnings(stages: Sequence[StageCosts], units: int, slowest: float) -> list[int]:
    """Return the earliest possible end of each stage, starting with 0, for a limit `slowest` at
    which a cut exists."""
    beginnings, place = [units], units
    for number in range(len(stages) - 1, -1, -1):
        place = max(stages[number].beginning(place, slowest), number)
        beginnings.append(place)
    return beginnings[::-1]


def _slowest(stages: Sequence[StageCosts], units: int) -> float:
    """Return the smallest time, over all cuts, of the slowest stage, in seconds, by bisection.

    The check of a limit is greedy: a stage that takes as much as it may leaves the least to later
    ones.
    """
    rate = sum(stage.copies / max(stage.seconds[units], 1e-30) for stage in stages)
    low = high = 1 / rate  # the time if units could be divided in any proportion
    while _ends(stages, units, high) is None:
        low, high = high, 2 * high
    while low == high or (low and _ends(stages, units, low) is not None):
        low, high = low / 2, low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _ends(stages, units, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _least_sum(
    stages: Sequence[StageCosts],
    hops: Sequence[StageLink],
    crossing: Prefix,
    units: int,
    slowest: float,
) -> tuple[int, ...] | None:
    """Return the ends of the cut with the smallest sum of seconds in which no stage takes longer
    than `slowest` seconds, or None where no cut exists. Ties go to the most even cut."""
    latest = _ends(stages, units, slowest)
    if latest is None:
        return None
    earliest = _beginnings(stages, units, slowest)
    limit = slowest * _ROUNDING
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for number, stage in enumerate(stages):
        hop = hops[number] if number < len(hops) else None
        high, longest = latest[number + 1], limit * stage.copies
        low = min(earliest[number + 1], high)
        sent = [
            2 * (hop.latency_s + hop.byte_s * crossing[last]) if hop else 0.0
            for last in range(low, high + 1)
        ]
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (before, ends) in best.items():
            for last in range(max(low, first + 1), min(stage.end(first, slowest), high) + 1):
                time = stage.takes(first, last)
                if time > longest:
                    continue
                total = before + sent[last - low] + time * (1 + 1e-3 * time / longest)
                if last not in reached or total < reached[last][0]:
                    reached[last] = (total, (*ends, last))
        best = reached
    return best[units][1] if units in best else None
