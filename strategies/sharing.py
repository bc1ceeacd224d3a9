"""Who takes how much: samples per rank, and classes per rank of a split head.

Speed within memory, exactly (`shares.py`), or evenly; and where nothing fits, by how much and
what would. Estimates are `memory.py`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whale_train.errors import Fault
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.cost import flops_rate
from whale_train.strategies.grammar import Replicate, Strategy
from whale_train.strategies.graph import BoundTaskGraph, StrategyGraph
from whale_train.strategies.memory import head_memory, replica_memory
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import MemoryEstimate
from whale_train.strategies.shares import even_shares, optimal_shares


@dataclass(frozen=True)
class Training:
    """What the resolver must know of the training itself.

    `optimizer_options` are the keyword arguments of the optimizer of that name (`sgd`, `adam`,
    `adamw`, `lamb`); `grad_clip` 0 means off. `sync_batchnorm`: BatchNorm's statistics are those
    of the global batch. `accumulate` is in how many micro-batches a rank takes its share.
    """

    global_batch: int
    precision: str
    grad_clip: float
    optimizer: str
    optimizer_options: dict[str, Any]
    sync_batchnorm: bool = True
    accumulate: int = 1

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
            found = even_shares(total, count, caps)
            return None if found is None or min(found) < minimum else found
        return optimal_shares(total, speeds, caps, minimum)

    no_samples = backbone_memory(graph, profile, training, count, 0).total
    sample = backbone_memory(graph, profile, training, count, 1).total - no_samples
    room = [device.memory_bytes - no_samples for device in devices]
    fixed = each = 0.0
    if graph.head is not None:
        fixed = split_head_memory(graph, profile, training, 0).total
        each = split_head_memory(graph, profile, training, graph.head.classes).total - fixed
        each /= graph.head.classes
    need = no_samples + sample + fixed + each
    if any(device.memory_bytes < need for device in devices):
        faults.append(_no_room_for_one(strategy, graph, cluster, profile, training, need))
        return None
    classes: tuple[int, ...] = ()
    if graph.head is not None:
        caps = [_fitting(left - fixed - sample, each) for left in room]
        found = shared(graph.head.classes, [min(c, graph.head.classes) for c in caps], 1)
        if found is None:
            faults.append(_no_room_for_head(strategy, graph, caps, each, cluster))
            return None
        classes = found
        room = [left - fixed - each * c for left, c in zip(room, classes, strict=True)]
    pieces = training.accumulate
    caps = [min(_fitting(left, sample) * pieces, training.global_batch) for left in room]
    samples = shared(training.global_batch, caps, pieces)
    if samples is None:
        faults.append(_no_room_for_batch(strategy, training, caps, sample, cluster))
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
    for size in (profile.graph[graph.head.operation].shape or ())[:-1]:
        logits *= size.at(1)
    return max(profile.activation_bytes - 2 * logits, 0.0)


def split_head_memory(
    graph: StrategyGraph, profile: ModelProfile, training: Training, classes: int
) -> MemoryEstimate:
    """With every rank's largest micro-batch gathered, whatever their shares are."""
    whole, pieces = training.global_batch, training.accumulate
    batch = min(whole, (whole + graph.degree * (pieces - 1)) // pieces)
    states = training.optimizer_states
    return head_memory(graph, profile, classes, states, training.precision, batch)


def _no_room_for_one(
    strategy: Strategy,
    graph: StrategyGraph,
    cluster: Cluster,
    profile: ModelProfile,
    training: Training,
    need: float,
) -> Fault:
    """Some device cannot even hold its copy, one sample and one class of a split head."""
    tight = min(range(len(cluster.devices)), key=lambda rank: cluster.devices[rank].memory_bytes)
    device = cluster.devices[tight]
    rule = (
        f"needs {_gb(need)} on rank {tight} ({device.name}) for one sample"
        f"{' and one class' if graph.head else ''}, "
        f"{_gb(need - device.memory_bytes)} more than its {_gb(device.memory_bytes)}"
    )
    remedy = _fitting_zero(graph, cluster, profile, training)
    return Fault("strategy", strategy.name, rule, remedy)


def _no_room_for_head(
    strategy: Strategy, graph: StrategyGraph, caps: list[int], each: float, cluster: Cluster
) -> Fault:
    assert graph.head is not None
    most = _most(strategy, caps)
    missing = graph.head.classes - most
    rule = (
        f"has {graph.head.classes} classes, {missing} more than the devices of hardware="
        f"{cluster.name} have memory for ({_gb(missing * each)} short)"
    )
    remedy = f"use more devices, a smaller train.global_batch, or at most {most} classes"
    return Fault(f"{graph.task_graphs[1].node.path}.modules", "head", rule, remedy)


def _no_room_for_batch(
    strategy: Strategy, training: Training, caps: list[int], sample: float, cluster: Cluster
) -> Fault:
    most = _most(strategy, caps)
    missing = training.global_batch - most
    rule = (
        f"is {missing} samples ({_gb(missing * sample)}) more than the memory of "
        f"hardware={cluster.name} holds under strategy={strategy.name}"
    )
    return Fault(
        "train.global_batch", str(training.global_batch), rule, f"use at most {most}, or more ZeRO"
    )


def _most(strategy: Strategy, caps: Sequence[int]) -> int:
    """The largest number that can be shared: evenly, no share exceeds another by two."""
    if strategy.balance == "even":
        least = min(caps)
        return least * len(caps) + sum(cap > least for cap in caps)
    return sum(caps)


def _fitting_zero(
    graph: StrategyGraph, cluster: Cluster, profile: ModelProfile, training: Training
) -> str:
    """The least ZeRO of the whole model that fits one sample on every device, as a remedy."""
    parameters = tuple(parameter.path for parameter in profile.parameters)
    count = len(cluster.devices)
    for name, zero, offload in (
        ("zero1", 1, "none"),
        ("zero2", 2, "none"),
        ("zero3", 3, "none"),
        ("zero3_offload", 3, "cpu"),
    ):
        node = Replicate("", None, zero, offload, offload)
        whole = BoundTaskGraph("model", node, ("*",), parameters, profile.forward_flops)
        other = StrategyGraph((whole,), graph.degree)
        needed = backbone_memory(other, profile, training, count, 1).total
        fits = all(needed <= device.memory_bytes for device in cluster.devices)
        if fits and count > 1 and not profile.perhaps_unused:
            return f"use strategy={name}, which needs {_gb(needed)}"
    return "no ZeRO stage makes it fit: use more devices or a smaller model"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
