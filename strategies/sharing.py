"""Who takes how much: samples per rank, and classes per rank of a split head.

Speed within memory, exactly (`shares.py`), or evenly; and where nothing fits, by how much and
what would. Estimates are `memory.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from whale_train.errors import Fault
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.cost import flops_rate
from whale_train.strategies.grammar import Replicate, Strategy
from whale_train.strategies.graph import BoundTaskGraph, StrategyGraph
from whale_train.strategies.memory import head_memory, replica_memory
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import MemoryEstimate
from whale_train.strategies.shares import even_shares, optimal_shares, shortfall


@dataclass(frozen=True)
class Training:
    """What the resolver must know of the training itself.

    `optimizer_options` are the keyword arguments of torch's optimizer of that name (`sgd`,
    `adam`, `adamw`); `grad_clip` 0 means off.
    """

    global_batch: int
    precision: str
    grad_clip: float
    optimizer: str
    optimizer_options: dict[str, Any]

    @property
    def optimizer_states(self) -> int:
        """fp32 values kept per parameter between steps."""
        if self.optimizer == "sgd":
            return 1 if self.optimizer_options.get("momentum") else 0
        return 2


@dataclass(frozen=True)
class Sharing:
    """Who takes how much: samples per rank and, for a split head, classes per rank."""

    samples: tuple[int, ...]
    classes: tuple[int, ...]


def share(
    strategy: Strategy,
    graph: StrategyGraph,
    cluster: Cluster,
    profile: ModelProfile,
    training: Training,
    faults: list[Fault],
) -> Sharing | None:
    """Classes first, each rank keeping room for its copy of the backbone and one sample; then
    samples, within what is left."""
    count, devices = len(cluster.devices), cluster.devices
    speeds = [flops_rate(device, training.precision) for device in devices]

    def shared(total: int, caps: Sequence[int], minimum: int) -> tuple[int, ...] | None:
        if strategy.balance == "even":
            return even_shares(total, count, caps)
        return optimal_shares(total, speeds, caps, minimum)

    no_samples = backbone_memory(graph, profile, training, count, 0).total
    sample = backbone_memory(graph, profile, training, count, 1).total - no_samples
    room = [device.memory_bytes - no_samples for device in devices]
    classes: tuple[int, ...] = ()
    if graph.head is not None:
        fixed = split_head_memory(graph, profile, training, 0).total
        each = split_head_memory(graph, profile, training, graph.head.classes).total - fixed
        each /= graph.head.classes
        caps = [_fitting(left - fixed - sample, each) for left in room]
        found = shared(graph.head.classes, [min(c, graph.head.classes) for c in caps], 1)
        if found is None:
            faults.append(_no_room_for_head(graph, caps, each, cluster))
            return None
        classes = found
        room = [left - fixed - each * c for left, c in zip(room, classes, strict=True)]
    caps = [min(_fitting(left, sample), training.global_batch) for left in room]
    samples = shared(training.global_batch, caps, 1)
    if samples is None:
        faults.append(_no_room(strategy, graph, cluster, profile, training, caps, sample))
        return None
    return Sharing(samples, classes)


def _fitting(room: float, each: float) -> int:
    """How many of `each` bytes fit into `room`."""
    if room < 0:
        return 0
    return int(room / each) if each > 0 else 2**62


def backbone_memory(
    graph: StrategyGraph, profile: ModelProfile, training: Training, copies: int, samples: int
) -> MemoryEstimate:
    body = graph.task_graphs[0]
    return replica_memory(
        body,
        profile,
        copies,
        training.optimizer_states,
        training.precision,
        _activation_bytes(graph, profile) * samples,
    )


def _activation_bytes(graph: StrategyGraph, profile: ModelProfile) -> float:
    """Bytes a sample keeps in the replicated part: all but the head's logits, which its shards
    keep (once in the output's dtype, once as the softmax)."""
    if graph.head is None or profile.graph is None:
        return profile.activation_bytes
    logits = 4.0 * graph.head.classes
    for size in (profile.graph[graph.head.operation].shape or ())[1:-1]:
        logits *= size.at(1)
    return max(profile.activation_bytes - 2 * logits, 0.0)


def split_head_memory(
    graph: StrategyGraph, profile: ModelProfile, training: Training, classes: int
) -> MemoryEstimate:
    states, batch = training.optimizer_states, training.global_batch
    return head_memory(graph, profile, classes, states, training.precision, batch)


def _no_room_for_head(
    graph: StrategyGraph, caps: list[int], each: float, cluster: Cluster
) -> Fault:
    assert graph.head is not None
    missing = shortfall(graph.head.classes, caps)
    rule = (
        f"has {graph.head.classes} classes, {missing} more than the devices of hardware="
        f"{cluster.name} have memory for ({_gb(missing * each)} short)"
    )
    remedy = f"use more devices, a smaller train.global_batch, or at most {sum(caps)} classes"
    return Fault(f"{graph.task_graphs[1].node.path}.modules", "head", rule, remedy)


def _no_room(
    strategy: Strategy,
    graph: StrategyGraph,
    cluster: Cluster,
    profile: ModelProfile,
    training: Training,
    caps: list[int],
    sample: float,
) -> Fault:
    """Says by how much memory is short and the nearest thing that fits."""
    tight = min(range(len(caps)), key=lambda rank: (caps[rank], rank))
    device = cluster.devices[tight]
    if caps[tight] < 1:
        needed = backbone_memory(graph, profile, training, len(caps), 1).total
        rule = (
            f"needs {_gb(needed)} on rank {tight} ({device.name}) for one sample, "
            f"{_gb(needed - device.memory_bytes)} more than its {_gb(device.memory_bytes)}"
        )
        remedy = _fitting_zero(graph, cluster, profile, training)
        return Fault("strategy", strategy.name, rule, remedy)
    if strategy.balance == "even":
        most = min(caps) * len(caps)
        missing = training.global_batch - most
    else:
        most, missing = sum(caps), shortfall(training.global_batch, caps)
    rule = (
        f"is {missing} samples ({_gb(missing * sample)}) more than the memory of "
        f"hardware={cluster.name} holds under strategy={strategy.name}"
    )
    return Fault(
        "train.global_batch", str(training.global_batch), rule, f"use at most {most}, or more ZeRO"
    )


def _fitting_zero(
    graph: StrategyGraph, cluster: Cluster, profile: ModelProfile, training: Training
) -> str:
    """The least ZeRO that fits one sample on every device, as a remedy."""
    body = graph.task_graphs[0]
    assert isinstance(body.node, Replicate)
    for name, changes in (
        ("zero1", {"zero": 1}),
        ("zero2", {"zero": 2}),
        ("zero3", {"zero": 3}),
        ("zero3_offload", {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    ):
        changed: BoundTaskGraph = replace(body, node=replace(body.node, **changes))
        other = replace(graph, task_graphs=(changed, *graph.task_graphs[1:]))
        needed = backbone_memory(other, profile, training, len(cluster.devices), 1).total
        if len(cluster.devices) > 1 and all(needed <= d.memory_bytes for d in cluster.devices):
            return f"use strategy={name}, which needs {_gb(needed)}"
    return "no ZeRO stage makes it fit: use more devices or a smaller model"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
