"""Define the Plan: everything that ranks need to know, decided before they start.

A plan is frozen, complete, JSON, and byte for byte the same for the same request. Ranks execute it
and resolve nothing again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from whale_train.strategies.plan.inventory import PlannedInventory
from whale_train.strategies.plan.logical_workers import LogicalWorkers
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
    flops: FLOP of its forward, for one sample.
    zero: ZeRO stage of its replicas.
    offload: location of the `optimizer` and the `parameters`: `none` (the device) or `cpu`.
    replicas: for each replica, the ranks that hold it (one rank, unless the replica is sharded).
    shares: samples of each replica in an optimizer step.
    trained: paths of the trained parameters. A parameter that the loss does not depend on is in no
        TaskGraph's list.
    narrow: paths of the parameters that ranks hold as the 16-bit values that autocast would make.
        They are trained ones whose fp32 master ZeRO or the host holds, and frozen ones.
    shards: for each sharded parameter, the interval [start, stop) of each rank, in the order of a
        replica's ranks. It is in units of the axis of `shard_layouts`, since a fused weight is cut
        in several places.
    shard_dims: sharded dimension of each sharded parameter.
    shard_layouts: layout of each sharded parameter, which names the axis it is cut along.
    state_parts: relative part of each replica in the state that ZeRO partitions, by our own engine
        (docs/adr/095); empty where DeepSpeed partitions it equally.
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
    state_parts: tuple[int, ...] = field(default=(), metadata=OMITTED)

    @property
    def streams(self) -> bool:
        """Return True if trained weights are streamed from the host when they are read. Parameters
        that ZeRO 3 offloads do not count."""
        return self.offload["parameters"] == "cpu" and self.zero < 3


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of one rank in a step, by use.

    parameters: bytes of weights.
    gradients: bytes of gradients.
    optimizer: bytes of the optimizer's state.
    activations: bytes of activations.
    communication: bytes of communication buffers.
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
    """One rank's part of the job: its device, what it holds, and its samples.

    rank: global rank.
    node: number of the rank's node.
    device: kind of the rank's device.
    task_graphs: ids of the TaskGraphs of which it holds a part.
    micro_batch_size: samples of its largest micro-batch.
    micro_batches: its micro-batches in a step (equal on all ranks under ZeRO 3, which requires it).
    memory_bytes: its peak bytes in a step.
    deepspeed: DeepSpeed config of a TaskGraph's engine, by the id of the TaskGraph; None where
        torch alone runs it.
    samples: its samples, as intervals [start, stop) of the global batch (empty where the shares
        determine them).
    uuid: UUID of the GPU that it opens; None where it opens none, or none has been assigned.
    accumulates: True if it accumulates weight gradients in place, or defers them, as a step of
        several backwards does.
    keeps_casts: True if it keeps the 16-bit copies of its weights for all micro-batches of a step.
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
    samples_per_s: samples per second.
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
    """A choice of the resolver.

    key: key of the request that was decided.
    chosen: the chosen value.
    rejected: the rejected alternative.
    reason: the reason for the choice.
    rejected_step_s: seconds of a step under the rejected alternative; None where none was
        simulated.
    rejected_floor_s: estimated lower bound, in seconds, of a step under the rejected alternative;
        None where there is no estimate.
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
    lr_scale: their learning rate, as a factor of the optimizer's.
    parameters: their paths.
    optimizer: the index of their optimizer in `Plan.optimizers`.
    trust_ratio: whether LARS scales their updates by the trust ratio.
    """

    weight_decay: float | None
    lr_scale: float
    parameters: tuple[str, ...]
    optimizer: int = field(default=0, metadata=OMITTED)
    trust_ratio: bool = field(default=True, metadata=OMITTED)


@dataclass(frozen=True)
class Plan:
    """The plan of a whole job.

    cluster: name of the hardware.
    world_size: number of ranks.
    global_batch: samples of a step.
    precision: precision of training.
    task_graphs: parts of the model, each under one primitive.
    groups: lists of the ranks that communicate, by name.
    schedule: pipeline schedule (`none` without a pipeline).
    ranks: the part of each rank.
    predicted: predicted time of a step on the cluster.
    decisions: choices of the resolver, with reasons.
    predicted_here: predicted time of a step of the CPU processes that stand for the devices, where
        these were measured.
    exported: True if the model has an exported graph, so that parameters without a gradient are
        known.
    rewrite: the segments of the graph and the layouts of its values (None: the model runs as it
        is).
    pipeline: the position that runs each chunk of each micro-batch (None: a flat strategy).
        `orders.py` owns the order of work.
    loss_over: the reduction of the loss of a batch over its samples, `mean` or `sum`.
    peak_flops_s: peak FLOP/s of all devices together at `precision`.
    reduce_dtype: dtype in which replicas send gradients.
    mixtures: number of experts of each mixture, by the value of the graph with the end offsets of
        the experts' rows.
    router_biases: the buffer by which each mixture's router chooses experts, by the same value.
    varies: True if the forward runs other modules or losses from batch to batch.
    inventory: the cluster itself (None in plans of versions without it).
    parameter_groups: the trained parameters, grouped by the optimizer's options; empty where all
        have the same.
    optimizers: the optimizers that are named by their class, the first for parameters without a
        group; empty where the optimizer is one of ours.
    logical_workers: the logical workers that the ranks run (None: ranks have shares of their own).
    recomputed: paths of the modules that are recomputed in the backward, where the model runs as it
        is; those of a rewritten graph are in its chunks.
    offloaded: paths of the modules whose saved tensors are sent to the host, where the model runs
        as it is.
    scaled_weights: paths of the weights whose products round their factors to 8 bits; their
        operations are in the segments of a rewritten graph.
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
    logical_workers: LogicalWorkers | None = field(default=None, metadata=OMITTED)
    recomputed: tuple[str, ...] = field(default=(), metadata=OMITTED)
    offloaded: tuple[str, ...] = field(default=(), metadata=OMITTED)
    scaled_weights: tuple[str, ...] = field(default=(), metadata=OMITTED)

    @property
    def model_flops(self) -> float:
        """Return the FLOP of a sample's forward and backward, without recomputation.

        A backward has twice the FLOP of a forward (Narayanan et al. 2021, arXiv 2104.04473,
        appendix).
        """
        return 3.0 * sum(task_graph.flops for task_graph in self.task_graphs)

    @property
    def shares_batch(self) -> bool:
        """Return True if a step's samples are divided among replicas or micro-batches."""
        copied = any(len(task_graph.replicas) > 1 for task_graph in self.task_graphs)
        return copied or any(rank.micro_batches > 1 for rank in self.ranks)

    @property
    def loss_weights(self) -> LossWeights:
        """Return the weights of the losses of a batch's parts in the loss of the batch."""
        return LossWeights(self.loss_over, self.global_batch)

    def to_json(self) -> str:
        """Return the text of plan.json. Keys keep the order of the fields, so that equal plans are
        equal bytes."""
        return json.dumps(_plain(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote as `text`."""
        return _reader().validate_json(text)

    def optimizer_of(self, path: str) -> OptimizerClass | None:
        """Return the optimizer of the parameter `path`, if optimizers are named by their class;
        None where the optimizer is one of ours."""
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
    """Return `value` in JSON types. Empty fields marked `OMITTED` are left out."""
    if is_dataclass(value):
        mapping = {
            part.name: _plain(getattr(value, part.name))
            for part in fields(value)
            if getattr(value, part.name) or "omitted" not in part.metadata
        }
        return {**mapping, "total": value.total} if isinstance(value, MemoryEstimate) else mapping
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
