"""The peak bytes of a strategy's ranks, and the most samples and split units they have room for.

`member_memory.py` owns the bytes of one member of a shard group for its chunks.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property, partial

from whale_train.strategies.plan.plan import MemoryEstimate
from whale_train.strategies.schedule.instructions import Instruction
from whale_train.strategies.stage_memory.member_memory import MemberMemory
from whale_train.strategies.stages.micro_batches import Batches
from whale_train.strategies.stages.placement import (
    AxisIntervals,
    PlanningContext,
    StageChunk,
    equivalent_ranks,
)


class RankMemory:
    """The bytes that every rank needs at its peak, by the samples that it takes at a time.

    job: the strategy on its devices.
    chunks: all chunks, in the order they run.
    axes: intervals of the members of shard groups, by axis.
    orders: instructions, by copy and position.
    recomputed: stages that recompute their blocks in the backward.
    """

    def __init__(
        self,
        job: PlanningContext,
        chunks: Sequence[StageChunk],
        axes: AxisIntervals,
        orders: Sequence[Sequence[Sequence[Instruction]]],
        recomputed: Set[int],
    ) -> None:
        self._job, self._chunks, self._axes = job, chunks, axes
        self._orders, self._recomputed = orders, recomputed
        self._alike_orders = _alike_orders(orders)
        self._one_backward = job.has_one_backward(orders)
        stages = range(len(job.form.stages))
        self._held_by = [[n for n, c in enumerate(chunks) if c.stage == stage] for stage in stages]
        self._alike = [
            equivalent_ranks([axis for n in numbers for axis in chunks[n].axes], axes)
            for numbers in self._held_by
        ]
        self._held: dict[tuple[int, int, bool, float], MemberMemory] = {}
        self._estimates: dict[object, MemoryEstimate] = {}
        self._most_units: dict[object, int] = {}

    def of(self, rank: int, samples: int, own: int) -> MemoryEstimate:
        """Return the bytes that `rank` needs for micro-batches of `samples`, of which it takes
        `own` itself (fewer than all only beside copies that share them)."""
        copy, position = self._job.place_of(rank)
        stage = self._job.seats.stage_of[position]
        index = self._job.seats.positions[copy][position].index(rank)
        member = self._alike[stage][index] if self._alike[stage] else 0
        order = self._orders[copy][position]
        key = (stage, member, samples, own, self._alike_orders[id(order)])
        if key not in self._estimates:
            held = self._member(stage, member, order, samples / own if own else 1.0)
            self._estimates[key] = held.needs(order, own)
        return self._estimates[key]

    def of_batches(self, batches: Batches) -> dict[int, MemoryEstimate]:
        """Return the bytes that every rank needs for its largest micro-batch of `batches`."""
        return {rank: self.of(rank, *self._sizes(batches, rank)) for rank in self._ranks}

    def most(self, rank: int, batches: Batches) -> int:
        """Return the most samples that `rank` has room for at a time, up to the whole batch; -1
        where not even its weights fit. Where members share samples, the group's samples are those
        of `batches`."""
        room, gathered = self._job.cluster.devices[rank].room_bytes, self._sizes(batches, rank)[0]
        beside = self._job.form.stages[self._job.stage_of_rank(rank)].body is not None

        def need(own: int) -> float:
            return self.of(rank, gathered if beside else own, own).total

        return largest_fitting(need, self._job.training.global_batch, room)

    def most_units(self, rank: int, batches: Batches, own: int | None = None) -> int:
        """Return the most units of what is split beside copies (classes, experts, shards) that
        `rank` has room for beside the rest and `own` samples (None: its samples of `batches`). The
        number is at most that of all units, and 0 where not even the rest fits."""
        stage, order = self._stage_and_order(rank)
        sizes, room = self._sizes(batches, rank), self._job.cluster.devices[rank].room_bytes
        if own is not None:
            sizes = (sizes[0], own)
        key = (stage, self._alike_orders[id(order)], sizes, room)
        if key not in self._most_units:
            self._most_units[key] = self._units_within(stage, order, sizes, room)
        return self._most_units[key]

    def units(self, stage: int) -> int:
        """Return the number of units, over all members, along the finest axis of what a stage
        splits beside copies."""
        return max(self._axes[axis][-1][1] for axis in self._axes_beside(stage))

    def unit_bytes(self, rank: int, batches: Batches) -> float:
        """Return the bytes that `rank` needs for every unit of what is split beside copies."""
        stage, order = self._stage_and_order(rank)
        need = partial(self._with_units, stage, order, (self._sizes(batches, rank)[0], 1))
        units = self.units(stage)
        return (need(units) - need(1)) / max(1, units - 1)

    def _units_within(
        self, stage: int, order: Sequence[Instruction], sizes: tuple[int, int], room: float
    ) -> int:
        """Return the most units of what a stage splits beside copies that fit `room` bytes, for
        `sizes` as `_sizes` returns them; all units for a rank that takes no samples."""
        count = self.units(stage)
        if not sizes[1]:
            return count
        return max(largest_fitting(partial(self._with_units, stage, order, sizes), count, room), 0)

    def _with_units(
        self, stage: int, order: Sequence[Instruction], sizes: tuple[int, int], units: int
    ) -> float:
        """Return the bytes that a member of a stage needs with `units` along the finest axis of
        what is split, and as large a part along the other axes."""
        (samples, own), axes, finest = sizes, dict(self._axes), self.units(stage)
        for axis in self._axes_beside(stage):
            whole = axes[axis][-1][1]
            axes[axis] = ((0, units * whole // finest), (units * whole // finest, whole))
        held = self._holding(stage, axes, 0, order, samples / own)
        return held.needs(order, own).total

    def _stage_and_order(self, rank: int) -> tuple[int, Sequence[Instruction]]:
        """Return the stage that `rank` holds, and the instructions of its position in order."""
        copy, position = self._job.place_of(rank)
        return self._job.seats.stage_of[position], self._orders[copy][position]

    def _axes_beside(self, stage: int) -> Sequence[str]:
        """Return the axes along which a stage cuts what it splits beside copies."""
        chunks = (self._chunks[number] for number in self._held_by[stage])
        return [axis for chunk in chunks if chunk.shares_samples for axis in chunk.axes]

    def for_one(self, rank: int, batches: Batches) -> float:
        """Return the bytes that `rank` needs for one sample at a time, and one unit of what is
        split beside copies (a class, an expert), which sees all samples of `batches`."""
        stage, order = self._stage_and_order(rank)
        if self._job.form.stages[stage].body is None:
            return self.of(rank, 1, 1).total
        return self._with_units(stage, order, (self._sizes(batches, rank)[0], 1), 1)

    def sample_bytes(self, rank: int, batches: Batches) -> float:
        """Return the bytes that `rank` needs for every further sample at a time."""
        stage = self._job.stage_of_rank(rank)
        if self._job.form.stages[stage].body is None:
            return self.of(rank, 2, 2).total - self.of(rank, 1, 1).total
        gathered = self._sizes(batches, rank)[0]
        return self.of(rank, gathered, 2).total - self.of(rank, gathered, 1).total

    def alike(self, rank: int, batches: Batches) -> tuple[object, ...]:
        """Return the key of a rank's needs: ranks of equal keys need the same bytes."""
        copy, position = self._job.place_of(rank)
        stage = self._job.seats.stage_of[position]
        index = self._job.seats.positions[copy][position].index(rank)
        member = self._alike[stage][index] if self._alike[stage] else 0
        order = self._alike_orders[id(self._orders[copy][position])]
        return (stage, member, order, self._sizes(batches, rank)[0])

    @cached_property
    def _ranks(self) -> Sequence[int]:
        return [rank for copy in self._job.seats.positions for ranks in copy for rank in ranks]

    def _sizes(self, batches: Batches, rank: int) -> tuple[int, int]:
        """Return the samples of the largest micro-batch of a rank's copy, and the most of a
        micro-batch that the rank itself takes."""
        copy, position = self._job.place_of(rank)
        samples = batches.largest(copy)
        stage = self._job.seats.stage_of[position]
        if self._job.form.stages[stage].body is None:
            return samples, samples
        index = self._job.seats.positions[copy][position].index(rank)
        return samples, max(b - a for a, b in (of[index] for of in batches.members[copy][stage]))

    def _member(
        self, stage: int, member: int, order: Sequence[Instruction], gathered: float = 1.0
    ) -> MemberMemory:
        """Return the bytes of a member of a stage's shard groups, kept for orders that accumulate
        alike."""
        joins = self._job.accumulates(order)
        if all(self._chunks[number].beside is None for number in self._held_by[stage]):
            gathered = 1.0
        key = (stage, member, joins, gathered)
        if key not in self._held:
            self._held[key] = self._holding(stage, self._axes, member, order, gathered)
        return self._held[key]

    def _holding(
        self,
        stage: int,
        axes: AxisIntervals,
        member: int,
        order: Sequence[Instruction],
        gathered: float,
    ) -> MemberMemory:
        """Return the bytes of a member of a stage's shard groups with its shards along `axes`."""
        chunks = {number: self._chunks[number] for number in self._held_by[stage]}
        joins, again = self._job.accumulates(order), stage in self._recomputed
        return MemberMemory(
            self._job, chunks, axes, member, again, joins, gathered, self._one_backward
        )


def largest_fitting(need: Callable[[int], float], limit: int, room: float) -> int:
    """Return the largest number up to `limit` for which `need`, an ascending function to bytes, is
    within `room` bytes; -1 where even 0 is not.

    Needs are nearly linear. The search tries the number that a line between the bounds found so far
    gives and, in every other turn, the middle.
    """
    low, high = -1, limit + 1  # `low` is within `room`, `high` is not
    at_low = at_high = 0.0
    guess = 0
    halve = False
    while high - low > 1:
        asked = need(guess)
        if asked <= room:
            low, at_low = guess, asked
        else:
            high, at_high = guess, asked
        between = (low + high) // 2
        if not halve and low >= 0 and at_high > at_low:
            between = low + int((room - at_low) / (at_high - at_low) * (high - low))
        elif low >= 0 and high == limit + 1:
            between = limit
        guess = min(max(between, low + 1), high - 1)
        halve = not halve
    return low


def _alike_orders(orders: Sequence[Sequence[Sequence[Instruction]]]) -> Mapping[int, int]:
    """Return a number for every order, by its id: the same for orders that differ only in the
    numbers of their micro-batches, which ascend for each chunk in all of them."""
    by_id: dict[int, int] = {}
    numbers: dict[object, int] = {}
    for order in (order for of_copy in orders for order in of_copy):
        if id(order) not in by_id:
            kinds = tuple((instruction.kind, instruction.chunk) for instruction in order)
            by_id[id(order)] = numbers.setdefault(kinds, len(numbers))
    return by_id
