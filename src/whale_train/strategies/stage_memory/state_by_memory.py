"""Choose the parts in which copies keep the state that ZeRO partitions: where memory binds, a
device keeps as much as it has memory left beside its share of the batch."""

from collections.abc import Sequence
from math import floor

from whale_train.strategies.stage_memory.rank_memory import RankMemory
from whale_train.strategies.stages.micro_batches import Batches
from whale_train.strategies.stages.placement import PlanningContext

_WHOLE = 1_000_000  # the sum of chosen parts


def with_state_parts(job: PlanningContext, memory: RankMemory, batches: Batches) -> RankMemory:
    """Return `memory` with the parts of the state that the strategy asks for, or that follow from
    the memory that each rank has left beside its samples of `batches`; unchanged where DeepSpeed
    partitions the state equally."""
    keeper = job.form.keeper
    if keeper is None or not keeper.state.is_uneven:
        return memory
    if keeper.state.mode == "listed":
        return memory.with_parts([keeper.state.parts] * len(job.replicas))
    within: dict[object, float] = {}

    def part_within(rank: int) -> float:
        key = (*memory.alike(rank, batches), job.cluster.devices[rank].room_bytes)
        if key not in within:
            within[key] = memory.part_within(rank, batches)
        return within[key]

    parts: list[Sequence[int]] = []
    for groups in job.replicas:
        # A stage without copies has nothing to partition. The shards of a copy have its part.
        room = [min(part_within(rank) for rank in ranks) for ranks in groups]
        parts.append(parts_in_proportion(room) if len(groups) > 1 else ())
    return memory.with_parts(parts)


def parts_in_proportion(room: Sequence[float]) -> tuple[int, ...]:
    """Return relative parts in proportion to `room`, the most of the state that each copy can keep
    as a fraction; equal parts where none can keep any.

    If the fractions add up to at least 1, no part is larger than its copy's fraction, but for
    rounding to one in a million.
    """
    total = sum(room)
    if not total:
        return (1,) * len(room)
    parts = [floor(_WHOLE * fraction / total) for fraction in room]
    # What rounding leaves goes to the copies that can keep most.
    left = _WHOLE - sum(parts)
    for copy in sorted(range(len(room)), key=lambda copy: -room[copy])[:left]:
        parts[copy] += 1
    return tuple(parts)
