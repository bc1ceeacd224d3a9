"""Group the ranks of a plan by kind, so that one rank is rehearsed for all of its kind."""

from collections.abc import Sequence

from whale_train.runtime.pipeline.route import PipelinePlace
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.program import PlannedGraph, PlannedPipeline


def kinds_of(plan: Plan) -> list[tuple[int, ...]]:
    """Return the ranks of each kind, ordered by the kinds' first ranks.

    Ranks of a kind have the same place in a copy of the pipeline, shards of equal sizes, the same
    engines, and micro-batches of the same sizes in the same order. In stages that read batches or
    compute losses, the first member of a shard group is a kind of its own: its lookups and reports
    differ. (In all stages only the first member adds biases, and so needs a few bytes less than
    others.)
    """
    ranks_of: dict[object, list[int]] = {}
    for rank in range(plan.world_size):
        ranks_of.setdefault(_kind(plan, rank), []).append(rank)
    return [tuple(ranks) for ranks in ranks_of.values()]


def _kind(plan: Plan, rank: int) -> object:
    """Return a key that is equal for ranks of one kind."""
    planned = plan.ranks[rank]
    sizes = tuple(stop - start for start, stop in planned.samples)
    engines = str(planned.deepspeed), _state_parts(plan, rank)
    if plan.pipeline is None:
        return planned.task_graphs, sizes, engines
    place = PipelinePlace.of(plan.pipeline, rank)
    copy = plan.pipeline.copies[place.copy]
    all_sizes = tuple(stop - start for start, stop in copy.samples)
    member = _member(plan.rewrite, plan.pipeline, place)
    return (
        *(planned.task_graphs, sizes, engines, place.position, member),
        *(all_sizes, copy.owners, copy.members),
    )


def _state_parts(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the relative parts of `rank` in the state of its TaskGraphs, where copies keep parts
    of unequal size."""
    held = (plan.task_graphs[number] for number in plan.ranks[rank].task_graphs)
    return tuple(
        part
        for task_graph in held
        for ranks, part in zip(task_graph.replicas, task_graph.state_parts, strict=False)
        if rank in ranks
    )


def _member(graph: PlannedGraph | None, pipeline: PlannedPipeline, place: PipelinePlace) -> object:
    """Return a key that distinguishes the member of a shard group at `place` from members of other
    kinds.

    The key is normally the sizes of the member's shards. It is the member's index where stages
    differ in width, as each member then has different peers, and for the first member of a stage at
    an end of the pipeline.
    """
    assert graph is not None
    copy = pipeline.copies[place.copy]
    ends = {0, len(pipeline.chunks) - 1}
    is_at_an_end = not ends.isdisjoint(pipeline.positions[place.position])
    is_straight = len({len(members) for members in copy.positions}) == 1
    if not is_straight or (is_at_an_end and place.index == 0):
        return place.index
    cut = [*graph.axes.values(), *copy.shared_at(place.position)]
    return tuple(stop - start for start, stop in (ranges[place.index] for ranges in cut))


def peers(plan: Plan, rank: int, as_rank: int, known: Sequence[int]) -> dict[int, int]:
    """Return the counterparts of the ranks in `known`, by rank.

    `known` are ranks that `rank` communicates with in its pipeline. The counterpart of one is the
    rank that `as_rank`, of the same kind as `rank`, communicates with instead.
    """
    if plan.pipeline is None:
        return {other: other for other in known}
    place, other_place = (PipelinePlace.of(plan.pipeline, x) for x in (rank, as_rank))
    copies = plan.pipeline.copies
    places = {
        member: (position, index)
        for position, members in enumerate(copies[place.copy].positions)
        for index, member in enumerate(members)
    }
    counterparts = {}
    for other in known:
        position, index = places[other]
        if place.index != other_place.index:  # in stages of one width, peers have equal indices
            assert index == place.index
            index = other_place.index
        counterparts[other] = copies[other_place.copy].positions[position][index]
    return counterparts
