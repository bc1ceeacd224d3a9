"""The plan of a strategy, written from its decisions: TaskGraphs, groups, segments, ranks."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.layouts.propagation import Shard
from whale_train.strategies.memory.engine_memory import casts_last, narrow_frozen
from whale_train.strategies.plan.group_names import across_of, context_of, inside_of
from whale_train.strategies.plan.plan import (
    Decision,
    MemoryEstimate,
    Plan,
    Prediction,
    RankPlan,
    TaskGraph,
)
from whale_train.strategies.plan.program import (
    PlannedChunk,
    PlannedCopy,
    PlannedGraph,
    PlannedPipeline,
    PlannedSegment,
)
from whale_train.strategies.resolver.deepspeed_config import deepspeed_config, deepspeed_optimizer
from whale_train.strategies.resolver.parameter_groups import parameter_groups
from whale_train.strategies.resolver.planned_inventory import planned_inventory
from whale_train.strategies.resolver.planned_segment import planned_segment, planned_shard
from whale_train.strategies.schedule.instructions import Instruction, Transits
from whale_train.strategies.simulate.prediction import Simulated, simulated
from whale_train.strategies.stage_memory.within_memory import MemoryBudget
from whale_train.strategies.stages.chunk_cost import ChunkTimes
from whale_train.strategies.stages.gradient_sync import GradientSum, hierarchical_sums
from whale_train.strategies.stages.logical_workers import planned_workers
from whale_train.strategies.stages.micro_batches import Batches
from whale_train.strategies.stages.placement import (
    AxisIntervals,
    PlanningContext,
    StageChunk,
    rewrites_of,
    segment_of,
)
from whale_train.strategies.stages.recomputation import Units, recompute_of, units_of
from whale_train.strategies.stages.step import StagedStep


@dataclass(frozen=True)
class PlanDecisions:
    """All decisions on a strategy, from which its plan is written.

    times: seconds of the chunks.
    axes: intervals of the members of shard groups, by axis.
    batches: micro-batches of every replica.
    edges: pairs (sender, receiver) of chunks; the value is True if a gradient comes back.
    shared: stages of every trained parameter that several stages hold, by path.
    room: memory that the ranks need and have.
    orders: instructions, by replica and position.
    transits: seconds of sending a micro-batch from chunk to chunk that the orders account for, by
        replica.
    """

    times: ChunkTimes
    axes: AxisIntervals
    batches: Batches
    edges: Mapping[tuple[int, int], bool]
    shared: Mapping[str, tuple[int, ...]]
    room: MemoryBudget
    orders: Sequence[Sequence[Sequence[Instruction]]]
    transits: Sequence[Transits]

    @property
    def chunks(self) -> Sequence[StageChunk]:
        """Return all chunks, in the order they run."""
        return self.times.chunks

    @property
    def recomputed(self) -> Units:
        """Return the paths of the modules that are recomputed in the backward, by stage."""
        return self.times.recomputed

    @property
    def offloaded(self) -> Units:
        """Return the paths of the modules whose saved tensors are sent to the host, by stage."""
        return self.times.offloaded

    @cached_property
    def memory(self) -> Mapping[int, MemoryEstimate]:
        """Return the peak bytes of every rank, by rank."""
        return self.room.memory.of_batches(self.batches)


def build_plan(
    job: PlanningContext,
    decided: PlanDecisions,
    predicted: Prediction,
    decisions: Sequence[Decision],
) -> Plan:
    """Return the plan of a strategy.

    job: the strategy on its devices.
    decided: all decisions on it.
    predicted: prediction of its step.
    decisions: choices that the request leaves open, with reasons, which the plan carries.
    """
    form, count = job.form, len(job.cluster.devices)
    summed = sums_in_two_levels(job, decided)
    task_graphs = tuple(
        t for stage in range(len(form.stages)) for t in _task_graphs(job, stage, decided)
    )
    groups: dict[str, tuple[tuple[int, ...], ...]] = {"world": (tuple(range(count)),)}
    for stage, numbers in enumerate(job.task_graphs):
        for number in numbers:
            name = task_graphs[number].name
            if form.stages[stage].body and number == numbers[0]:  # the rest beside a split part
                groups[f"{name}.data_parallel"] = job.copies_of_rest[stage]
                groups |= _levels(name, summed.get((stage, 0)))
                continue
            if form.stages[stage].shares_sequence:
                groups[f"{name}.data_parallel"] = job.copies_of_rest[stage]
                groups |= _levels(name, summed.get((stage, 0)))
                groups[context_of(name)] = job.replicas[stage]
                continue
            is_beside = form.stages[stage].body is not None
            alone = is_beside and form.copies * form.stages[stage].copies == 1
            if not alone or _keeper_beside(job, stage, decided.chunks):
                groups[f"{name}.data_parallel"] = job.data_parallel[stage]
                groups |= _levels(name, summed.get((stage, int(number != numbers[0]))))
            if not job.as_is:
                groups[f"{name}.model_parallel"] = job.replicas[stage]
    for path, stages in decided.shared.items():
        members = sorted(r for s in stages for ranks in job.replicas[s] for r in ranks)
        groups[f"shared.{path}"] = (tuple(members),)
    plan = Plan(
        cluster=job.cluster.name,
        world_size=count,
        global_batch=job.training.global_batch,
        precision=job.training.precision,
        task_graphs=task_graphs,
        groups=groups,
        schedule=form.pipeline.schedule if form.pipeline else "none",
        ranks=tuple(_rank(job, rank, decided, task_graphs) for rank in range(count)),
        predicted=predicted,
        decisions=tuple(decisions),
        exported=job.profile.graph is not None,
        varies=job.profile.varies,
        peak_flops_s=sum(d.flops[job.training.precision] for d in job.cluster.devices),
        reduce_dtype=job.training.reduce_dtype,
        mixtures=dict(job.findings.mixtures),
        router_biases=dict(job.findings.router_biases),
        inventory=planned_inventory(job.cluster),
        parameter_groups=parameter_groups(job.training, job.profile.parameters),
        optimizers=job.training.optimizers,
        scaled_weights=job.findings.scaled_weights,
        logical_workers=None
        if job.strategy.logical_workers is None
        else planned_workers(job, decided.batches.samples),
    )
    if job.as_is:
        (chunk,) = decided.chunks
        again, sent = (units_of(job, chunk, x) for x in (decided.recomputed, decided.offloaded))
        return replace(plan, recomputed=again, offloaded=sent)
    return replace(
        plan,
        rewrite=PlannedGraph(decided.axes, _segments(job, decided, task_graphs)),
        pipeline=_pipeline(job, decided),
    )


def sums_in_two_levels(
    job: PlanningContext, decided: PlanDecisions
) -> dict[tuple[int, int], GradientSum]:
    """Return the sums of gradients that go inside hosts first, by stage and number of the
    engine."""
    priced = _priced(job, decided)
    return hierarchical_sums(job, priced.engines, decided.shared, priced.crowd)


def _priced(job: PlanningContext, decided: PlanDecisions) -> StagedStep:
    """Return the costs of the step."""
    parts = decided.room.memory.parts
    return StagedStep(job, decided.times, decided.batches, decided.orders, decided.shared, parts)


def _levels(name: str, summed: GradientSum | None) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups in which the TaskGraph `name` sums gradients in two levels, if it does."""
    if summed is None or summed.levels is None:
        return {}
    return {inside_of(name): summed.levels.inside, across_of(name): summed.levels.across}


def _segments(
    job: PlanningContext, decided: PlanDecisions, task_graphs: Sequence[TaskGraph]
) -> tuple[PlannedSegment, ...]:
    """Return the segments of a plan, one for each chunk.

    Products and lookups compute their weights' gradients themselves on ranks that accumulate them
    in place or defer them, and under ZeRO 3, which frees weights between forward and backward:
    autograd would keep views of the freed weights.
    """
    adding = {
        job.seats.stage_of[position]
        for of_copy in decided.orders
        for position, order in enumerate(of_copy)
        if job.accumulates(order)
    }
    segments = []
    for chunk in decided.chunks:
        segment = segment_of(job, chunk)
        own_gradients = chunk.stage in adding or task_graphs[segment.task_graph].zero == 3
        rewrites = rewrites_of(job, chunk, own_gradients)
        segments.append(planned_segment(job.graph, segment, rewrites))
    return tuple(segments)


def simulated_step(job: PlanningContext, decided: PlanDecisions) -> Simulated:
    """Return the simulated step on the devices of `job`."""
    priced = _priced(job, decided)
    return simulated(*priced.step(), job.cluster, job.training.global_batch)


def _pipeline(job: PlanningContext, decided: PlanDecisions) -> PlannedPipeline:
    """Return the pipeline of a plan: which position runs which chunk for which micro-batch."""
    form = job.form
    return PlannedPipeline(
        schedule=form.pipeline.schedule if form.pipeline else "1f1b",
        positions=job.chunks_of_positions(),
        copies=tuple(_pipeline_copy(job, decided, copy) for copy in range(form.copies)),
        edges=tuple((*edge, gradient) for edge, gradient in decided.edges.items()),
        chunks=tuple(
            PlannedChunk(
                stage=chunk.stage,
                segments=(number,),
                recompute=recompute_of(job, chunk, decided.recomputed),
                shares_samples=chunk.shares_samples,
                own_losses=chunk.has_own_losses(job.graph.operations[-1].inputs[0]),
                recomputed=units_of(job, chunk, decided.recomputed),
                offloaded=units_of(job, chunk, decided.offloaded),
            )
            for number, chunk in enumerate(decided.chunks)
        ),
        shared={
            path: tuple(job.task_graphs[stage][0] for stage in stages)
            for path, stages in decided.shared.items()
        },
        one_backward=job.has_one_backward(decided.orders),
    )


def _pipeline_copy(job: PlanningContext, decided: PlanDecisions, copy: int) -> PlannedCopy:
    """Return one replica of the pipeline of a plan: its ranks, samples, owners, and times in
    seconds."""
    batches = decided.batches
    durations = decided.times.durations(copy, batches.largest(copy))
    return PlannedCopy(
        positions=job.seats.positions[copy],
        samples=batches.samples[copy],
        owners=batches.owners[copy],
        durations=tuple((*place, *times) for place, times in durations.items()),
        transits=tuple((*ends, seconds) for ends, seconds in decided.transits[copy].items()),
        members=tuple(batches.members[copy][stage] for stage in job.seats.stage_of)
        if batches.members
        else (),
    )


def _task_graphs(job: PlanningContext, stage: int, decided: PlanDecisions) -> Iterator[TaskGraph]:
    """Yield the TaskGraphs of a stage: one, or the replicated rest and then the split part."""
    form, chunks = job.form.stages[stage], [c for c in decided.chunks if c.stage == stage]
    alone = len(job.form.stages) == 1
    full_stage = TaskGraph(
        id=job.task_graphs[stage][0],
        name="model" if alone else f"stage_{stage}",
        primitive=_primitive(job),
        path=form.path,
        modules=tuple(dict.fromkeys(m for chunk in chunks for m in chunk.slice.modules)),
        parameters=_listed(job, {path for chunk in chunks for path in chunk.slice.parameters}),
        flops=sum(chunk.slice.flops for chunk in chunks),
        zero=job.zero,
        state_parts=tuple(parts[stage]) if (parts := decided.room.memory.parts) else (),
        offload=_offload(job.form.keeper),
        replicas=job.replicas[stage],
        shares=_shares(job, stage, decided.batches),
        narrow=_narrow_frozen(job, chunks),
    )
    shards = {path: shard for chunk in chunks for path, shard in chunk.shards.items()}
    if form.body is None:
        yield _cut(job, full_stage, shards, decided.axes)
        return
    assert form.split is not None
    split = _split_of(job, chunks)
    members = [
        sum(stop - start for start, stop in _own_samples(job, rank, decided.batches))
        for group in full_stage.replicas
        for rank in group
    ]
    body = replace(
        full_stage,
        name="backbone" if alone else f"stage_{stage}.backbone",
        primitive="replicate",
        path=form.body.path,
        modules=("*",) if alone else full_stage.modules,
        parameters=_listed(job, split.rest_parameters),
        flops=split.rest_flops,
        replicas=tuple((rank,) for group in full_stage.replicas for rank in group),
        shares=tuple(members),
    )
    yield _cut(job, body, {}, decided.axes)
    keeper = _keeper_beside(job, stage, chunks)
    beside = replace(
        full_stage,
        id=job.task_graphs[stage][1],
        name=split.name if alone else f"stage_{stage}.{split.name}",
        primitive="split",
        path=form.split.path,
        modules=split.modules,
        zero=keeper.zero if keeper else 0,
        offload=_offload(keeper),
        parameters=_listed(job, shards),
        flops=split.flops,
        narrow=(),
    )
    yield _cut(job, beside, shards, decided.axes)


def _keeper_beside(
    job: PlanningContext, stage: int, chunks: Sequence[StageChunk]
) -> Replicate | None:
    """Return the ZeRO and offload settings of a stage's split part; None where each rank holds its
    part and the state in full, and where there is no such part."""
    run_by_rest = any(chunk.beside is not None for chunk in chunks if chunk.stage == stage)
    return job.keeper_beside(stage) if run_by_rest else None


@dataclass(frozen=True)
class _SplitPart:
    """The split part of a stage whose rest is replicated.

    name: head, experts or split.
    modules: paths of the part's modules.
    flops: FLOP of the part in a sample's forward.
    rest_flops: FLOP of the rest in a sample's forward.
    rest_parameters: paths of the rest's parameters.
    """

    name: str
    modules: tuple[str, ...]
    flops: float
    rest_flops: float
    rest_parameters: Set[str]


def _split_of(job: PlanningContext, chunks: Sequence[StageChunk]) -> _SplitPart:
    """Return the split part of a stage's chunks: the head, if it is the only part, or the parts of
    all chunks together."""
    operation_chunks = [(name, x) for x in chunks for name in x.slice.operations]
    operations = [
        job.graph[name] for name, chunk in operation_chunks if name in (chunk.beside or ())
    ]
    modules = tuple(dict.fromkeys(operation.module for operation in operations))
    flops = sum(operation.flops for operation in operations)
    cut_here = {path for chunk in chunks for path in chunk.shards}
    rest = frozenset(path for chunk in chunks for path in chunk.slice.parameters) - cut_here
    experts = all(set(chunk.axes) == set(chunk.expert_axes) for chunk in chunks)
    rest_flops = sum(chunk.slice.flops for chunk in chunks) - flops
    if (head := chunks[0].head) is not None:
        return _SplitPart("head", (head.module,), flops, rest_flops, rest)
    return _SplitPart("experts" if experts else "split", modules, flops, rest_flops, rest)


def _primitive(job: PlanningContext) -> str:
    """Return the primitive of a stage's TaskGraph that has no replicated rest."""
    if job.form.pipeline:
        return "stage"
    return "split" if any(stage.split for stage in job.form.stages) else "replicate"


def _listed(
    job: PlanningContext, parameters: Set[str] | Sequence[str] | Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the paths among `parameters`, in the model's order."""
    return tuple(p.path for p in job.profile.parameters if p.path in parameters)


def _cut(
    job: PlanningContext, task_graph: TaskGraph, shards: Mapping[str, Shard], axes: AxisIntervals
) -> TaskGraph:
    """Return the TaskGraph with the shards of its parameters. Without trained parameters, it has no
    ZeRO and no offload."""
    unused = job.profile.unused_parameters
    narrow: frozenset[str] = frozenset()
    if (task_graph.zero or task_graph.streams) and job.training.precision != "fp32":
        narrow = job.profile.narrow.difference(unused)
    narrow_trained = (path for path in task_graph.parameters if path in narrow)
    trained = tuple(path for path in task_graph.parameters if path not in unused)
    if not trained:  # all weights of the stage belong to the split part
        task_graph = replace(task_graph, zero=0, state_parts=(), offload=_offload(None))
    return replace(
        task_graph,
        narrow=(*narrow_trained, *task_graph.narrow),
        trained=trained,
        shards={path: axes[shard.axis] for path, shard in shards.items()},
        shard_dims={path: shard.dim for path, shard in shards.items()},
        shard_layouts={path: planned_shard(shard) for path, shard in shards.items()},
    )


def _narrow_frozen(job: PlanningContext, chunks: Sequence[StageChunk]) -> tuple[str, ...]:
    """Return the paths of the frozen weights of `chunks` that ranks hold in 16 bits."""
    narrow = job.findings.once("narrow frozen", lambda: narrow_frozen(job.profile, job.training))
    held = (path for chunk in chunks for path in chunk.slice.frozen if path in narrow)
    return tuple(dict.fromkeys(held))


def _shares(job: PlanningContext, stage: int, batches: Batches) -> tuple[int, ...]:
    """Return the samples of a step that each copy of a stage takes."""
    return tuple(
        sum(stop - start for start, stop in _owned(job, copy, stage, position, batches))
        for copy in range(job.form.copies)
        for position in job.seats.of_stage(stage)
    )


def _owned(
    job: PlanningContext, copy: int, stage: int, position: int, batches: Batches
) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches that a position owns, as intervals of the global batch."""
    pairs = zip(batches.samples[copy], batches.owners[copy][stage], strict=True)
    return tuple(interval for interval, owner in pairs if owner == position)


def _offload(keeper: Replicate | None) -> dict[str, str]:
    """Return the offload targets ("none" or "cpu") of optimizer and parameters under the settings
    `keeper`."""
    return {
        "optimizer": keeper.offload_optimizer if keeper else "none",
        "parameters": keeper.offload_parameters if keeper else "none",
    }


def _rank(
    job: PlanningContext, rank: int, decided: PlanDecisions, task_graphs: Sequence[TaskGraph]
) -> RankPlan:
    """Return the plan of one rank: its TaskGraphs, samples, memory and DeepSpeed configs.
    `task_graphs` are the TaskGraphs of all stages, by number."""
    stage = job.stage_of_rank(rank)
    samples = _own_samples(job, rank, decided.batches)
    largest = max((stop - start for start, stop in samples), default=0)
    keeper = job.form.keeper
    several = len(job.copies_of_rest[stage][0]) > 1
    copy, position = job.place_of(rank)
    order = decided.orders[copy][position]
    own = keeper if several or (keeper and keeper.offloads) else None
    config = _config(job, own, largest, gradients_in_files=job.has_gradients_in_files(order))
    of_experts = _config(job, _keeper_beside(job, stage, decided.chunks), largest)
    rest, *beside = job.task_graphs[stage]
    # A rest without trained parameters has nothing to partition.
    is_ours = bool(task_graphs[rest].state_parts)
    config = config if task_graphs[rest].zero and not is_ours else None
    zero = max(task_graphs[number].zero for number in job.task_graphs[stage])
    has_casts = job.training.precision != "fp32" and len(samples) > 1 and not job.as_is
    return RankPlan(
        rank=rank,
        node=job.cluster.node_of[rank],
        device=job.cluster.devices[rank].name,
        task_graphs=job.task_graphs[stage],
        micro_batch_size=largest,
        micro_batches=len(samples),
        memory_bytes=decided.memory[rank],
        deepspeed={
            str(rest): config,
            **{str(n): of_experts if task_graphs[n].zero else None for n in beside},
        },
        samples=samples,
        accumulates=job.accumulates(order),
        keeps_casts=has_casts and casts_last(zero, stage in decided.recomputed),
    )


def _config(
    job: PlanningContext,
    keeper: Replicate | None,
    largest: int,
    *,
    gradients_in_files: bool = False,
) -> dict[str, Any] | None:
    """Return the DeepSpeed config of an engine with the settings `keeper`; None without ZeRO.

    largest: number of samples of the rank's largest micro-batch.
    gradients_in_files: as in `deepspeed_config`.
    """
    if keeper is None or not keeper.zero:
        return None
    training, offloaded = job.training, keeper.offload_optimizer != "none"
    optimizer = None
    if not training.optimizers:
        optimizer = deepspeed_optimizer(training.optimizer, training.optimizer_options, offloaded)
    on_cpu, reduce_dtype = job.cluster.on_cpu, training.reduce_dtype
    sent = (reduce_dtype, training.bucket_elements)
    return deepspeed_config(
        *(keeper, largest, training.grad_clip, optimizer, on_cpu, *sent),
        gradients_in_files=gradients_in_files,
    )


def _own_samples(job: PlanningContext, rank: int, batches: Batches) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches that a rank takes, as intervals of the global batch. Where members
    divide the samples, these are the rank's parts of the micro-batches."""
    copy, position = job.place_of(rank)
    stage = job.seats.stage_of[position]
    owned = _owned(job, copy, stage, position, batches)
    if job.form.stages[stage].body is None:
        return owned
    member = job.seats.positions[copy][position].index(rank)
    parts = [
        part[member]
        for part, owner in zip(
            batches.members[copy][stage], batches.owners[copy][stage], strict=True
        )
        if owner == position
    ]
    return tuple(
        (start + first, start + last)
        for (start, _), (first, last) in zip(owned, parts, strict=True)
    )
