"""Define the Plan: everything the ranks need to know, decided before any of them exists.

A plan is frozen, complete, JSON, and byte for byte the same for the same request. Ranks obey it and
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
from whale_train.strategies.plan.optimizer_classes import OptimizerClass
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

    id: number of the TaskGraph in the plan.
    name: name of the TaskGraph.
    primitive: primitive of the strategy's node.
    path: path of the node's key in the strategy.
    modules: paths of the modules that it covers.
    parameters: paths of the parameters that it holds.
    flops: FLOPs of its forward, for one sample.
    zero: ZeRO stage of its copies.
    offload: where the `optimizer` and the `parameters` are kept, `none` or `cpu`.
    replicas: for each copy, the ranks that hold it (one rank, unless the copy is itself sharded).
    shares: samples of each replica in an optimizer step.
    trained: paths of the parameters that are trained. A parameter that the loss does not depend on
        is in no TaskGraph's list.
    narrow: paths of the parameters of which ranks hold the 16-bit values that autocast would make.
        They are trained ones whose fp32 master ZeRO or the host has, and frozen ones.
    shards: for each sharded parameter, the interval [start, stop) of each rank, in the order of a
        replica's ranks. It is in units of the axis of `shard_layouts`, as a fused weight is cut in
        several places at once.
    shard_dims: dimension of each sharded parameter that is cut.
    shard_layouts: layout of each sharded parameter, which names the axis it is cut along.
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
        """Return whether trained weights stay on the host until they are read on the device.

        Weights that ZeRO 3 brings are not meant.
        """
        return self.offload["parameters"] == "cpu" and self.zero < 3


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a step, by what holds them.

    parameters: bytes of weights.
    gradients: bytes of gradients.
    optimizer: bytes of the optimizer's state.
    activations: bytes of activations.
    communication: bytes of buffers for communication.
    """

    parameters: Number
    gradients: Number
    optimizer: Number
    activations: Number
    communication: Number

    @property
    def total(self) -> float:
        """Return the sum of all bytes."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.communication
        )


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of the job: its device, what it holds, and how much it takes at a time.

    rank: global rank.
    node: number of the rank's node.
    device: kind of the rank's device.
    task_graphs: ids of the TaskGraphs that it holds a part of.
    micro_batch_size: samples of its largest micro-batch.
    micro_batches: its micro-batches in a step (the same for every rank under ZeRO 3, which demands
        it).
    memory_bytes: bytes that it needs at the peak of a step.
    deepspeed: by the id of a TaskGraph, the DeepSpeed config of its engine, or None where torch
        alone runs it.
    samples: its samples, as intervals [start, stop) of the global batch (empty where shares alone
        say it).
    uuid: UUID of the GPU that it opens; None where it opens none, or nobody has looked for it.
    accumulates: whether it adds gradients of weights to their sums in place, or defers them, as a
        step of several backwards does.
    keeps_casts: whether it keeps the 16-bit copies of its weights for all micro-batches of a step.
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
    accumulates: bool = field(default=False, metadata=OMITTED)
    keeps_casts: bool = field(default=False, metadata=OMITTED)


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a step, and how the busiest rank spends it.

    step_time_s: seconds of a step.
    samples_per_s: samples a second.
    compute_s: seconds in which the busiest rank computes.
    communication_s: seconds in which it communicates or waits for transfers.
    optimizer_s: seconds in which it updates.
    idle_s: seconds in which it waits for other ranks.
    """

    step_time_s: Number
    samples_per_s: Number
    compute_s: Number
    communication_s: Number
    optimizer_s: Number
    idle_s: Number


@dataclass(frozen=True)
class Decision:
    """Something that the resolver chose.

    key: key of the request that was decided.
    chosen: what was chosen.
    rejected: what was rejected.
    reason: why.
    rejected_step_s: seconds of a step under what was rejected; None where none was simulated.
    rejected_floor_s: seconds that a step under what was rejected takes at least, by estimate; None
        where there is no estimate.
    """

    key: str
    chosen: str
    rejected: str
    reason: str
    rejected_step_s: Number | None = field(default=None, metadata=OMITTED)
    rejected_floor_s: Number | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class PlannedParameterGroup:
    """Parameters that the optimizer updates with the same options.

    weight_decay: their weight decay; None for an optimizer that has none.
    lr_scale: their learning rate, as a part of the optimizer's.
    parameters: their paths.
    optimizer: the index of their optimizer among `Plan.optimizers`.
    """

    weight_decay: float | None
    lr_scale: float
    parameters: tuple[str, ...]
    optimizer: int = field(default=0, metadata=OMITTED)


@dataclass(frozen=True)
class Plan:
    """The plan of a whole job.

    cluster: name of the hardware.
    world_size: number of ranks.
    global_batch: samples of a step.
    precision: precision of training.
    task_graphs: parts of the model, each under one primitive.
    groups: by name, the lists of ranks that communicate.
    schedule: order of a pipeline's work (`none` without a pipeline).
    ranks: the part of each rank.
    predicted: predicted time of a step on the cluster.
    decisions: what the resolver chose, and why.
    predicted_here: predicted time of a step of the CPU processes that stand for the devices, where
        those were measured.
    exported: whether there was an exported graph, and so whether parameters without a gradient are
        known.
    rewrite: how the graph is cut and which layouts its values have (None: the model runs as it is).
    pipeline: who runs which chunk for which micro-batch (None: a flat strategy). The order of work
        is `orders.py`'s.
    loss_over: what the loss of a batch is of the losses of its samples, their `mean` or `sum`.
    peak_flops_s: most FLOP/s of `precision` that all devices together compute.
    reduce_dtype: dtype in which copies send gradients.
    mixtures: number of experts of each mixture, by the value of the graph that says where the rows
        of each expert end.
    router_biases: by the same value, the buffer by which the mixture's router chooses among
        experts.
    varies: whether the forward runs other modules or losses from batch to batch.
    inventory: the cluster itself (None in plans of versions that did not say it).
    parameter_groups: the trained parameters by the optimizer's options of them; empty where all
        have the same.
    optimizers: the optimizers that are named by their class, that of parameters without a group
        first; empty where the optimizer is one of ours.
    """

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
    parameter_groups: tuple[PlannedParameterGroup, ...] = field(default=(), metadata=OMITTED)
    optimizers: tuple[OptimizerClass, ...] = field(default=(), metadata=OMITTED)

    @property
    def model_flops(self) -> float:
        """Return the FLOPs of a sample's forward and backward, without what is recomputed.

        A backward has twice the FLOPs of a forward (Narayanan et al. 2021, arXiv 2104.04473,
        appendix).
        """
        return 3.0 * sum(task_graph.flops for task_graph in self.task_graphs)

    @property
    def shares_batch(self) -> bool:
        """Return whether a step's samples are shared, by copies or among micro-batches."""
        copied = any(len(task_graph.replicas) > 1 for task_graph in self.task_graphs)
        return copied or any(rank.micro_batches > 1 for rank in self.ranks)

    @property
    def loss_weights(self) -> LossWeights:
        """Return the weights of the losses of a batch's parts in the loss of the batch."""
        return LossWeights(self.loss_over, self.global_batch)

    def to_json(self) -> str:
        """Return the text of plan.json.

        Keys keep the order of the fields, so that equal plans are equal bytes.
        """
        return json.dumps(_plain(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote as `text`."""
        return _reader().validate_json(text)

    def optimizer_of(self, path: str) -> OptimizerClass | None:
        """Return the optimizer, named by its class, of the parameter `path`; None where it is one
        of ours."""
        if not self.optimizers:
            return None
        groups = (group for group in self.parameter_groups if path in group.parameters)
        return self.optimizers[next((group.optimizer for group in groups), 0)]

    def task_graph_of(self, rank: int, primitive: str) -> TaskGraph | None:
        """Return the first TaskGraph of `primitive` that `rank` holds a part of, or None."""
        held = (self.task_graphs[i] for i in self.ranks[rank].task_graphs)
        return next((t for t in held if t.primitive == primitive), None)


@cache
def _reader() -> TypeAdapter[Plan]:
    """Return the reader that validates a plan's JSON."""
    return TypeAdapter(Plan)


def _plain(value: Any) -> Any:
    """Return `value` in the types of JSON; empty fields marked `OMITTED` are left out."""
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
