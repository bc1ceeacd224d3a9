"""The all-reduces of a strategy's gradients: for every stage over its replicas, and for tied
weights over the stages that hold them.

Owns the elements, the ranks and the seconds of each reduction; `simulate/tasks.py` owns its place
in the step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from whale_train.strategies.cost.collectives import (
    NicContention,
    gather_time_s,
    group_link,
    partitioned_sum_time_s,
    sum_time_s,
)
from whale_train.strategies.cost.hierarchical_sum import (
    TwoLevels,
    hierarchical_sum_time_s,
    two_levels,
)
from whale_train.strategies.simulate.tasks import Sync, sum_pieces
from whale_train.strategies.stages.engines import StageEngine
from whale_train.strategies.stages.placement import PlanningContext


@dataclass(frozen=True)
class GradientSum:
    """How the replicas of an engine without ZeRO sum their gradients.

    flat_s: seconds of one all-reduce over all replicas.
    levels: the groups of an all-reduce in two levels; None where there is none.
    hierarchical_s: the seconds in two levels.
    is_hierarchical: True if the gradients are summed in two levels.
    """

    flat_s: float
    levels: TwoLevels | None = None
    hierarchical_s: float = 0.0
    is_hierarchical: bool = False

    @property
    def seconds(self) -> float:
        """Return the seconds of the sum as it is done."""
        return self.hierarchical_s if self.is_hierarchical else self.flat_s


def gradient_sum(
    job: PlanningContext,
    groups: Sequence[Sequence[int]],
    elements: float,
    crowd: NicContention,
    in_memory: bool = False,
) -> GradientSum:
    """Choose how each of `groups` of replicas sums `elements` gradients: in two levels where the
    request says so, or leaves it open and that takes less time.

    crowd, in_memory: as in `sum_time_s`.
    """
    num_bytes = job.training.sent_width * elements
    flat_s = sum_time_s(job.cluster, groups[0], num_bytes, crowd, by_memory=in_memory)
    asked = job.training.all_reduce
    levels = None if asked == "flat" else two_levels(job.cluster, groups)
    if levels is None:
        return GradientSum(flat_s)
    seconds = hierarchical_sum_time_s(job.cluster, groups[0], num_bytes, crowd)
    return GradientSum(flat_s, levels, seconds, asked == "hierarchical" or seconds < flat_s)


def gradient_sums(
    job: PlanningContext,
    engines: Sequence[Sequence[StageEngine]],
    shared: Mapping[str, Sequence[int]],
    crowd: NicContention,
    actors: Mapping[tuple[int, int], int],
    one_backward: bool,
) -> list[Sync]:
    """Return all gradient reductions of a step, in the order they run.

    job: the strategy on its devices.
    engines: engines of each stage.
    shared: stages of each tied weight, by path.
    crowd: number of groups whose transfers leave each node.
    actors: numbers of the simulated actors, by replica and position.
    one_backward: True if a step runs one backward; replicas on one host then reduce in shared
        memory.

    Torch's engine sums tied weights over all their holders after everything else has started.
    DeepSpeed waits for these sums before it reduces its partitions, which contain the tied weights
    once more (runtime/engines/grad_reduce.py, runtime/engines/deepspeed.py).
    """
    unused = job.profile.unused_parameters
    tied = {path: stages for path, stages in shared.items() if path not in unused}
    tied_sums = list(_of_tied(job, tied, crowd, actors))
    if job.zero:
        return [*tied_sums, *_of_stages(job, engines, [0.0] * len(engines), crowd, actors, False)]
    tied_elements = [
        sum(_elements(job, path) for path, stages in tied.items() if stage in stages)
        for stage in range(len(engines))
    ]
    return [*_of_stages(job, engines, tied_elements, crowd, actors, one_backward), *tied_sums]


def _of_tied(
    job: PlanningContext,
    shared: Mapping[str, Sequence[int]],
    crowd: NicContention,
    actors: Mapping[tuple[int, int], int],
) -> Iterator[Sync]:
    """Yield the reduction of each tied weight's gradients over all ranks that hold it, each of
    which holds it in full (docs/adr/009). It starts after the last backward of these ranks."""
    for path, stages in shared.items():
        holders = sorted(rank for s in stages for ranks in job.replicas[s] for rank in ranks)
        seconds = sum_time_s(job.cluster, holders, 4 * _elements(job, path), crowd)
        members = _members(job, stages, actors)
        yield Sync(members, seconds, 1, False)


def _of_stages(
    job: PlanningContext,
    engines: Sequence[Sequence[StageEngine]],
    tied_elements: Sequence[float],
    crowd: NicContention,
    actors: Mapping[tuple[int, int], int],
    one_backward: bool,
) -> Iterator[Sync]:
    """Yield the reduction of each engine's gradients over its replicas. The `tied_elements` of each
    stage are left out, since they are summed separately; no tied weight belongs to a split part."""
    for stage, of_stage in enumerate(engines):
        for number, engine in enumerate(of_stage):
            elements = max(engine.elements) - (0.0 if number else tied_elements[stage])
            if len(engine.groups[0]) > 1 and elements:
                zero = engine.keeper.zero if engine.keeper else 0
                in_memory = one_backward and not number and is_replicate(job, stage)
                in_memory = in_memory and job.training.reduce_dtype == "fp32"
                yield _of_engine(
                    job, stage, elements, engine.groups, crowd, actors, zero, in_memory
                )


def _of_engine(
    job: PlanningContext,
    stage: int,
    elements: float,
    groups: Sequence[Sequence[int]],
    crowd: NicContention,
    actors: Mapping[tuple[int, int], int],
    zero: int,
    in_memory: bool,
) -> Sync:
    """Return the reduction of `elements` gradients over each of `groups`, which reduce at the same
    time."""
    group = groups[0]
    link = group_link(job.cluster, group, crowd, by_memory=in_memory)
    num_bytes = job.training.sent_width * elements
    members = _members(job, (stage,), actors)
    workers = job.strategy.logical_workers
    if workers is not None:  # every round sends all gradients; the sums are gathered at the end
        once = gather_time_s(num_bytes, len(group), link)
        return Sync(members, (ceil(workers / len(group)) + 1) * once, 1, False, link.busy)
    if zero == 0:
        summed = gradient_sum(job, groups, elements, crowd, in_memory).seconds
        return Sync(
            members, summed, sum_pieces(elements, job.training.bucket_elements), True, link.busy
        )
    if zero == 3:
        scattered = gather_time_s(num_bytes, len(group), link)
        return Sync(members, scattered, 1, False, link.busy)
    summed = sum_time_s(job.cluster, group, num_bytes, crowd, by_memory=in_memory)
    gathered = gather_time_s(job.findings.weight_width(zero) * elements, len(group), link)
    seconds = partitioned_sum_time_s(elements, summed, job.cluster.devices, job.training.precision)
    return Sync(members, seconds, 1, False, link.busy, gathered)


def hierarchical_sums(
    job: PlanningContext,
    engines: Sequence[Sequence[StageEngine]],
    shared: Mapping[str, Sequence[int]],
    crowd: NicContention,
) -> dict[tuple[int, int], GradientSum]:
    """Return the sums of gradients in two levels, by stage and number of the engine.

    job, engines, shared, crowd: as in `gradient_sums`.
    """
    sums: dict[tuple[int, int], GradientSum] = {}
    unused = job.profile.unused_parameters
    tied = {path: stages for path, stages in shared.items() if path not in unused}
    for stage, of_stage in enumerate(engines):
        for number, engine in enumerate(of_stage):
            zero = engine.keeper.zero if engine.keeper else 0
            elements = max(engine.elements)
            if not number:
                elements -= sum(_elements(job, x) for x, held in tied.items() if stage in held)
            if zero == 0 and len(engine.groups[0]) > 1 and elements:
                chosen = gradient_sum(job, engine.groups, elements, crowd)
                if chosen.is_hierarchical:
                    sums[stage, number] = chosen
    return sums


def is_replicate(job: PlanningContext, stage: int) -> bool:
    """Return True if a stage replicates the whole model as it is, or all but a split part, or for
    members that divide positions."""
    return job.as_is or job.form.stages[stage].copies_weights


def _members(
    job: PlanningContext, stages: Sequence[int], actors: Mapping[tuple[int, int], int]
) -> tuple[int, ...]:
    """Return the numbers of the actors at positions of `stages`."""
    positions = {position for stage in stages for position in job.seats.of_stage(stage)}
    return tuple(number for (_, position), number in actors.items() if position in positions)


def _elements(job: PlanningContext, path: str) -> float:
    return float(job.profile.parameter_by_path[path].elements)
