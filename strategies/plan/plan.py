"""The Plan: everything the ranks need to know, decided before any of them exists.

Frozen, complete, JSON, and byte for byte the same for the same request. Ranks obey it and
resolve nothing again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from whale_train.strategies.plan.inventory import PlannedInventory
from whale_train.strategies.plan.loss_weights import LossWeights
from whale_train.strategies.plan.program import (
    OMITTED,
    Number,
    PlannedGraph,
    PlannedPipeline,
    PlannedShard,
)


@dataclass(frozen=True)
class TaskGraph:
    """A non-overlapping part of the model under one primitive.

    `replicas` lists, for each copy, the ranks that hold it (one rank unless the copy is itself
    sharded). `shares` are samples per replica and optimizer step. `shards` gives, per sharded
    parameter, each rank's [start, stop) in the order of the replica's ranks, along the dimension
    `shard_dims` names; in a nested strategy in units of the axis `shard_layouts` says it is cut
    along, as a fused weight is cut in several places at once. `modules` are the module paths it
    covers; `flops` its forward's, per sample. Parameters the loss does not depend on are in no
    TaskGraph's `trained` list. `narrow` are the parameters of which its ranks hold the values in 16
    bits that autocast would make of them: trained ones, of which ZeRO or the host has a master, and
    frozen ones.
    """

    id: int
    name: str
    primitive: str
    path: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    flops: Number
    zero: int
    offload: dict[str, str]
    replicas: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]
    trained: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    shards: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    shard_dims: dict[str, int] = field(default_factory=dict)
    shard_layouts: dict[str, PlannedShard] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether trained weights stay on the host and come to the device when they are read:
        those that ZeRO 3 does not bring."""
        return self.offload["parameters"] == "cpu" and self.zero < 3


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a step, by what holds them."""

    parameters: Number
    gradients: Number
    optimizer: Number
    activations: Number
    communication: Number

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.communication
        )


@dataclass(frozen=True)
class RankPlan:
    """One rank's part: where it is, what it holds, how much it takes at a time.

    `micro_batch_size` is its largest micro-batch; `micro_batches` how many a step has for it (the
    same for every rank under ZeRO-3, which demands it). `samples` are they, as [start, stop) of
    the global batch (empty where shares alone say it). `deepspeed` maps a TaskGraph's id to the
    DeepSpeed config of its engine, or None where torch alone runs it. `uuid` is that of the GPU it
    opens; None where it opens none, or nobody has looked for it.
    """

    rank: int
    node: int
    device: str
    task_graphs: tuple[int, ...]
    micro_batch_size: int
    micro_batches: int
    memory_bytes: MemoryEstimate
    deepspeed: dict[str, dict[str, Any] | None]
    samples: tuple[tuple[int, int], ...] = ()
    uuid: str | None = None


@dataclass(frozen=True)
class Prediction:
    """A step's predicted time, and the parts of which that of its busiest rank is made, in seconds:
    it computes, communicates or waits for transfers, updates, and waits for other ranks."""

    step_time_s: Number
    samples_per_s: Number
    compute_s: Number
    communication_s: Number
    optimizer_s: Number
    idle_s: Number


@dataclass(frozen=True)
class Decision:
    """Something the resolver chose: what, what it rejected, and why."""

    key: str
    chosen: str
    rejected: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The whole job. `rewrite` says how the exported graph is cut and which layouts its values
    have (None when the model runs as it is); `exported` whether there was a graph at all, and so
    whether parameters without a gradient are known; a forward that `varies` runs other modules or
    losses from batch to batch. `predicted_here` is the step of the CPU
    processes that stand for the devices, where those were measured. `pipeline` says who runs which
    chunk of it for which micro-batch (None for a flat strategy); the order is `orders.py`'s.
    `loss_over` is what a batch's loss is of the losses of its samples: their `mean` or `sum`.
    `peak_flops_s` is what all devices together compute at most, in FLOP/s of `precision`.
    `reduce_dtype` is what copies send gradients in. `mixtures` have so many experts, by the value
    of the graph that says where the rows of each end; `router_biases` are the buffers by which
    routers choose among these. `inventory` is the cluster itself (None in plans of versions before
    it was said)."""

    cluster: str
    world_size: int
    global_batch: int
    precision: str
    task_graphs: tuple[TaskGraph, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    schedule: str
    ranks: tuple[RankPlan, ...]
    predicted: Prediction
    decisions: tuple[Decision, ...]
    predicted_here: Prediction | None = None
    exported: bool = True
    rewrite: PlannedGraph | None = None
    pipeline: PlannedPipeline | None = None
    loss_over: Literal["mean", "sum"] = "mean"
    peak_flops_s: Number = 0
    reduce_dtype: str = "fp32"
    mixtures: Mapping[str, int] = field(default_factory=dict, metadata=OMITTED)
    router_biases: Mapping[str, str] = field(default_factory=dict, metadata=OMITTED)
    varies: bool = field(default=False, metadata=OMITTED)
    inventory: PlannedInventory | None = field(default=None, metadata=OMITTED)

    @property
    def model_flops(self) -> float:
        """The FLOPs of a sample's forward and backward, which is twice the forward's (Narayanan et
        al. 2021, arXiv 2104.04473, appendix), without what is computed again."""
        return 3.0 * sum(task_graph.flops for task_graph in self.task_graphs)

    @property
    def shares_batch(self) -> bool:
        """Whether a step's samples are shared: by copies, or among micro-batches."""
        copied = any(len(task_graph.replicas) > 1 for task_graph in self.task_graphs)
        return copied or any(rank.micro_batches > 1 for rank in self.ranks)

    @property
    def loss_weights(self) -> LossWeights:
        """What the losses of a batch's parts count in the batch's."""
        return LossWeights(self.loss_over, self.global_batch)

    def to_json(self) -> str:
        """Return the file's text; keys keep the order of the fields, so equal plans are equal
        bytes."""
        return json.dumps(_plain(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote."""
        return _reader().validate_json(text)

    def task_graph_of(self, rank: int, primitive: str) -> TaskGraph | None:
        """Return the TaskGraph of that primitive which `rank` holds a part of."""
        held = (self.task_graphs[i] for i in self.ranks[rank].task_graphs)
        return next((t for t in held if t.primitive == primitive), None)


@cache
def _reader() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def _plain(value: Any) -> Any:
    """Return the plan's parts as JSON has them."""
    if is_dataclass(value):
        written = {
            part.name: _plain(getattr(value, part.name))
            for part in fields(value)
            if getattr(value, part.name) or "omitted" not in part.metadata
        }
        return {**written, "total": value.total} if isinstance(value, MemoryEstimate) else written
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
