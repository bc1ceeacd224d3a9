"""The sums of gradients of a strategy: every stage's over its copies, and those of weights
that several stages hold.

Owns what is summed, over whom and for how long; `tasks.py` says when.
"""

from collections.abc import Iterator, Mapping, Sequence

from whale_train.strategies.cost.collectives import (
    Crowd,
    gather_time_s,
    group_link,
    partitioned_sum_time_s,
    sum_time_s,
)
from whale_train.strategies.simulate.tasks import Sync, sum_pieces
from whale_train.strategies.stages.engines import StageEngine
from whale_train.strategies.stages.placement import Staging


def gradient_sums(
    job: Staging,
    engines: Sequence[Sequence[StageEngine]],
    shared: Mapping[str, Sequence[int]],
    crowd: Crowd,
    actors: Mapping[tuple[int, int], int],
    one_backward: bool,
) -> list[Sync]:
    """Return all sums of a step, in their order; `actors` has the numbers of those that stand for
    all, by copy and position. Where a step has `one_backward`, copies that can share memory sum in
    it.

    `engines` are those of each stage, and `shared` the stages of each tied weight. Torch's engine
    sums these over all their holders, when all else is on its way; DeepSpeed, which waits for that
    before it sums what it has partitioned, sums them with the rest once more
    (runtime/engines/grad_reduce.py, runtime/engines/deepspeed.py).
    """
    unused = job.profile.unused_parameters
    summed = {path: stages for path, stages in shared.items() if path not in unused}
    tied = list(_of_tied(job, summed, crowd, actors))
    if job.zero:
        return [*tied, *_of_stages(job, engines, [0.0] * len(engines), crowd, actors, False)]
    apart = [
        sum(_elements(job, path) for path, stages in summed.items() if stage in stages)
        for stage in range(len(engines))
    ]
    return [*_of_stages(job, engines, apart, crowd, actors, one_backward), *tied]


def _of_tied(
    job: Staging,
    shared: Mapping[str, Sequence[int]],
    crowd: Crowd,
    actors: Mapping[tuple[int, int], int],
) -> Iterator[Sync]:
    """Yield the sum of each tied weight, which all its holders have whole (docs/adr/009), when
    these have run their last backwards."""
    for path, stages in shared.items():
        holders = sorted(rank for s in stages for ranks in job.replicas(s) for rank in ranks)
        seconds = sum_time_s(job.cluster, holders, 4 * _elements(job, path), crowd)
        members = _members(job, stages, actors)
        yield Sync(members, seconds, 1, False)


def _of_stages(
    job: Staging,
    engines: Sequence[Sequence[StageEngine]],
    apart: Sequence[float],
    crowd: Crowd,
    actors: Mapping[tuple[int, int], int],
    one_backward: bool,
) -> Iterator[Sync]:
    """Yield the sum of each engine's gradients over its copies; of each stage, the elements `apart`
    are summed by themselves (a head's are none of these)."""
    for stage, of_stage in enumerate(engines):
        for number, engine in enumerate(of_stage):
            elements = max(engine.elements) - (0.0 if number else apart[stage])
            if len(engine.groups[0]) > 1 and elements:
                zero = 0 if number else job.zero
                in_memory = one_backward and not number and is_replicate(job, stage)
                yield _of_engine(
                    job, stage, elements, engine.groups[0], crowd, actors, zero, in_memory
                )


def _of_engine(
    job: Staging,
    stage: int,
    elements: float,
    group: Sequence[int],
    crowd: Crowd,
    actors: Mapping[tuple[int, int], int],
    zero: int,
    in_memory: bool,
) -> Sync:
    """Return the sum of so many gradients, of fp32, over `group`, one of those that do so at
    once."""
    link, num_bytes = group_link(job.cluster, group, crowd, by_memory=in_memory), 4 * elements
    members = _members(job, (stage,), actors)
    summed = sum_time_s(job.cluster, group, num_bytes, crowd, by_memory=in_memory)
    if zero == 0:
        return Sync(members, summed, sum_pieces(elements), True, link.busy)
    if zero == 3:
        scattered = gather_time_s(num_bytes, len(group), link)
        return Sync(members, scattered, 1, False, link.busy)
    gathered = gather_time_s(job.findings.weight_width(zero) * elements, len(group), link)
    seconds = partitioned_sum_time_s(elements, summed, job.cluster.devices, job.training.precision)
    return Sync(members, seconds, 1, False, link.busy, gathered)


def is_replicate(job: Staging, stage: int) -> bool:
    """Return whether the copies of a stage are a replicate's: of the whole model as it is, or of
    what a split head leaves."""
    return job.as_is or job.form.stages[stage].body is not None


def _members(
    job: Staging, stages: Sequence[int], actors: Mapping[tuple[int, int], int]
) -> tuple[int, ...]:
    """Return the actors of `stages`."""
    of_stages = {place for stage in stages for place in job.seats.of_stage(stage)}
    return tuple(number for (_, place), number in actors.items() if place in of_stages)


def _elements(job: Staging, path: str) -> float:
    return float(job.profile.parameter_by_path[path].elements)
