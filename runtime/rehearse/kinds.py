"""Which ranks of a plan do the same, so that one of them is rehearsed for all."""

from collections.abc import Sequence

from whale_train.runtime.pipeline.route import PipelinePlace
from whale_train.strategies.plan.plan import Plan


def kinds_of(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of each kind, the kinds by their first rank. Ranks of a kind have the same
    place in a copy of the pipeline and in a shard group, shards of equal sizes, the same engines
    and micro-batches of the same sizes in the same order."""
    found: dict[object, list[int]] = {}
    for rank in range(plan.world_size):
        found.setdefault(_kind(plan, rank), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _kind(plan: Plan, rank: int) -> object:
    planned = plan.ranks[rank]
    sizes = tuple(stop - start for start, stop in planned.samples)
    engines = str(planned.deepspeed)
    if plan.pipeline is None:
        return planned.task_graphs, sizes, engines
    place = PipelinePlace.of(plan.pipeline, rank)
    copy = plan.pipeline.copies[place.copy]
    all_sizes = tuple(stop - start for start, stop in copy.samples)
    return (
        *(planned.task_graphs, sizes, engines, place.position, place.index),
        *(all_sizes, copy.owners, copy.members),
    )


def peers(plan: Plan, rank: int, as_rank: int, known: Sequence[int]) -> dict[int, int]:
    """Return for each of `known`, ranks that `rank` talks to in its pipeline, the rank that
    `as_rank`, of the same kind, talks to instead."""
    if plan.pipeline is None:
        return {other: other for other in known}
    here, there = (PipelinePlace.of(plan.pipeline, x) for x in (rank, as_rank))
    copies = plan.pipeline.copies
    places = {
        member: (position, index)
        for position, members in enumerate(copies[here.copy].positions)
        for index, member in enumerate(members)
    }
    found = {}
    for other in known:
        position, index = places[other]
        found[other] = copies[there.copy].positions[position][index]
    return found
