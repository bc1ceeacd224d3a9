"""Logical workers: the unit of work of elastic data parallelism (EasyScale, arXiv 2208.14228).

A step has a fixed number of logical workers, whatever the number of devices. Each has an equal part
of the global batch, and a device runs its workers one after another. This file owns which device
runs which worker, and how far the bits of a run can be promised. The ranks sum the gradients in the
order of the workers (`runtime/engines/worker_sums.py`).
"""

from collections.abc import Iterator, Sequence
from functools import partial

from whale_train.errors import Fault, listed
from whale_train.strategies.grammar.nodes import Replicate, Strategy
from whale_train.strategies.graph.operation_graph import Operation, OperationGraph
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.logical_workers import Level, LogicalWorkers
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.plan.training import Training
from whale_train.strategies.schedule.apportion import apportion_by_time
from whale_train.strategies.stages.chunk_cost import ChunkTimes
from whale_train.strategies.stages.placement import PlanningContext

KEY = "strategy.logical_workers"

# Operations whose kernels for GPUs add in the order in which threads arrive, in the forward or the
# backward, and have no other kernel: those for which torch.use_deterministic_algorithms raises
# (documentation of torch 2.13).
_UNORDERED = frozenset(
    (
        *("adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool3d"),
        *("fractional_max_pool2d", "fractional_max_pool3d", "max_unpool2d", "max_unpool3d"),
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
        *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "nll_loss2d", "ctc_loss"),
        *("put", "put_", "histc", "bincount", "median", "grid_sampler", "cumsum"),
    )
)

_NORMS_WITH_STATISTICS = ("batch_norm", "instance_norm")  # parts of the names of such operations


def deal(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each device's workers, in the order in which it runs them.

    counts: number of workers of each device.

    Workers are dealt in rounds. The workers that devices run at the same time are consecutive, so
    their gradients can be added to the sum of all earlier ones as soon as they are there.
    """
    dealt: list[list[int]] = [[] for _ in counts]
    number = 0
    for turn in range(max(counts, default=0)):
        for device, count in enumerate(counts):
            if turn < count:
                dealt[device].append(number)
                number += 1
    return tuple(map(tuple, dealt))


def worker_counts(job: PlanningContext, times: ChunkTimes) -> tuple[int, ...]:
    """Return the number of workers of each device, at least 1, with which the slowest device
    finishes as early as whole workers allow."""
    total, copies = job.strategy.logical_workers, range(job.form.copies)
    assert total is not None
    size = job.training.global_batch // total
    of_kind: dict[int, partial[float]] = {}
    seconds = [
        of_kind.setdefault(id(job.cluster.devices[copy]), partial(_seconds, times, copy, size))
        for copy in copies
    ]
    counts = apportion_by_time(job.strategy.balance, total, seconds, [total] * len(copies), 1)
    assert counts is not None  # `refuse_workers` asks for at least as many workers as devices
    return counts


def _seconds(times: ChunkTimes, copy: int, size: int, workers: int) -> float:
    """Return the seconds in which a device runs `workers` workers of `size` samples each."""
    return workers * times.stage_s(0, copy, 0, size)


def worker_samples(counts: Sequence[int], size: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the intervals [start, stop) of the global batch that each device takes, one for each
    of its workers.

    counts: number of workers of each device.
    size: samples of a worker.
    """
    return [tuple((size * x, size * (x + 1)) for x in workers) for workers in deal(counts)]


def refuse_workers(
    strategy: Strategy, cluster: Cluster, training: Training, faults: list[Fault]
) -> None:
    """Add every fault that logical workers have with any model: a strategy that divides the model,
    a batch or devices that they cannot share, and options that change bits with the devices."""
    total = strategy.logical_workers
    if total is None:
        return
    node = strategy.graph[0] if len(strategy.graph) == 1 else None
    if not isinstance(node, Replicate) or node.of or node.modules != ("*",):
        rule = "are copies of the whole model, and strategy.graph divides it"
        remedy = "use strategy=elastic_dp, whose graph is {replicate: {}}, or null"
        faults.append(Fault(KEY, str(total), rule, remedy))
        return
    if node.zero:
        rule = f"partitions the update by the number of devices, and so its bits, under {KEY}"
        remedy = f"use zero: 0, or {KEY}=null"
        faults.append(Fault(f"{node.path}.zero", str(node.zero), rule, remedy))
    devices = node.degree or len(cluster.devices)
    if devices > total:
        rule = f"leaves {devices - total} of {devices} devices without a worker"
        remedy = f"use at least {devices}, or strategy.devices={total}"
        faults.append(Fault(KEY, str(total), rule, remedy))
    batch = training.global_batch
    if batch % total:
        below, above = batch // total * total, (batch // total + 1) * total
        rule = f"cannot be shared equally by {total} logical workers ({KEY})"
        remedy = f"use {below} or {above}" if below else f"use {above}"
        faults.append(Fault("train.global_batch", str(batch), rule, remedy))
    if training.accumulate > 1:
        rule = f"cuts a device's share, which consists of logical workers ({KEY}={total})"
        remedy = f"use 1, and {KEY}={total * training.accumulate} for workers as small"
        faults.append(Fault("train.accumulate", str(training.accumulate), rule, remedy))
    if training.reduce_dtype != "fp32":
        rule = (
            f"sends gradients in 16 bits, and those of logical workers are summed in fp32 ({KEY})"
        )
        faults.append(Fault("train.reduce_dtype", training.reduce_dtype, rule, "use fp32"))
    if training.all_reduce == "hierarchical":
        rule = f"sums by hosts, and gradients of logical workers are summed one by one ({KEY})"
        faults.append(Fault("train.all_reduce", "hierarchical", rule, "use auto"))


def planned_workers(job: PlanningContext, samples: Sequence[Sequence[object]]) -> LogicalWorkers:
    """Return the logical workers of `job` for its plan.

    samples: what each device takes of the global batch, one item for each of its workers.
    """
    total = job.strategy.logical_workers
    assert total is not None
    level, stops = _promised(job)
    return LogicalWorkers(
        count=total,
        of_ranks=deal([len(of_device) for of_device in samples]),
        level=level,
        stops=stops,
        buffers=_written_buffers(job.graph),
    )


def _written_buffers(graph: OperationGraph) -> tuple[str, ...]:
    """Return the paths of the buffers that a forward writes. Norms write their running statistics
    without saying so in the graph."""
    paths = dict.fromkeys(graph.changed_buffers)
    for operation in graph.operations:
        if any(name in operation.target for name in _NORMS_WITH_STATISTICS):
            held = (graph[name] for name in operation.inputs)
            paths |= dict.fromkeys(x.path for x in held if x.target == "buffer")
    return tuple(paths)


def _promised(job: PlanningContext) -> tuple[Level, tuple[str, ...]]:
    """Return the level that the bits of a run have, and the operations that stop the next level.

    Products and convolutions sum in an order that a library chooses for a kind of device: they stop
    the same bits on unlike devices.
    """
    operations = job.graph.operations
    unordered = dict.fromkeys(_short(x) for x in operations if _is_unordered(x))
    if unordered and not job.cluster.on_cpu:
        return "none", tuple(unordered)
    summing = tuple(dict.fromkeys(_short(x) for x in operations if x.flops))
    kinds = {device.name for device in job.cluster.devices}
    return ("elastic" if len(kinds) == 1 else "fixed_devices"), summing


def _is_unordered(operation: Operation) -> bool:
    """Return True if kernels for GPUs add the operation's terms in no fixed order."""
    name = _short(operation)
    if name == "cumsum":
        return operation.dtype.startswith(("float", "bfloat"))
    if name.startswith("adaptive_avg_pool") and operation.shape is not None:
        return any(size.at(1) != 1 for size in operation.shape[2:])  # to one value: torch's mean
    return name in _UNORDERED


def _short(operation: Operation) -> str:
    """Return the name of the ATen operator, without its namespace and overload."""
    return operation.target.removeprefix("aten.").split(".")[0]


def explained_workers(job: PlanningContext, workers: LogicalWorkers) -> Iterator[Decision]:
    """Yield the decisions on logical workers: who runs them, how far their bits are promised, and
    whose statistics batch norms take."""
    counts = [len(of_rank) for of_rank in workers.of_ranks]
    size = job.training.global_batch // workers.count
    shown = ", ".join(f"{counts.count(n)} x {n}" for n in dict.fromkeys(counts))
    reason = f"{workers.count} logical workers of {size} samples, on {len(counts)} devices"
    yield Decision(f"{KEY} of a device", shown, "", reason)
    by = listed(workers.stops, 4)
    if workers.level == "none":
        reason = f"GPUs add in no fixed order in {by}"
        yield Decision(f"{KEY} bits", "may differ from run to run", "elastic", reason)
    elif workers.level == "fixed_devices":
        reason = f"unlike devices sum in orders of their own in {by}"
        yield Decision(f"{KEY} bits", "the same on these devices", "elastic", reason)
    else:
        reason = f"on devices of this kind; unlike devices sum in orders of their own in {by}"
        yield Decision(f"{KEY} bits", "the same on any number of devices", "", reason)
    if norms := job.profile.batch_norm_modules:
        reason = f"{norms[0]} and others take the statistics of one logical worker's samples"
        yield Decision("model.sync_batchnorm", "false", "true", reason)
