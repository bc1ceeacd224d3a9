"""How many bytes a rank needs at the peak of a step, by what holds them.

First model, for the strategies executed here: replicas under ZeRO 0-3 with CPU offload, and a
head whose shards have a group of one. Sources: Rajbhandari et al., "ZeRO" (SC 2020, arXiv
1910.02054) section 3 for what each stage partitions; the DeepSpeed config for bucket sizes.
"""

from dataclasses import dataclass

from whale_train.strategies.grammar import Replicate
from whale_train.strategies.graph import BoundTaskGraph, StrategyGraph
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import MemoryEstimate

# Elements of the bucket a gradient reduction gathers before it is sent (both of DeepSpeed's
# buckets and DistributedDataParallel's, which counts 25 MiB of fp32).
REDUCE_BUCKET_ELEMENTS = 25 * 2**20 // 4


@dataclass(frozen=True)
class Precision:
    """Bytes per element by use. `weights` are what forward reads, `master` the optimizer's copy
    (0 where the weights themselves are it), `casts` the 16-bit weights that autocast makes of
    whole ones in forward and keeps for backward."""

    weights: int
    gradients: int
    activations: float
    master: int
    casts: int = 0


def precision_bytes(precision: str, zero: int, apart: bool = False) -> Precision:
    """fp32 keeps one copy, which ZeRO's flat partition doubles; at stage 3 only where the
    optimizer is `apart` from the parameters (runtime/partitioning.py). bf16 under ZeRO keeps bf16
    weights and an fp32 master partition; without ZeRO it is autocast over fp32 weights, which
    fp16 is everywhere (docs/adr/007)."""
    flat = 4 if zero and (zero < 3 or apart) else 0
    if precision == "fp32":
        return Precision(4, 4, 1.0, flat)
    if precision == "bf16" and zero:
        return Precision(2, 4, 0.5, 4)
    return Precision(4, 4, 0.5, flat, casts=2)


def replica_memory(
    task_graph: BoundTaskGraph,
    profile: ModelProfile,
    copies: int,
    optimizer_states: int,
    precision: str,
    activation_bytes: float,
) -> MemoryEstimate:
    """One rank of `copies` that replicate `task_graph`; `optimizer_states` fp32 values are kept
    per parameter (2 for Adam). `activation_bytes` are those of its share in fp32."""
    node = task_graph.node
    assert isinstance(node, Replicate)
    sizes = precision_bytes(precision, node.zero, node.offload_parameters == "cpu")
    held = [profile.parameter_by_path[path] for path in task_graph.parameters]
    elements = sum(parameter.elements for parameter in held)
    part = elements / copies
    own = part if node.zero else elements
    parameters = sizes.weights * (part if node.zero == 3 else elements)
    if node.offload_parameters == "cpu":
        parameters = 0.0
    parameters += sizes.casts * elements
    gradients = sizes.gradients * (part if node.zero >= 2 else elements)
    optimizer = own * (4 * optimizer_states + sizes.master)
    if node.zero == 1:
        gradients += sizes.gradients * part  # the averaged partition beside the whole gradient
    if node.offload_optimizer == "cpu":
        optimizer = 0.0
    bucket = min(elements, REDUCE_BUCKET_ELEMENTS) if copies > 1 else 0
    moving: float = sizes.gradients * bucket
    if node.zero == 3 and copies > 1:
        largest = max((parameter.elements for parameter in held), default=0)
        moving += stage_3_moving_bytes(sizes, bucket, largest)
    return MemoryEstimate(
        parameters=float(parameters + profile.buffer_bytes),
        gradients=float(gradients),
        optimizer=float(optimizer),
        activations=activation_bytes * sizes.activations,
        communication=float(moving),
    )


def stage_3_moving_bytes(sizes: Precision, bucket: float, largest: float) -> float:
    """What backward under ZeRO 3 has on the way beside the bucket of gradients, given the elements
    of a bucket and of the largest parameter: the bucket once more, laid out for the reduction; the
    largest parameter, gathered, with its gradient; and a bucket of what comes next, gathered flat
    and copied out of it (on a CPU nothing is gathered ahead). The update's copies of a sub-group,
    a bucket large, come when all these have gone."""
    return (
        sizes.gradients * bucket
        + (sizes.weights + sizes.gradients) * largest
        + 2 * sizes.weights * bucket
    )


def head_memory(
    graph: StrategyGraph,
    profile: ModelProfile,
    classes: int,
    optimizer_states: int,
    precision: str,
    batch: int,
) -> MemoryEstimate:
    """One shard of `classes` of the head, which sees all `batch` samples at a time: its rows of
    every sharded parameter, the logits it makes (kept once for backward, once as their gradient),
    and the gathered inputs."""
    assert graph.head is not None
    assert graph.cut is not None
    assert profile.graph is not None
    fraction = classes / graph.head.classes
    elements = sum(profile.parameter_by_path[p].elements for p in graph.cut.shards) * fraction
    logits = profile.graph[graph.head.operation].shape or ()
    rows = 1
    for size in logits[:-1]:
        rows *= size.at(batch)
    sizes = precision_bytes(precision, 0)
    width = 4 * sizes.activations
    gathered = 0.0
    for name in graph.cut.segments[-1].takes:
        each = 1
        for size in profile.graph[name].shape or ():
            each *= size.at(batch)
        gathered += each * width * 2
    return MemoryEstimate(
        parameters=(sizes.weights + sizes.casts) * elements,
        gradients=4 * elements,
        optimizer=4 * elements * optimizer_states,
        activations=2 * rows * classes * width,
        communication=gathered,
    )


def added(first: MemoryEstimate, second: MemoryEstimate) -> MemoryEstimate:
    """Two TaskGraphs on one device."""
    return MemoryEstimate(
        first.parameters + second.parameters,
        first.gradients + second.gradients,
        first.optimizer + second.optimizer,
        first.activations + second.activations,
        first.communication + second.communication,
    )
