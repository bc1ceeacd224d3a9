"""The bytes of the parts that are split beside a rest (experts, above all), of a member of a shard
group."""

from collections.abc import Mapping
from dataclasses import replace

from whale_train.strategies.memory.engine_memory import (
    REDUCE_BUCKET_ELEMENTS,
    added,
    weights_bytes,
)
from whale_train.strategies.plan.plan import MemoryEstimate
from whale_train.strategies.stages.placement import PlanningContext


def with_beside(
    job: PlanningContext,
    stage: int,
    rest: MemoryEstimate,
    elements: Mapping[str, float],
    experts: Mapping[str, float],
) -> MemoryEstimate:
    """Return the peak bytes of a member of `stage` with the parts that are split beside its rest.

    job: the strategy on its devices.
    stage: number of the stage.
    rest: peak bytes of the member without these parts.
    elements: elements of the parameters of the rest, by path.
    experts: elements of the parameters of the split parts (experts, a head, other modules), by
        path.
    """
    keeper = job.keeper_beside(stage)
    streamed = keeper is not None and keeper.streams and not job.cluster.on_cpu
    if streamed:
        beside = added(rest, _a_stack(job, experts))
    else:
        beside = added(rest, _apart(job, stage, experts))
    there = 0.0 if streamed else sum(experts.values())
    updating = _at_update(job, stage, beside, sum(elements.values()), there)
    return max(beside, updating, key=lambda need: need.total)


def _a_stack(job: PlanningContext, experts: Mapping[str, float]) -> MemoryEstimate:
    """Return the bytes of split parameters that are streamed: the largest one (a stack of experts),
    and its gradient."""
    largest = max(experts, key=experts.__getitem__)
    there = {largest: experts[largest]}
    sizes = weights_bytes(there, job.profile, job.training.precision, 1, False)
    read = sizes.weights + sizes.casts
    return MemoryEstimate(0.0, read, 0.0, 0.0, read)


def _apart(job: PlanningContext, stage: int, experts: Mapping[str, float]) -> MemoryEstimate:
    """Return the bytes of split parameters that are on the device.

    Where copies partition the gradients of the rest (ZeRO 2 or 3), all gradients of the split
    parameters are taken to be there together. Else they are counted as the backward makes them.
    """
    elements, keeper = sum(experts.values()), job.keeper_beside(stage)
    zero = keeper.zero if keeper else 0
    sizes = weights_bytes(experts, job.profile, job.training.precision, zero, False)
    optimizer = job.training.state_bytes(experts) + sizes.master
    if keeper:
        offloads = keeper.offload_optimizer == "cpu" and not job.cluster.on_cpu
        optimizer = 0.0 if offloads else optimizer / len(job.data_parallel[stage][0])
    return MemoryEstimate(
        parameters=sizes.weights + sizes.casts,
        gradients=4 * elements if job.zero > 1 else 0.0,
        optimizer=optimizer,
        activations=0.0,
        communication=0.0,
    )


def _at_update(
    job: PlanningContext, stage: int, need: MemoryEstimate, rest: float, experts: float
) -> MemoryEstimate:
    """Return the part of `need` that is there at the update of `rest` and `experts` elements: all
    gradients, no values, and what ZeRO makes of gradients.

    ZeRO 1 puts a bucket together, twice while it is summed; ZeRO 2 and 3 have no whole gradients of
    the rest. Of experts whose copies partition their optimizer, there is a flat copy of the part
    that is updated on this rank.
    """
    copies, zero = len(job.data_parallel[stage][0]), job.zero
    rest = 0.0 if zero > 1 else rest
    moving = 2 * min(rest, REDUCE_BUCKET_ELEMENTS) if zero else 0.0
    moving += experts / copies if zero and copies > 1 else 0.0
    gradients = 4 * (experts + rest)
    return replace(need, gradients=gradients, activations=0.0, communication=4 * moving)
