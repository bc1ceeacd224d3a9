"""Peak bytes of a shard-group member that also holds split parts, such as experts. The other
parameters of the member (the rest) are replicated."""

from collections.abc import Mapping
from dataclasses import replace

from whale_train.strategies.memory.engine_memory import (
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
    """Return the peak bytes of a member of `stage`, its split parts included.

    job: the strategy on its devices.
    stage: number of the stage.
    rest: peak bytes of the member without the split parts.
    elements: elements of the replicated parameters, by path.
    experts: elements of the split parameters (experts, a head, other modules), by path.
    """
    keeper = job.keeper_beside(stage)
    streamed = keeper is not None and keeper.streams and not job.cluster.on_cpu
    if streamed:
        beside = added(rest, _a_stack(job, experts))
    else:
        beside = added(rest, _apart(job, stage, experts))
    resident = 0.0 if streamed else sum(experts.values())
    updating = _at_update(job, stage, beside, sum(elements.values()), resident)
    return max(beside, updating, key=lambda need: need.total)


def _a_stack(job: PlanningContext, experts: Mapping[str, float]) -> MemoryEstimate:
    """Return the bytes of split parameters that are streamed from the host: the largest parameter
    (a stack of experts) and its gradient."""
    largest = max(experts, key=experts.__getitem__)
    largest_alone = {largest: experts[largest]}
    sizes = weights_bytes(largest_alone, job.profile, job.training.precision, 1, False)
    read = sizes.weights + sizes.casts
    return MemoryEstimate(0.0, read, 0.0, 0.0, read)


def _apart(job: PlanningContext, stage: int, experts: Mapping[str, float]) -> MemoryEstimate:
    """Return the bytes of split parameters that stay on the device.

    Under ZeRO 2 or 3 of the rest, the gradients of all split parameters count as alive at once.
    Otherwise they count as the backward makes them.
    """
    elements, keeper = sum(experts.values()), job.keeper_beside(stage)
    zero = keeper.zero if keeper else 0
    sizes = weights_bytes(experts, job.profile, job.training.precision, zero, False)
    optimizer = job.training.state_bytes(experts) + sizes.master
    if keeper:
        offloads = keeper.offload_optimizer != "none" and not job.cluster.on_cpu
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
    """Return the bytes of `need` at the optimizer's update of `rest` and `experts` elements: all
    gradients, no activations, and ZeRO's communication buffers.

    ZeRO 1 fills one bucket and reduces it through a second one. ZeRO 2 and 3 hold no full gradients
    of the rest. Where ZeRO partitions the optimizer of split parameters, the part that this rank
    updates has a flat copy.
    """
    copies, zero = len(job.data_parallel[stage][0]), job.zero
    rest = 0.0 if zero > 1 else rest
    moving = 2 * min(rest, job.training.bucket_elements) if zero else 0.0
    moving += experts / copies if zero and copies > 1 else 0.0
    gradients = 4 * (experts + rest)
    return replace(need, gradients=gradients, activations=0.0, communication=4 * moving)
