"""The chunks of a strategy: where the model is cut, and the layouts of each chunk's tensors.

A chunk is a part of the model that a stage runs without interruption. A model that nothing cuts is
one chunk. `placement.py` owns which devices hold a chunk, `schedule/orders.py` when it runs.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from whale_train.errors import Fault, PlanError
from whale_train.strategies.context_parallel.attention import WAYS, AttentionGroup, attentions
from whale_train.strategies.context_parallel.layouts import context_layouts
from whale_train.strategies.context_parallel.rules import ContextRules
from whale_train.strategies.grammar.nodes import Split
from whale_train.strategies.graph.forward_state import torn_buffer
from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
)
from whale_train.strategies.layouts.propagation import R
from whale_train.strategies.layouts.shape_check import shape_check
from whale_train.strategies.layouts.types import RING, SEQUENCE
from whale_train.strategies.partition.pipeline_partition import (
    Slice,
    balanced,
    modules_of,
    sliced,
    stage_of_modules,
)
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.schedule.apportion import apportion, tile
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.stages.attention_groups import attention_group
from whale_train.strategies.stages.beside_copies import module_span, named_weights, split_parts
from whale_train.strategies.stages.placement import AxisIntervals, PlanningContext, StageChunk
from whale_train.strategies.stages.split_names import refuse_idle_patterns, sharded
from whale_train.strategies.tensor_parallel.choose import Sharded


@dataclass(frozen=True)
class Chunked:
    """A model cut into chunks.

    places: indices into `Sequenced.places` at which chunks begin and the last one ends; empty where
        the model runs as it is.
    chunks: the chunks, in the order they run.
    edges: pairs (sender, receiver) of chunks; the value is True if a gradient comes back.
    axes: intervals of the members of shard groups, by axis.
    shared: stages of every trained parameter that several stages hold, by path.
    decisions: choices that the request leaves open, with reasons.
    """

    places: tuple[int, ...]
    chunks: tuple[StageChunk, ...]
    edges: Mapping[tuple[int, int], bool]
    axes: AxisIntervals
    shared: Mapping[str, tuple[int, ...]]
    decisions: tuple[Decision, ...]


Caps = tuple[tuple[int, tuple[int, ...]], ...]
"""Pairs of a stage and the most units of its split parts that each member may hold."""


def chunked(
    job: PlanningContext, places: tuple[int, ...] | None = None, caps: Caps = ()
) -> Chunked:
    """Return the model of `job` in chunks.

    job: the strategy on its devices.
    places: indices into `Sequenced.places` to cut at; None for the cut whose slowest stage takes
        the fewest seconds.
    caps: the most units of a stage's split parts that each member may hold. Stages outside `caps`
        have no limit.

    Raises PlanError.
    """
    if job.as_is:
        return Chunked((), (StageChunk(0, _whole(job.profile), "the whole"),), {}, {}, {}, ())
    stages = range(len(job.form.stages))
    speeds = _speeds(job)
    key = (
        speeds,
        tuple(tuple(job.member_speeds(stage)) for stage in stages),
        tuple((stage.path, stage.modules, stage.splits, stage.body) for stage in job.form.stages),
        job.strategy.balance,
        places,
        caps,
    )
    return job.findings.once(("chunked", key), lambda: _chunked(job, speeds, places, caps))


def _whole(profile: ModelProfile) -> Slice:
    """Return the slice that is the whole model; it has no operations where the model has no
    graph."""
    return Slice(
        operations=tuple(profile.graph.by_name) if profile.graph else (),
        takes=(),
        gives=(),
        parameters=tuple(parameter.path for parameter in profile.parameters),
        frozen=tuple(parameter.path for parameter in profile.frozen),
        modules=("*",),
        flops=profile.forward_flops,
        activation_bytes=profile.activation_bytes,
        entering_bytes=0.0,
        block_bytes=profile.activation_bytes,
    )


def _chunked(
    job: PlanningContext,
    speeds: tuple[float, ...],
    moved: tuple[int, ...] | None,
    caps: Caps,
) -> Chunked:
    """Return the model of `job` in chunks, cut at the places `moved` (None: balanced by `speeds`).
    `caps` are as in `chunked`. Raises PlanError."""
    findings, stages = job.findings, len(job.form.stages)
    places = moved or _balanced(job, speeds)
    decisions = list(_explained(job, places, moved is not None))
    ends = tuple(findings.order.places[place] for place in places)
    slices = findings.once(("slices", ends), lambda: sliced(job.profile, findings.order, ends))
    _refuse_torn_state(job, slices)
    shared = _shared_weights(slices, stages)
    chunks = tuple(
        _chunk(job, i % stages, part, ends[i : i + 2], shared) for i, part in enumerate(slices)
    )
    refuse_idle_patterns(job, chunks)
    edges = findings.once(("edges", ends), lambda: _edges(job, slices))
    axes = _axes(job, chunks, dict(caps))
    _check_shapes(job, chunks, axes)
    _refuse_sums_in_parts(job, chunks)
    trained = {path: at for path, at in shared.items() if path in job.profile.parameter_by_path}
    return Chunked(places, chunks, edges, axes, trained, tuple(decisions))


def _refuse_torn_state(job: PlanningContext, slices: Sequence[Slice]) -> None:
    """Raise PlanError for a cut between an operation that reads a buffer and one that changes the
    buffer."""
    torn = torn_buffer(job.graph, [part.operations for part in slices]) if len(slices) > 1 else ""
    if torn:
        rule = f"cuts between operations that read the buffer {torn}, which the forward changes"
        path = job.form.pipeline.path if job.form.pipeline else "strategy"
        remedy = "name modules so that one stage has all of them, or use strategy=dp or split"
        raise PlanError([Fault(f"{path}.stages", str(len(job.form.stages)), rule, remedy)])


def _speeds(job: PlanningContext) -> tuple[float, ...]:
    """Return the speed of every chunk's stage in the replica where that stage is slowest, in the
    units of `PlanningContext.stage_speeds`."""
    by_copy = [job.stage_speeds(copy) for copy in range(job.form.copies)]
    slowest = [min(speeds) for speeds in zip(*by_copy, strict=True)]
    return tuple(slowest * (job.chunk_count // len(slowest)))


def _balanced(job: PlanningContext, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the places where chunks begin and the last ends, such that the slowest chunk takes the
    fewest seconds. Raises PlanError where the model has too few places, or where the modules that
    stages name allow no cut."""
    order, count = job.findings.order, job.chunk_count
    if count == 1:
        return (0, len(order.places) - 1)
    stages = job.form.stages
    faults: list[Fault] = []
    asked = [(stage.path, stage.modules) for stage in stages]
    if count > len(stages) and any(modules for _, modules in asked):
        path = next(path for path, modules in asked if modules)
        rule = "names modules, and interleaved_1f1b gives a stage several parts of the model"
        faults.append(Fault(f"{path}.modules", "", rule, "use modules: auto, or 1f1b"))
    fixed = stage_of_modules(order, job.graph, asked, faults)
    if faults:
        raise PlanError(faults)
    split = [1 if stage.copies_weights or not stage.split else stage.shards for stage in stages]
    members = tuple(split * (count // len(stages)))
    places = cut_by_speed(job.findings, speeds, members, fixed)
    if places is None:
        blocks = sum(a < b for a, b in pairwise(order.weights))
        rule = f"has {blocks} blocks to cut between, too few for {count} stages in this order"
        path = job.form.pipeline.path if job.form.pipeline else "strategy"
        remedy = f"use at most {blocks} stages" if blocks < count else "name other modules"
        raise PlanError([Fault(f"{path}.stages", str(len(stages)), rule, remedy)])
    return places


def _explained(job: PlanningContext, places: tuple[int, ...], moved: bool) -> Iterator[Decision]:
    """Yield a decision for each chunk: its modules, its share of the work, and the reason for the
    cut."""
    order, stages, count = job.findings.order, job.form.stages, job.chunk_count
    why = "the simulated step is shortest" if moved else "the slowest stage is done first"
    for chunk, (first, last) in enumerate(pairwise(places) if count > 1 else ()):
        work = (order.flops[last] - order.flops[first]) / (order.flops[-1] or 1.0)
        modules = modules_of(job.graph, order.operations[order.places[first] : order.places[last]])
        asked = stages[chunk % len(stages)]
        yield Decision(
            f"{asked.path}.modules",
            f"{module_span(modules)} ({100 * work:.0f}% of the work)",
            "",
            "as the strategy says" if asked.modules else f"chunk {chunk} of {count}: {why}",
        )


def cut_by_speed(
    findings: ModelAnalysis,
    speeds: tuple[float, ...],
    members: tuple[int, ...],
    fixed: Mapping[int, int],
) -> tuple[int, ...] | None:
    """Return the places where chunks begin and the last ends, such that the slowest chunk takes the
    fewest seconds; None where there are too few places.

    findings: analysis of the model.
    speeds: speed of each chunk's stage; only the ratios matter.
    members: size of each chunk's shard group.
    fixed: stage that must hold an operation, by position in `order.operations` (see `balanced`).

    Each chunk gets something to train and, where possible, something to shard.
    """
    order = findings.order

    def cut(sharded: bool) -> tuple[int, ...] | None:
        weights = [findings.weights_to_cut(n) if sharded else order.weights for n in members]

        def chunk_time(chunk: int, first: int, last: int) -> float:
            before = weights[chunk]
            if before[last] == before[first] or order.weights[last] == order.weights[first]:
                return inf
            return (order.flops[last] - order.flops[first]) / speeds[chunk]

        return balanced(order, chunk_time, len(speeds), fixed)

    return findings.once(
        ("cut", speeds, members, tuple(fixed.items())),
        lambda: (cut(sharded=True) if max(members) > 1 else None) or cut(sharded=False),
    )


def _edges(job: PlanningContext, slices: Sequence[Slice]) -> dict[tuple[int, int], bool]:
    """Return the pairs (sender, receiver) of chunks. The value is True if a gradient comes back, as
    for a floating-point value made from a parameter."""
    graph = job.graph
    maker = {name: chunk for chunk, part in enumerate(slices) for name in part.gives}
    edges: dict[tuple[int, int], bool] = {}
    for chunk, part in enumerate(slices):
        for name in part.takes:
            edge = (maker[name], chunk)
            trained = "float" in graph[name].dtype and name in graph.made_of_parameters
            edges[edge] = edges.get(edge, False) or trained
    return edges


def _chunk(
    job: PlanningContext,
    stage: int,
    part: Slice,
    interval: tuple[int, ...],
    shared: Mapping[str, tuple[int, ...]],
) -> StageChunk:
    """Return the chunk of slice `part` on `stage`, with its layouts where the stage is a split.

    interval: positions in `Sequenced.operations` at which the slice begins and ends.
    shared: stages of every weight that several stages hold, by path.

    Layouts are computed once for slices that are equal but for names. Raises PlanError where
    nothing can be sharded.
    """
    form, findings = job.form.stages[stage], job.findings
    held_elsewhere = tuple(path for path in part.weights if path in shared)
    alike = findings.once(
        ("alike", interval, held_elsewhere),
        lambda: findings.likeness.number(part, held_elsewhere),
    )
    if form.split is None or form.shards == 1:
        return StageChunk(stage, part, alike)
    split = form.split
    if split.shares_sequence:
        return _shared_sequence(job, stage, part, interval)
    if form.body is not None:
        named = tuple((split.modules, split.dim, split.patterns) for split in form.splits)
        key: Hashable = (stage, interval, form.shards, named, form.body.modules, held_elsewhere)
        beside = findings.once(("beside", key), lambda: split_parts(job, stage, part, shared))
        parts = beside.parts
        return StageChunk(stage, part, key, parts.sharded, parts.operations, beside.head)
    layout_key: tuple[Hashable, ...] = (alike, split.dim)
    # Equal slices differ in names, so layouts chosen by names hold for one slice alone.
    if split.patterns or split.modules != ("*",):
        layout_key = (*layout_key, interval, split)
    key = (layout_key, form.shards)
    typed = findings.sharded(
        layout_key,
        form.shards,
        lambda: sharded(job, part, named_weights(job, part, shared, split), split, form.shards),
    )
    # The slice for which the layouts were chosen.
    like = findings.once(("like", layout_key, typed.groups), lambda: part)
    if not typed.weights:
        _refuse_whole(job, stage, part, shared)
    owner = stage if job.chunk_count > 1 else None
    renamed = findings.once(
        ("renamed", interval, key, owner),
        lambda: findings.likeness.renamed(typed, like, part, _own_axes(typed, owner)),
    )
    return StageChunk(stage, part, key, renamed)


def _shared_sequence(
    job: PlanningContext, stage: int, part: Slice, interval: tuple[int, ...]
) -> StageChunk:
    """Return the chunk of slice `part` on `stage`, whose devices divide the positions of every
    sample. Raises PlanError where nothing has positions for all of them."""
    form, findings = job.form.stages[stage], job.findings
    assert form.split is not None
    owner = f"stage_{stage}." if job.chunk_count > 1 else ""
    members, graph = form.shards, job.graph
    group = attention_group(job, stage)
    asked = form.split.attention
    priced = (group.samples, group.link, id(group.device))
    key: Hashable = ("context", stage, interval, members, asked, *priced)
    _refuse_attention(group, form.split, part)
    best = WAYS.get(asked)

    def lay() -> Sharded:
        rules = ContextRules(members, owner, lambda operation: best or group.best(operation))
        return context_layouts(graph, part.operations, part.takes, part.gives, rules)

    typed = findings.once(key, lay)
    if not typed.axes:
        rule = f"finds no sequence of at least {members} positions in {module_span(part.modules)}"
        remedy = "use fewer devices, or a replicate, whose copies divide the samples"
        raise PlanError([Fault(f"{form.split.path}.dim", "context", rule, remedy)])
    return StageChunk(stage, part, key, typed, shares_sequence=True)


def _refuse_attention(group: AttentionGroup, split: Split, part: Slice) -> None:
    """Raise PlanError for an attention of a slice that the group cannot compute as `split` asks."""
    asked = WAYS.get(split.attention)
    for operation in attentions(group.graph, part.operations):
        possible = group.possible(operation)
        if asked is not None and asked not in possible:
            because = group.unlike_in_ring(operation) if asked == RING else "a device gets no head"
            rule = f"cannot compute the attention of {operation.module or 'the model'}"
            if because:
                rule += f": {because}"
            ways = [way for way, kind in WAYS.items() if kind in possible]
            remedy = f"use auto, or {' or '.join(ways)}"
            raise PlanError([Fault(f"{split.path}.attention", split.attention, rule, remedy)])


def _own_axes(typed: Sharded, stage: int | None) -> Mapping[str, str]:
    """Return a stage's own names for the axes that are not named after weights, by their names in
    `typed`: shard groups of other stages cut their tokens at other places. The mapping is empty
    where `stage` is None, the only one."""
    if stage is None:
        return {}
    return {axis: f"stage_{stage}.{axis}" for axis in typed.axes if axis.startswith(SEQUENCE)}


def _refuse_whole(
    job: PlanningContext, stage: int, part: Slice, shared: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise PlanError for a stage in which nothing can be sharded over its devices."""
    form = job.form.stages[stage]
    assert form.split is not None
    rule = f"finds nothing to cut over {form.shards} devices in {module_span(part.modules)}"
    if any(path in shared for path in part.weights):
        rule += ", beside what another stage holds as well"
    remedy = "use fewer devices, patterns for its weights, or another primitive"
    raise PlanError([Fault(form.split.path, "", rule, remedy)])


def _axes(
    job: PlanningContext, chunks: Sequence[StageChunk], caps_of: Mapping[int, Sequence[int]]
) -> AxisIntervals:
    """Return the intervals of every axis over its shard group.

    Intervals are proportional to the speed of the members, summed over all replicas, so that
    replicas hold the same shards. Intervals of split parts stay within the caps of their stage, if
    `caps_of` has any. Raises PlanError where a member would get nothing.
    """
    axes: dict[str, tuple[tuple[int, int], ...]] = {}
    for chunk in chunks:
        units = dict(chunk.sharded.axes) if chunk.sharded else {}
        speeds = job.member_speeds(chunk.stage)
        members = len(speeds)
        for axis, count in units.items():
            caps = [count] * members
            if chunk.shares_samples and chunk.stage in caps_of:
                finest = max(units.values())
                caps = [-(-cap * count // finest) for cap in caps_of[chunk.stage]]
            shares = apportion(job.strategy.balance, count, speeds, caps, 1)
            if shares is None:
                asked = job.form.stages[chunk.stage]
                rule = f"has {count} {axis}, too few to give each of {members} devices one"
                raise PlanError([Fault(asked.path, "", rule, "use fewer devices")])
            assert axes.get(axis, tile(count, shares)) == tile(count, shares), axis
            axes[axis] = tile(count, shares)
    return axes


def _check_shapes(job: PlanningContext, chunks: Sequence[StageChunk], axes: AxisIntervals) -> None:
    """Raise PlanError for a split whose local shapes disagree on some member of the shard group."""
    for chunk in chunks:
        if chunk.sharded is None:
            continue
        assignment, cut = chunk.sharded.assignment, tuple(axes[axis] for axis in chunk.axes)
        if routed := chunk.expert_axes:  # the router decides the number of their rows
            laid = assignment.layouts.items()
            dense = {x: to for x, to in laid if getattr(to, "axis", "") not in routed}
            assignment = replace(assignment, layouts=dense)
        wrong = job.findings.once(
            ("shapes", chunk.key, cut),
            lambda assignment=assignment: shape_check(job.graph, assignment, axes),  # type: ignore[misc]
        )
        if wrong:
            form = job.form.stages[chunk.stage]
            assert form.split is not None
            rule = f"cannot be cut so: {wrong[0]}"
            remedy = "give other patterns: or modules: for it, or use another primitive"
            raise PlanError([Fault(form.split.path, "", rule, remedy)])


def _refuse_sums_in_parts(job: PlanningContext, chunks: Sequence[StageChunk]) -> None:
    """Raise PlanError for a sum over the batch that replicas exchange but a split cuts over the
    members of a shard group."""
    for chunk in chunks:
        form = job.form.stages[chunk.stage]
        layouts = chunk.sharded.assignment.layouts if chunk.sharded else {}
        for name in job.batch_sums:
            cut = name in chunk.slice.operations and layouts.get(name, R) != R
            beside = name in (chunk.beside or ())
            if form.split is not None and (cut or beside):
                rule = f"cuts {name}, a sum over the samples of the batch that copies exchange"
                if beside:
                    rule = f"sees the samples of all its devices, and copies exchange {name}, a "
                    rule += "sum over the samples of the batch"
                remedy = "name other modules, or use a strategy without a split"
                raise PlanError([Fault(form.split.path, "", rule, remedy)])


def _shared_weights(slices: Sequence[Slice], stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages of every weight that several stages hold (tied weights), by path."""
    holders: dict[str, set[int]] = {}
    for chunk, part in enumerate(slices):
        for path in part.weights:
            holders.setdefault(path, set()).add(chunk % stages)
    return {path: tuple(sorted(held_by)) for path, held_by in holders.items() if len(held_by) > 1}
