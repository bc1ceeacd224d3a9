"""The sums of gradients of a nested strategy: every stage's over its copies, and those of weights
that several stages hold.

Owns what is summed, over whom and for how long; `step_tasks.py` says when.
"""

from collections.abc import Iterator, Mapping, Sequence

from whale_train.strategies.links import (
    Crowd,
    gather_time_s,
    group_link,
    partitioned_sum_time_s,
    sum_time_s,
)
from whale_train.strategies.staging import Staging
from whale_train.strategies.step_tasks import Sync, sum_pieces


def gradient_sums(
    job: Staging,
    held: Sequence[float],
    shared: Mapping[str, Sequence[int]],
    crowd: Crowd,
    actors: Mapping[tuple[int, int], int],
) -> list[Sync]:
    """All sums of a step, in their order; `actors` has the numbers of those that stand for all, by
    copy and position.

    `held` are the elements of each stage, of the member with most of them, and `shared` the stages
    of each tied weight. Torch's engine sums these over all their holders, when all else is on its
    way; DeepSpeed, which waits for that before it sums what it has partitioned, sums them with the
    rest once more (runtime/reduction.py, runtime/deepspeed_engine.py).
    """
    unused = job.profile.unused_parameters
    summed = {path: stages for path, stages in shared.items() if path not in unused}
    tied = list(_of_tied(job, summed, crowd, actors))
    if job.zero:
        return [*tied, *_of_stages(job, held, crowd, actors)]
    apart = [
        sum(_elements(job, path) for path, stages in summed.items() if stage in stages)
        for stage in range(len(held))
    ]
    left = [elements - others for elements, others in zip(held, apart, strict=True)]
    return [*_of_stages(job, left, crowd, actors), *tied]


def _of_tied(
    job: Staging,
    shared: Mapping[str, Sequence[int]],
    crowd: Crowd,
    actors: Mapping[tuple[int, int], int],
) -> Iterator[Sync]:
    """Of each tied weight, which all its holders have whole (docs/adr/009), when these have run
    their last backwards."""
    for path, stages in shared.items():
        holders = sorted(rank for s in stages for ranks in job.replicas(s) for rank in ranks)
        seconds = sum_time_s(job.cluster, holders, 4 * _elements(job, path), crowd)
        members = _members(job, stages, actors)
        yield Sync(members, seconds, 1, False)


def _of_stages(
    job: Staging, held: Sequence[float], crowd: Crowd, actors: Mapping[tuple[int, int], int]
) -> Iterator[Sync]:
    """Of each stage's gradients over its copies."""
    for stage, elements in enumerate(held):
        groups = job.data_parallel(stage)
        copies = len(groups[0])
        if copies == 1 or not elements:
            continue
        link, num_bytes = group_link(job.cluster, groups[0], crowd), 4 * elements
        members = _members(job, (stage,), actors)
        summed = sum_time_s(job.cluster, groups[0], num_bytes, crowd)
        if job.zero == 0:
            yield Sync(members, summed, sum_pieces(elements), True, link.busy)
            continue
        if job.zero == 3:
            scattered = gather_time_s(num_bytes, copies, link)
            yield Sync(members, scattered, 1, False, link.busy)
            continue
        gathered = gather_time_s(job.findings.weight_width(job.zero) * elements, copies, link)
        seconds = partitioned_sum_time_s(
            elements, summed, job.cluster.devices, job.training.precision
        )
        yield Sync(members, seconds, 1, False, link.busy, gathered)


def _members(
    job: Staging, stages: Sequence[int], actors: Mapping[tuple[int, int], int]
) -> tuple[int, ...]:
    """The actors of `stages`."""
    of_stages = {place for stage in stages for place in job.seats.of_stage(stage)}
    return tuple(number for (_, place), number in actors.items() if place in of_stages)


def _elements(job: Staging, path: str) -> float:
    return float(job.profile.parameter_by_path[path].elements)
