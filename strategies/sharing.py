"""Who takes how much: samples per rank, and classes per rank of a split head.

Speed within memory, exactly (`shares.py`), or evenly; and where nothing fits, by how much and
what would. Estimates are `memory.py`'s.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from whale_train.errors import Fault
from whale_train.quantities import in_bytes
from whale_train.strategies.alive import Passing, passing
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.cost import flops_rate
from whale_train.strategies.grammar import Replicate, Strategy
from whale_train.strategies.graph import BoundTaskGraph, StrategyGraph
from whale_train.strategies.kept import View
from whale_train.strategies.memory import (
    head_activation_bytes,
    head_memory,
    precision_bytes,
    replica_memory,
    unmeasured,
)
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import MemoryEstimate
from whale_train.strategies.shares import even_shares, optimal_shares


@dataclass(frozen=True)
class Training:
    """What the resolver must know of the training itself.

    `optimizer_options` are the keyword arguments of the optimizer of that name (`sgd`, `adam`,
    `adamw`, `lamb`); `grad_clip` 0 means off. `sync_batchnorm`: BatchNorm's statistics are those
    of the global batch. `accumulate` is in how many micro-batches a rank takes its share.
    `loss_over` and `samples_are_independent` are what the user says of the model's loss.
    """

    global_batch: int
    precision: str
    grad_clip: float
    optimizer: str
    optimizer_options: dict[str, Any]
    sync_batchnorm: bool = True
    accumulate: int = 1
    loss_over: Literal["mean", "sum"] | None = None
    samples_are_independent: bool = False

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

    backbone = BackboneMemory(graph, profile, training, cluster)
    one = backbone.of(1).total
    fixed = each = 0.0
    if graph.head is not None:
        fixed = split_head_memory(graph, profile, training, 0).total
        each = split_head_memory(graph, profile, training, graph.head.classes).total - fixed
        each /= graph.head.classes
    need = one + fixed + each
    if any(device.memory_bytes < need for device in devices):
        faults.append(_no_room_for_one(strategy, graph, cluster, profile, training, need))
        return None
    classes: tuple[int, ...] = ()
    if graph.head is not None:
        caps = [_fitting(device.memory_bytes - one - fixed, each) for device in devices]
        found = shared(graph.head.classes, [min(c, graph.head.classes) for c in caps], 1)
        if found is None:
            faults.append(_no_room_for_head(strategy, graph, caps, each, cluster))
            return None
        classes = found
    room = [device.memory_bytes for device in devices]
    if classes:
        room = [left - fixed - each * c for left, c in zip(room, classes, strict=True)]
    pieces, batch = training.accumulate, training.global_batch
    at_a_time = {left: max(backbone.most(left, batch), 0) for left in set(room)}
    caps = [min(at_a_time[left] * pieces, batch) for left in room]
    samples = shared(training.global_batch, caps, pieces)
    if samples is None:
        each = backbone.of(2).total - one
        faults.append(_no_room_for_batch(strategy, training, caps, each, cluster))
        return None
    return Sharing(samples, classes)


def _fitting(room: float, each: float) -> int:
    """How many of `each` bytes fit into `room`."""
    if room < 0:
        return 0
    return int(room / each) if each > 0 else 2**62


class BackboneMemory:
    """What a rank needs for the replicated part, by the samples it takes at a time."""

    def __init__(
        self, graph: StrategyGraph, profile: ModelProfile, training: Training, cluster: Cluster
    ) -> None:
        self._graph, self._profile, self._training = graph, profile, training
        self._cluster = cluster
        self._alive = _alive(graph, profile, training.precision)
        self._known: dict[int, MemoryEstimate] = {}

    def of(self, samples: int) -> MemoryEstimate:
        if samples not in self._known:
            self._known[samples] = replica_memory(
                self._graph.task_graphs[0],
                self._profile,
                len(self._cluster.devices),
                self._training.optimizer_states,
                self._training.precision,
                self._alive,
                samples,
                accumulate=self._training.accumulate > 1,
                on_cpu=self._cluster.on_cpu,
                by_block=self._graph.cut is not None,
            )
        return self._known[samples]

    def most(self, room: float, limit: int) -> int:
        """How many samples, at most `limit`, fit into `room` bytes; -1 if not even none."""
        each = range(limit + 1)
        return bisect_right(each, room, key=lambda samples: self.of(samples).total) - 1


def _alive(graph: StrategyGraph, profile: ModelProfile, precision: str) -> Passing:
    """Of the replicated part: all but what comes from the head's logits, which its shards keep."""
    held = [profile.parameter_by_path[path] for path in graph.task_graphs[0].parameters]
    gradients = {parameter.path: 4.0 * parameter.elements for parameter in held}
    operations = profile.graph
    if operations is None or not any(operation.saved for operation in operations):
        whole, largest = sum(gradients.values()), max(gradients.values(), default=0.0)
        halved = precision_bytes(precision, 0).activations
        return unmeasured(_activation_bytes(graph, profile) * halved, whole, largest)
    canonical = {name: p.path for name, p in profile.parameter_by_path.items()}
    weights = {
        op.name: gradients[canonical[op.path]]
        for op in operations
        if op.target == "parameter" and canonical[op.path] in gradients
    }
    listed = [operation.name for operation in operations]
    if graph.head is not None:
        of_head = operations.descendants({graph.head.operation})
        listed = [name for name in listed if name not in of_head]
    view = View.at(operations, precision)
    return passing(view.rewritten() if graph.cut is not None else view, listed, weights)


def _activation_bytes(graph: StrategyGraph, profile: ModelProfile) -> float:
    """Return the bytes a sample keeps in the replicated part of a model whose operations nobody
    measured: all but what the head's shards keep."""
    if graph.head is None or profile.graph is None:
        return profile.activation_bytes
    of_head = head_activation_bytes(profile.graph[graph.head.operation])
    return max(profile.activation_bytes - of_head, 0.0)


def split_head_memory(
    graph: StrategyGraph, profile: ModelProfile, training: Training, classes: int
) -> MemoryEstimate:
    """With every rank's largest micro-batch gathered, whatever their shares are."""
    assert graph.head is not None
    assert graph.cut is not None
    whole, pieces = training.global_batch, training.accumulate
    batch = min(whole, (whole + graph.degree * (pieces - 1)) // pieces)
    states = training.optimizer_states
    part, precision = classes / graph.head.classes, training.precision
    return head_memory(graph.cut, profile, part, states, precision, batch, pieces > 1)


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
        f"needs {in_bytes(need)} on rank {tight} ({device.name}) for one sample"
        f"{' and one class' if graph.head else ''}, "
        f"{in_bytes(need - device.memory_bytes)} more than its {in_bytes(device.memory_bytes)}"
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
        f"{cluster.name} have memory for ({in_bytes(missing * each)} short)"
    )
    remedy = f"use more devices, a smaller train.global_batch, or at most {most} classes"
    return Fault(f"{graph.task_graphs[1].node.path}.modules", "head", rule, remedy)


def _no_room_for_batch(
    strategy: Strategy, training: Training, caps: list[int], sample: float, cluster: Cluster
) -> Fault:
    most = _most(strategy, caps)
    missing = training.global_batch - most
    rule = (
        f"is {missing} samples ({in_bytes(missing * sample)}) more than the memory of "
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
        needed = BackboneMemory(other, profile, training, cluster).of(1).total
        fits = all(needed <= device.memory_bytes for device in cluster.devices)
        if fits and count > 1 and not profile.perhaps_unused:
            return f"use strategy={name}, which needs {in_bytes(needed)}"
    return "no ZeRO stage makes it fit: use more devices or a smaller model"
