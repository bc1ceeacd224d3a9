"""The resolver of nested strategies: copies of a pipeline of stages, of copies, of shards.

The same decisions in the same order as `resolve.py`'s for flat strategies: which devices form
which stage, where the model is cut, who takes which micro-batches, how each stage's tensors lie
over its shard group, what that needs of memory. All on the operation graph; no torch.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from math import inf

from whale_train.errors import Fault, PlanError
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.considered import Considered
from whale_train.strategies.cut import CutRefused, HeadCut, cut_head
from whale_train.strategies.findings import Findings
from whale_train.strategies.grammar import Strategy
from whale_train.strategies.head import find_heads, matching
from whale_train.strategies.instructions import Durations, Instruction, Position
from whale_train.strategies.layouts import Layout, R
from whale_train.strategies.micro_batches import (
    Batches,
    count_micro_batches,
    refuse_batch_norm,
    share_batch,
)
from whale_train.strategies.operations import OperationGraph, Size
from whale_train.strategies.patterns import Sharded, choose_patterns
from whale_train.strategies.plan import Decision, Plan
from whale_train.strategies.prediction import Simulated
from whale_train.strategies.samples import refuse_learned_targets, refuse_shared_batch
from whale_train.strategies.schedule import schedule
from whale_train.strategies.shape_check import shape_check
from whale_train.strategies.shares import even_shares, optimal_shares, tile
from whale_train.strategies.sharing import Training
from whale_train.strategies.stage_memory import (
    memory_of_ranks,
    recomputed_stages,
    refuse_memory,
)
from whale_train.strategies.stage_times import ChunkTimes
from whale_train.strategies.staged_plan import Decided, simulated_step, written
from whale_train.strategies.stages import (
    Slice,
    balanced,
    is_inside,
    modules_of,
    sliced,
    stage_of_modules,
)
from whale_train.strategies.staging import Axes, Chunk, Staging, nested_form

_Edges = Mapping[tuple[int, int], bool]


def consider_nested(
    strategy: Strategy, cluster: Cluster, findings: Findings, training: Training
) -> Considered:
    """A nested strategy, resolved. Raises PlanError with all faults of a stage."""
    job, decisions = _staging(strategy, cluster, findings, training), list[Decision]()
    micro_batches = count_micro_batches(job, decisions)
    refuse_batch_norm(job, micro_batches)
    _refuse_pieces(job, job.form.copies * micro_batches)
    ends = _ends(job, decisions)
    slices = findings.once(("slices", ends), lambda: sliced(job.profile, findings.order, ends))
    stages = len(job.form.stages)
    shared = _shared_parameters(slices, stages)
    chunks = tuple(
        _chunk(job, i % stages, part, ends[i : i + 2], shared) for i, part in enumerate(slices)
    )
    edges = findings.once(("edges", ends), lambda: _edges(job, slices))
    axes = _axes(job, chunks)
    _check_shapes(job, chunks, axes)
    batches = share_batch(job, micro_batches)
    times = ChunkTimes(job, chunks, axes)
    orders = _orders(job, times, edges, batches)
    memory = memory_of_ranks(job, chunks, axes, batches, orders, set())
    recomputed = recomputed_stages(job, memory)
    if recomputed:  # which takes longer, and may change the order
        times = ChunkTimes(job, chunks, axes, frozenset(recomputed))
        orders = _orders(job, times, edges, batches)
        memory = memory_of_ranks(job, chunks, axes, batches, orders, recomputed)
    refuse_memory(job, memory)
    decided = Decided(times, axes, batches, edges, shared, memory, orders, recomputed)
    step = simulated_step(job, decided)

    def plan() -> Plan:
        explained = [*decisions, *_explained(job, chunks, recomputed)]
        return written(job, decided, step.prediction(), explained)

    def on(others: Cluster) -> Simulated:
        there = replace(job, cluster=others)
        taken = ChunkTimes(there, chunks, axes, frozenset(recomputed))
        return simulated_step(there, replace(decided, times=taken))

    return Considered(step, plan, on)


def _staging(
    strategy: Strategy, cluster: Cluster, findings: Findings, training: Training
) -> Staging:
    faults: list[Fault] = []
    form, profile = nested_form(strategy, cluster, training, faults), findings.profile
    if profile.graph is None:
        rule = f"needs the model's graph, and {profile.name} cannot be exported"
        remedy = "use strategy=dp or a zero strategy, which run the model as it is"
        path = strategy.graph[0].path
        faults.append(Fault(path, "", f"{rule} ({profile.export_error})", remedy))
    if faults or form is None:
        raise PlanError(faults)
    return Staging(strategy, cluster, findings, training, form)


def _refuse_pieces(job: Staging, pieces: int) -> None:
    faults: list[Fault] = []
    if pieces > 1 or any(stage.body for stage in job.form.stages):
        refuse_shared_batch(job.findings, faults)
    each, pipeline = pieces // job.form.copies, job.form.pipeline
    if pipeline is not None and each > 1:
        key = f"{pipeline.path}.micro_batches"
        refuse_learned_targets(job.profile, key, str(each), "use 1, and one copy", faults)
    elif pieces > 1:
        key = job.strategy.graph[0].path
        refuse_learned_targets(job.profile, key, "", "use one copy, or strategy=dp", faults)
    if faults:
        raise PlanError(faults)


def _orders(
    job: Staging, times: ChunkTimes, edges: _Edges, batches: Batches
) -> list[tuple[tuple[Instruction, ...], ...]]:
    """The instructions of every position, by copy; found once for copies that are alike."""
    found: list[tuple[tuple[Instruction, ...], ...]] = []
    known: dict[object, tuple[tuple[Instruction, ...], ...]] = {}
    positions = [Position(held) for held in job.chunks_of_positions()]
    name = job.form.pipeline.schedule if job.form.pipeline else "1f1b"
    for copy in range(job.form.copies):
        taken = times.durations(copy, batches)
        owners, count = batches.owners[copy], len(batches.samples[copy])
        alike = (tuple(taken.items()), owners, count)
        if alike not in known:
            durations = {place: Durations(*each) for place, each in taken.items()}
            known[alike] = schedule(name, positions, owners, edges, count, durations)
        found.append(known[alike])
    return found


def _ends(job: Staging, decisions: list[Decision]) -> tuple[int, ...]:
    """Where chunks begin and the last ends: positions in the order of operations."""
    order = job.findings.order
    count = job.chunk_count
    if count == 1:
        return (0, len(order.operations))
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
    speeds = tuple(
        min(job.stage_speeds(copy)[chunk % len(stages)] for copy in range(job.form.copies))
        for chunk in range(count)
    )

    found = cut_by_speed(job.findings, speeds, fixed)
    if found is None:
        places = sum(a < b for a, b in pairwise(order.weights))
        rule = f"has {places} blocks to cut between, too few for {count} stages in this order"
        path = job.form.pipeline.path if job.form.pipeline else "strategy"
        remedy = f"use at most {places} stages" if places < count else "name other modules"
        raise PlanError([Fault(f"{path}.stages", str(len(stages)), rule, remedy)])
    for chunk, (first, last) in enumerate(pairwise(found)):
        work = (order.flops[last] - order.flops[first]) / (order.flops[-1] or 1.0)
        modules = modules_of(job.graph, order.operations[order.places[first] : order.places[last]])
        decisions.append(
            Decision(
                f"{stages[chunk % len(stages)].path}.modules",
                f"{_span(modules)} ({100 * work:.0f}% of the work)",
                "",
                f"chunk {chunk} of {count}: the slowest stage is done first"
                if not stages[chunk % len(stages)].modules
                else "as the strategy says",
            )
        )
    return tuple(order.places[i] for i in found)


def cut_by_speed(
    findings: Findings, speeds: tuple[float, ...], fixed: Mapping[int, int]
) -> tuple[int, ...] | None:
    """The places where chunks of these speeds begin and the last one ends, the slowest being done
    as early as can be; None where there are too few places. `fixed` is as in `balanced`."""
    order = findings.order

    def chunk_time(chunk: int, first: int, last: int) -> float:
        if order.weights[last] == order.weights[first]:
            return inf  # a stage with nothing to train is no stage
        return (order.flops[last] - order.flops[first]) / speeds[chunk]

    return findings.once(
        ("cut", speeds, tuple(fixed.items())),
        lambda: balanced(order, chunk_time, len(speeds), fixed),
    )


def _edges(job: Staging, slices: Sequence[Slice]) -> dict[tuple[int, int], bool]:
    """Which chunks send to which, and whether a gradient comes back."""
    maker = {name: chunk for chunk, part in enumerate(slices) for name in part.gives}
    found: dict[tuple[int, int], bool] = {}
    for chunk, part in enumerate(slices):
        for name in part.takes:
            edge = (maker[name], chunk)
            found[edge] = found.get(edge, False) or _has_gradient(job.graph, name)
    return found


def _chunk(
    job: Staging,
    stage: int,
    part: Slice,
    interval: tuple[int, ...],
    shared: Mapping[str, tuple[int, ...]],
) -> Chunk:
    form, findings = job.form.stages[stage], job.findings
    held_elsewhere = tuple(path for path in part.parameters if path in shared)
    alike = findings.once(
        ("alike", interval, held_elsewhere),
        lambda: findings.likeness.number(part, held_elsewhere),
    )
    if form.split is None or form.shards == 1:
        return Chunk(stage, part, alike)
    split = form.split
    if form.body is not None:
        key: Hashable = (interval, form.shards, split.modules, held_elsewhere)
        cut = findings.once(("head", key), lambda: _head_cut(job, stage, part, shared))
        return Chunk(stage, part, key, head=cut)
    key = (alike, form.shards, split.dim)
    if split.patterns or split.modules != ("*",):  # by names, which alike slices do not share
        key = (*key, interval, split)
    like, found = findings.once(
        ("sharded", key), lambda: (part, _sharded(job, stage, part, shared))
    )
    if not found.weights:
        _refuse_whole(job, stage, part, shared)
    renamed = findings.once(
        ("renamed", interval, key), lambda: findings.likeness.renamed(found, like, part)
    )
    return Chunk(stage, part, key, renamed)


def _head_cut(
    job: Staging, stage: int, part: Slice, shared: Mapping[str, tuple[int, ...]]
) -> HeadCut:
    """The stage's slice of the model cut where the head begins; what it takes is its input."""
    form = job.form.stages[stage]
    assert form.split is not None
    inside = set(part.operations)
    taken = [
        replace(job.graph[name], target="input", args=(), kwargs=(), after=())
        for name in part.takes
    ]
    rest = [op for op in job.graph if op.name in inside or op.target == "output"]
    held = tuple(p for p in job.profile.parameters if p.path in part.parameters)
    profile = replace(job.profile, graph=OperationGraph((*taken, *rest)), parameters=held)
    heads = matching(find_heads(profile), form.split.modules)
    key, value = f"{form.split.path}.modules", ", ".join(form.split.modules)
    remedy = "use another stage for it, or a split of the whole stage"
    faults = []
    for name in part.takes:
        shape = job.graph[name].shape
        if not shape or shape[0] != Size(0, 1):
            rule = f"shares the samples, and {name}, which enters its stage, has no batch first"
            faults.append(Fault(key, value, rule, remedy))
            break
    if not heads:
        rule = f"finds no output projection in {_span(part.modules)}"
        faults.append(Fault(key, value, rule, remedy))
    elif heads[0].weight in shared:
        rule = f"is {heads[0].module or 'the output'}, whose weight another stage holds as well"
        faults.append(Fault(key, value, rule, "untie it, or split whole stages"))
    if faults:
        raise PlanError(faults)
    try:
        return cut_head(profile, heads[0])
    except CutRefused as refusal:
        rule = f"is {heads[0].module or 'the output'}, which cannot be split: {refusal}"
        raise PlanError([Fault(key, value, rule, remedy)]) from None


def _sharded(
    job: Staging, stage: int, part: Slice, shared: Mapping[str, tuple[int, ...]]
) -> Sharded:
    form = job.form.stages[stage]
    assert form.split is not None
    given: dict[str, Layout] = dict.fromkeys(part.takes, R)
    wanted: dict[str, Layout] = dict.fromkeys(part.gives, R)
    named = set(form.split.modules)
    if "head" in named:  # found, not configured
        named |= {head.module for head in find_heads(job.profile)}
    # What several stages hold keeps one form, so that their gradients can be added; what the
    # strategy does not name is not cut.
    whole = [
        (path, "replicate")
        for path in part.parameters
        if path in shared or not any(is_inside(path.rpartition(".")[0], p) for p in named)
    ]
    return choose_patterns(
        job.graph,
        part.operations,
        parameters={
            name: job.canonical[job.graph[name].path]
            for name in part.operations
            if job.graph[name].target == "parameter"
        },
        held={p.path: p.elements for p in job.profile.parameters},
        group_size=form.shards,
        given=given,
        wanted=wanted,
        by_hand=(*whole, *form.split.patterns),
        dim=form.split.dim,
        key=form.split.path,
    )


def _refuse_whole(
    job: Staging, stage: int, part: Slice, shared: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise PlanError for a stage of which nothing is cut over its devices."""
    form = job.form.stages[stage]
    assert form.split is not None
    rule = f"finds nothing to cut over {form.shards} devices in {_span(part.modules)}"
    if any(path in shared for path in part.parameters):
        rule += ", beside what another stage holds as well"
    remedy = "use fewer devices, patterns for its weights, or another primitive"
    raise PlanError([Fault(form.split.path, "", rule, remedy)])


def _axes(job: Staging, chunks: Sequence[Chunk]) -> Axes:
    """Every axis' intervals over its shard group, in proportion to the members' speed; equal
    in all copies, so that copies hold the same shards."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for chunk in chunks:
        units = dict(chunk.sharded.axes) if chunk.sharded else {}
        if chunk.head is not None:
            weight, shard = next(iter(chunk.head.shards.items()))
            units[shard.axis] = job.profile.parameter_by_path[weight].shape[shard.dim]
        speeds = job.member_speeds(chunk.stage)
        members = len(speeds)
        for axis, count in units.items():
            if job.strategy.balance == "even":
                shares = even_shares(count, members, [count] * members)
            else:
                shares = optimal_shares(count, speeds, [count] * members, 1)
            if shares is None:
                path = job.form.stages[chunk.stage].path
                rule = f"has {count} {axis}, too few to give each of {members} devices one"
                raise PlanError([Fault(path, "", rule, "use fewer devices")])
            assert found.get(axis, tile(count, shares)) == tile(count, shares), axis
            found[axis] = tile(count, shares)
    return found


def _check_shapes(job: Staging, chunks: Sequence[Chunk], axes: Axes) -> None:
    """Refuse a split whose local shapes do not agree on some member, before there are any."""
    for chunk in chunks:
        if chunk.sharded is None:
            continue
        assignment, cut = chunk.sharded.assignment, tuple(axes[axis] for axis in chunk.axes)
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


def _explained(job: Staging, chunks: Sequence[Chunk], recomputed: Set[int]) -> Iterator[Decision]:
    form = job.form
    if form.added > 1:
        count = len(job.cluster.devices)
        reason = f"an outer replicate of {form.added} uses all {count} devices"
        yield Decision("strategy.graph", str(form.copies), "1", reason)
    for stage, asked in enumerate(form.stages):
        if asked.recompute == "auto":
            chosen = "full" if stage in recomputed else "none"
            rejected = "none" if stage in recomputed else "full"
            reason = f"its activations {'do not fit' if stage in recomputed else 'fit'}"
            yield Decision(f"{asked.path}.recompute", chosen, rejected, reason)
    for chunk in chunks:
        if chunk.sharded is None:
            continue
        path = form.stages[chunk.stage].path
        for module in chunk.sharded.whole:
            reason = "no pattern fits it: every device of the group holds it whole"
            yield Decision(f"{path} {module}", "whole", "sharded", reason)
        for name in chunk.sharded.assignment.gathered:
            reason = "no rule for it: it is given whole tensors, which is slower"
            yield Decision(f"operation {name}", "whole", "sharded", reason)
    for path in job.profile.unused_parameters:
        reason = "the loss does not depend on it"
        yield Decision(path, "not trained", "", reason)


def _shared_parameters(slices: Sequence[Slice], stages: int) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold (tied ones), and which stages."""
    holders: dict[str, dict[int, None]] = {}
    for chunk, part in enumerate(slices):
        for path in part.parameters:
            holders.setdefault(path, {})[chunk % stages] = None
    return {path: tuple(sorted(found)) for path, found in holders.items() if len(found) > 1}


def _has_gradient(graph: OperationGraph, name: str) -> bool:
    """Whether a value may have a gradient: floating, and made from a parameter."""
    if "float" not in graph[name].dtype:
        return False
    return any(graph[a].target == "parameter" for a in graph.ancestors({name}))


def _span(modules: Sequence[str]) -> str:
    """`a ... b` for a run of modules."""
    named = [module or "(the model)" for module in modules]
    return named[0] if len(named) == 1 else f"{named[0]} ... {named[-1]}" if named else "nothing"
