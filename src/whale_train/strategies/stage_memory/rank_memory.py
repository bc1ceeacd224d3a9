"""The peak bytes of a strategy's ranks, and the most samples and split units that fit.

`member_memory.py` owns the bytes of one member of a shard group for its chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType

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
from whale_train.strategies.stages.recomputation import Units


class RankMemory:
    """The peak bytes of every rank, as a function of its samples per micro-batch.

    job: the strategy on its devices.
    chunks: all chunks, in the order they run.
    axes: intervals of the members of shard groups, by axis.
    orders: instructions, by replica and position.
    recomputed: paths of the modules that are recomputed in the backward, by stage.
    offloaded: paths of the modules whose saved tensors are on the host, by stage.
    parts: the relative part of every copy of a stage in the state that ZeRO partitions, by stage,
        where our own engine does so; empty where DeepSpeed partitions it equally, or nothing is
        partitioned.
    """

    def __init__(
        self,
        job: PlanningContext,
        chunks: Sequence[StageChunk],
        axes: AxisIntervals,
        orders: Sequence[Sequence[Sequence[Instruction]]],
        recomputed: Units,
        offloaded: Units = MappingProxyType({}),
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.parts = parts
        self._fractions = {
            rank: part / sum(of_stage)
            for of_stage, groups in zip(parts, job.replicas, strict=bool(parts))
            for part, ranks in zip(of_stage, groups, strict=bool(of_stage))
            for rank in ranks
        }
        self._job, self._chunks, self._axes = job, chunks, axes
        self._orders, self._recomputed, self._offloaded = orders, recomputed, offloaded
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

    def with_parts(self, parts: Sequence[Sequence[int]]) -> "RankMemory":
        """Return the memory of the same ranks with other parts of the state."""
        units = (self._recomputed, self._offloaded)
        return RankMemory(self._job, self._chunks, self._axes, self._orders, *units, parts)

    def of(
        self, rank: int, samples: int, own: int, fraction: float | None = None
    ) -> MemoryEstimate:
        """Return the peak bytes of `rank` for micro-batches of `samples`, of which the rank takes
        `own` itself. `own` is smaller than `samples` only where the members of a shard group share
        a micro-batch. With a `fraction`, the rank keeps so much of its copies' state, and not its
        part of it."""
        copy, position = self._job.place_of(rank)
        stage = self._job.seats.stage_of[position]
        index = self._job.seats.positions[copy][position].index(rank)
        member = self._alike[stage][index] if self._alike[stage] else 0
        order = self._orders[copy][position]
        fraction = self._fractions.get(rank) if fraction is None else fraction
        key = (stage, member, samples, own, self._alike_orders[id(order)], fraction)
        if key not in self._estimates:
            held = self._member(stage, member, order, samples / own if own else 1.0)
            self._estimates[key] = held.needs(order, own, fraction)
        return self._estimates[key]

    def part_within(self, rank: int, batches: Batches) -> float:
        """Return the most of its copies' state that `rank` has room for beside its samples of
        `batches`, as a fraction; more than 1 where it could keep more than all of it, and 0 where
        it has no room for any."""
        sizes, room = self._sizes(batches, rank), self._job.cluster.devices[rank].room_bytes
        return largest_part(lambda part: self.of(rank, *sizes, part).total, room)

    def of_batches(self, batches: Batches) -> dict[int, MemoryEstimate]:
        """Return the peak bytes of every rank for its largest micro-batch of `batches`."""
        return {rank: self.of(rank, *self._sizes(batches, rank)) for rank in self._ranks}

    def on_hosts(self, rank: int, batches: Batches) -> float:
        """Return the peak bytes of saved tensors that `rank` has on its host."""
        stage, order = self._stage_and_order(rank)
        if not self._offloaded.get(stage):
            return 0.0
        samples, own = self._sizes(batches, rank)
        copy, position = self._job.place_of(rank)
        index = self._job.seats.positions[copy][position].index(rank)
        member = self._alike[stage][index] if self._alike[stage] else 0
        held = self._member(stage, member, order, samples / own if own else 1.0)
        return held.host_bytes(order, own)

    def most(self, rank: int, batches: Batches, fraction: float | None = None) -> int:
        """Return the most samples per micro-batch that fit the memory of `rank`, up to the global
        batch; -1 where not even the weights fit. `fraction` is as in `of`.

        Where the members of a shard group share a micro-batch, its size is taken from `batches`.
        """
        room, gathered = self._job.cluster.devices[rank].room_bytes, self._sizes(batches, rank)[0]
        beside = self._job.form.stages[self._job.stage_of_rank(rank)].body is not None

        def need(own: int) -> float:
            return self.of(rank, gathered if beside else own, own, fraction).total

        return largest_fitting(need, self._job.training.global_batch, room)

    def most_units(self, rank: int, batches: Batches, own: int | None = None) -> int:
        """Return the most units (classes, experts, shards) of a split part that fit the memory of
        `rank`.

        The units come on top of the replicated rest and of `own` samples (None: the rank's samples
        of `batches`). The result is at most the number of all units, and 0 where not even the rest
        fits.
        """
        stage, order = self._stage_and_order(rank)
        sizes, room = self._sizes(batches, rank), self._job.cluster.devices[rank].room_bytes
        if own is not None:
            sizes = (sizes[0], own)
        key = (stage, self._alike_orders[id(order)], sizes, room)
        if key not in self._most_units:
            self._most_units[key] = self._units_within(stage, order, sizes, room)
        return self._most_units[key]

    def units(self, stage: int) -> int:
        """Return the number of units of the split parts of a stage, over all members, along the
        finest axis."""
        return max(self._axes[axis][-1][1] for axis in self._axes_beside(stage))

    def unit_bytes(self, rank: int, batches: Batches) -> float:
        """Return the bytes that `rank` needs for each unit of a split part."""
        stage, order = self._stage_and_order(rank)
        need = partial(self._with_units, stage, order, (self._sizes(batches, rank)[0], 1))
        units = self.units(stage)
        return (need(units) - need(1)) / max(1, units - 1)

    def _units_within(
        self, stage: int, order: Sequence[Instruction], sizes: tuple[int, int], room: float
    ) -> int:
        """Return the most units of a stage's split parts that fit `room` bytes; all units for a
        rank that takes no samples. `sizes` is a result of `_sizes`."""
        count = self.units(stage)
        if not sizes[1]:
            return count
        return max(largest_fitting(partial(self._with_units, stage, order, sizes), count, room), 0)

    def _with_units(
        self, stage: int, order: Sequence[Instruction], sizes: tuple[int, int], units: int
    ) -> float:
        """Return the peak bytes of a member of a stage that holds `units` along the finest axis of
        the split parts, and the same fraction of every other axis."""
        (samples, own), axes, finest = sizes, dict(self._axes), self.units(stage)
        for axis in self._axes_beside(stage):
            axis_units = axes[axis][-1][1]
            axes[axis] = (
                (0, units * axis_units // finest),
                (units * axis_units // finest, axis_units),
            )
        held = self._holding(stage, axes, 0, order, samples / own)
        return held.needs(order, own).total

    def _stage_and_order(self, rank: int) -> tuple[int, Sequence[Instruction]]:
        """Return the stage of `rank`, and the instructions of its position in order."""
        copy, position = self._job.place_of(rank)
        return self._job.seats.stage_of[position], self._orders[copy][position]

    def _axes_beside(self, stage: int) -> Sequence[str]:
        """Return the axes along which a stage cuts the parts that are split beside replicas."""
        chunks = (self._chunks[number] for number in self._held_by[stage])
        return [axis for chunk in chunks if chunk.shares_samples for axis in chunk.axes]

    def for_one(self, rank: int, batches: Batches) -> float:
        """Return the fewest bytes with which `rank` can run: one sample per micro-batch and one
        unit (a class, an expert) of a split part, which runs on all samples of `batches`."""
        stage, order = self._stage_and_order(rank)
        if self._job.form.stages[stage].body is None:
            return self.of(rank, 1, 1).total
        return self._with_units(stage, order, (self._sizes(batches, rank)[0], 1), 1)

    def sample_bytes(self, rank: int, batches: Batches) -> float:
        """Return the bytes that `rank` needs for each further sample of a micro-batch."""
        stage = self._job.stage_of_rank(rank)
        if self._job.form.stages[stage].body is None:
            return self.of(rank, 2, 2).total - self.of(rank, 1, 1).total
        gathered = self._sizes(batches, rank)[0]
        return self.of(rank, gathered, 2).total - self.of(rank, gathered, 1).total

    def alike(self, rank: int, batches: Batches) -> tuple[object, ...]:
        """Return a key of the memory needs of `rank`: ranks with equal keys need the same bytes."""
        copy, position = self._job.place_of(rank)
        stage = self._job.seats.stage_of[position]
        index = self._job.seats.positions[copy][position].index(rank)
        member = self._alike[stage][index] if self._alike[stage] else 0
        order = self._alike_orders[id(self._orders[copy][position])]
        part = self._fractions.get(rank)
        return (stage, member, order, self._sizes(batches, rank)[0], part)

    @cached_property
    def _ranks(self) -> Sequence[int]:
        return [rank for copy in self._job.seats.positions for ranks in copy for rank in ranks]

    def _sizes(self, batches: Batches, rank: int) -> tuple[int, int]:
        """Return two numbers of samples: the largest micro-batch of the replica of `rank`, and the
        largest part of a micro-batch that `rank` takes itself."""
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
        """Return the memory of a member of a stage's shard groups. It is cached for all orders that
        accumulate gradients alike."""
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
        """Return the memory of a member of a stage's shard groups with its shards along `axes`."""
        chunks = {number: self._chunks[number] for number in self._held_by[stage]}
        joins = self._job.accumulates(order)
        again = self._recomputed.get(stage, frozenset())
        sent = self._offloaded.get(stage, frozenset())
        pieces = 1 + max((x.micro_batch for x in order), default=0)
        micro_batch = self._job.training.global_batch / self._job.form.copies / pieces
        return MemberMemory(
            *(self._job, chunks, axes, member, again, joins, gathered, self._one_backward),
            sent=sent,
            micro_batch=micro_batch,
        )


def largest_part(need: Callable[[float], float], room: float) -> float:
    """Return the largest fraction whose `need` is at most `room` bytes, to one in ten millions; 0
    where even 0 needs more. `need` gives bytes and increases. Its lines are few, so the search
    goes on along the line between its bounds."""
    low, at_low = 0.0, need(0.0)
    if at_low > room:
        return 0.0
    high, at_high = 1.0, need(1.0)
    while at_high <= room:
        low, at_low = high, at_high
        high *= 2.0
        at_high = need(high)
        if high > 2.0**20:  # the state takes next to nothing
            return high
    for _ in range(60):
        if high - low <= 1e-7 * high:
            break
        middle = low + (room - at_low) / (at_high - at_low) * (high - low)
        middle = min(max(middle, low + 0.01 * (high - low)), high - 0.01 * (high - low))
        asked = need(middle)
        if asked <= room:
            low, at_low = middle, asked
        else:
            high, at_high = middle, asked
    return low


def largest_fitting(need: Callable[[int], float], limit: int, room: float) -> int:
    """Return the largest number from 0 to `limit` whose `need` is at most `room` bytes; -1 where
    even 0 needs more. `need` gives bytes, and must not decrease.

    The search interpolates between its bounds, since needs are nearly linear, and bisects in every
    other turn.
    """
    low, high = -1, limit + 1  # `low` fits `room`, `high` does not
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
    """Return a class number for every order, by the `id` of the order. Orders of one class differ
    only in the numbers of their micro-batches, which ascend for each chunk."""
    by_id: dict[int, int] = {}
    numbers: dict[object, int] = {}
    for order in (order for of_copy in orders for order in of_copy):
        if id(order) not in by_id:
            kinds = tuple((instruction.kind, instruction.chunk) for instruction in order)
            by_id[id(order)] = numbers.setdefault(kinds, len(numbers))
    return by_id
