"""What the resolver decides of a strategy: from its form on the devices to its simulated step.

In the order a reader would decide by hand: which devices form which stage, where the model is cut,
who takes which samples and micro-batches, how each stage's tensors lie over its shard group, what
that needs of memory. All on the operation graph, or the whole model where nothing cuts it; no
torch.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf

from whale_train.errors import Fault, PlanError
from whale_train.quantities import in_bytes, in_seconds
from whale_train.strategies.grammar.nodes import Strategy
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.memory.host_memory import (
    host_bytes,
    kept_on_hosts,
    offload_decisions,
    offloaded,
)
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.boundary_search import Look, move_ends
from whale_train.strategies.resolver.evaluated import Considered
from whale_train.strategies.resolver.refusals import refuse_model, refuse_own_losses, refuse_pieces
from whale_train.strategies.resolver.write import Decided, simulated_step, written
from whale_train.strategies.schedule.apportion import even_shares
from whale_train.strategies.schedule.instructions import Durations, Instruction, Position, Transits
from whale_train.strategies.schedule.orders import schedule
from whale_train.strategies.simulate.prediction import Simulated
from whale_train.strategies.stage_memory.rank_memory import RankMemory
from whale_train.strategies.stage_memory.within_memory import Room, recomputed_stages, refuse_memory
from whale_train.strategies.stages.analysis import Findings
from whale_train.strategies.stages.chunk_cost import ChunkTimes
from whale_train.strategies.stages.chunks import Chunked, chunked
from whale_train.strategies.stages.engines import engines_of_stages
from whale_train.strategies.stages.micro_batches import (
    Batches,
    BatchTooLargeError,
    count_micro_batches,
    refuse_batch_norm,
    share_batch,
)
from whale_train.strategies.stages.p2p import Sends
from whale_train.strategies.stages.placement import StageChunk, Staging, form_of

_Edges = Mapping[tuple[int, int], bool]

_MOVING = 8_000  # tasks simulated, and ranks laid out, for a better cut


def decide(
    strategy: Strategy,
    cluster: Cluster,
    findings: Findings,
    training: Training,
    *,
    moving: bool = False,
    cut: tuple[int, ...] = (),
) -> Considered:
    """Return `strategy`, resolved: cut at the places `cut`, or balanced; `moving` the ends of its
    stages to where its step is shortest. Raises PlanError with all faults of a stage."""
    job, decisions = _staging(strategy, cluster, findings, training), list[Decision]()
    refuse_pieces(job, _asked_micro_batches(job))
    first = chunked(job, cut or None)
    refuse_own_losses(job, first.chunks)
    priced = ChunkTimes(job, first.chunks, first.axes, frozenset(_told_to_recompute(job)))
    micro_batches = count_micro_batches(job, priced, decisions)
    refuse_batch_norm(job, micro_batches)
    refuse_pieces(job, micro_batches)
    look = _look(job, first, micro_batches)
    if moving and _may_move(job):
        look = _moved(job, micro_batches, look, decisions)
    return _considered(job, micro_batches, look, decisions)


@dataclass(frozen=True)
class _Resolved:
    """What a cut comes to, and the bytes `kept` on hosts; no step where that does not fit."""

    cut: Chunked
    decided: Decided
    step: Simulated | None
    kept: Sequence[float]


def _look(job: Staging, cut: Chunked, micro_batches: int) -> Look[_Resolved]:
    cut, decided = _fitted(job, cut, micro_batches)
    short = decided.room.short_bytes
    ranks = len(job.cluster.devices)
    if short > 0:
        return Look(_Resolved(cut, decided, None, ()), short, inf, ranks)
    kept = kept_on_hosts(job.form.keeper, lambda: _on_hosts(job, cut), job.cluster)
    spans = (step := simulated_step(job, decided)).spans
    return Look(_Resolved(cut, decided, step, kept), short, spans.seconds, len(spans.tasks) + ranks)


def _may_move(job: Staging) -> bool:
    """Return whether the strategy leaves it to us where stages end, and wants them as devices
    are."""
    named = any(stage.modules for stage in job.form.stages)
    return job.chunk_count > 1 and job.strategy.balance == "hardware" and not named


def _moved(
    job: Staging, micro_batches: int, first: Look[_Resolved], decisions: list[Decision]
) -> Look[_Resolved]:
    """Return the stages ending where the step is shortest."""
    weights, balanced = job.findings.order.weights, first.found.cut

    def look(places: tuple[int, ...]) -> Look[_Resolved] | None:
        if any(weights[a] == weights[b] for a, b in pairwise(places)):
            return None  # nothing to train
        try:
            return _look(job, chunked(job, places), micro_batches)
        except PlanError:
            return None

    places, best = move_ends(balanced.places, first, look, _MOVING)
    if places != balanced.places:
        assert job.form.pipeline is not None
        reason = f"{in_seconds(best.seconds)} a step, simulated, and {in_seconds(first.seconds)} "
        reason += "if the slowest stage were done first"
        if first.short_bytes > 0:
            reason = f"by speed alone, memory is {in_bytes(first.short_bytes)} short"
        chosen, rejected = (_parts(job, cut) for cut in (best.found.cut, balanced))
        decisions.append(Decision(f"{job.form.pipeline.path}.stages", chosen, rejected, reason))
    return best


def _parts(job: Staging, cut: Chunked) -> str:
    """Return the parts of the work that every chunk has, in words."""
    flops = job.findings.order.flops
    each = (flops[last] - flops[first] for first, last in pairwise(cut.places))
    return ", ".join(f"{100 * part / (flops[-1] or 1.0):.0f}%" for part in each)


def _considered(
    job: Staging, micro_batches: int, look: Look[_Resolved], decisions: Sequence[Decision]
) -> Considered:
    cut, decided, step = look.found.cut, look.found.decided, look.found.step
    refuse_memory(decided.room, decided.times, micro_batches, look.work)
    assert step is not None

    def plan() -> Plan:
        explained = [*decisions, *_explained_devices(job), *_explained_shares(job, decided.batches)]
        explained += [*cut.decisions, *_explained(job, cut.chunks, decided.recomputed)]
        explained += offload_decisions(job.form.keeper, look.found.kept, job.cluster)
        return written(job, decided, step.prediction(), explained)

    def on(others: Cluster) -> Simulated:
        there = replace(job, cluster=others)
        recomputed = frozenset(decided.recomputed)
        limits = decided.times.limits
        taken = ChunkTimes(there, cut.chunks, cut.axes, recomputed, limits)
        return simulated_step(there, replace(decided, times=taken))

    return Considered(step, plan, on, look.work, cut.places)


def _on_hosts(job: Staging, cut: Chunked) -> Sequence[float]:
    """Return the bytes that the host of every rank keeps of what the rank has a part of its own of,
    where copies partition and offload it."""
    engines, found = engines_of_stages(job, cut.chunks, cut.axes), []
    for rank in range(len(job.cluster.devices)):
        copy, position = job.place_of(rank)
        stage = job.seats.stage_of[position]
        member = job.seats.positions[copy][position].index(rank)
        kept = 0.0
        for engine in engines[stage]:
            if engine.keeper is not None:
                each = host_bytes(engine.keeper.zero, offloaded(engine.keeper), job.training)
                kept += each * engine.elements[member] / len(engine.groups[0])
        found.append(kept)
    return found


def _staging(
    strategy: Strategy, cluster: Cluster, findings: Findings, training: Training
) -> Staging:
    faults: list[Fault] = []
    form = form_of(strategy, cluster, training, faults)
    if faults or form is None:
        raise PlanError(faults)
    job = Staging(strategy, cluster, findings, training, form)
    refuse_model(job)
    return job


def _asked_micro_batches(job: Staging) -> int:
    """Return how many micro-batches of a copy the request asks for; 1 where it leaves that open."""
    pipeline = job.form.pipeline
    return job.training.accumulate if pipeline is None else pipeline.micro_batches or 1


def _told_to_recompute(job: Staging) -> set[int]:
    return {n for n, stage in enumerate(job.form.stages) if stage.recompute == "full"}


def _fitted(job: Staging, cut: Chunked, micro_batches: int) -> tuple[Chunked, Decided]:
    """Return the cut and all that is decided of it, with shares that fit every device where there
    are such: first what is split beside copies gives way (classes, experts), then samples."""
    decided = _decided(job, cut, micro_batches)
    for own in (None, 1):  # beside the samples that members take, else beside one
        if decided.room.short_bytes <= 0 or not (caps := decided.room.caps_of_unlike(own)):
            break
        try:
            fewer = chunked(job, cut.places, tuple(caps.items()))
        except PlanError:
            continue
        if fewer.axes != cut.axes:
            cut, decided = fewer, _decided(job, fewer, micro_batches)
    if decided.room.short_bytes > 0 and job.form.copies * job.form.members > 1:
        limits = decided.room.samples()
        if min(limits) >= 1:
            try:
                return cut, _decided(job, cut, micro_batches, limits)
            except BatchTooLargeError:
                return cut, decided
    return cut, decided


def _decided(job: Staging, cut: Chunked, micro_batches: int, limits: Sequence[int] = ()) -> Decided:
    """Return in which order positions work, and which stages compute their blocks again. While what
    is sent is on its way, positions have more in flight where there is memory for that; blocks that
    may be computed again are where there is not even for less. `limits` are as in `share_batch`."""
    recomputed = _told_to_recompute(job)
    found = _in_memory(job, cut, micro_batches, limits, recomputed)
    again = recomputed_stages(job, found.memory)
    if again == recomputed:
        return found
    return _in_memory(job, cut, micro_batches, limits, again)


def _in_memory(
    job: Staging, cut: Chunked, micro_batches: int, limits: Sequence[int], recomputed: Set[int]
) -> Decided:
    """Return what is decided with more in flight for what is on its way, or, where that does not
    fit, without."""
    times = ChunkTimes(job, cut.chunks, cut.axes, frozenset(recomputed), limits)
    batches = share_batch(job, times, micro_batches, limits)
    found = _ordered(job, cut, times, batches)
    if any(found.transits) and found.room.short_bytes > 0:
        return _ordered(job, cut, times, batches, in_transit=False)
    return found


def _ordered(
    job: Staging, cut: Chunked, times: ChunkTimes, batches: Batches, in_transit: bool = True
) -> Decided:
    """Return the order of work. `in_transit`: it counts with what is on its way."""
    copies = range(job.form.copies)
    transits: list[Transits] = [{} for _ in copies]
    if in_transit and cut.edges:
        sends = Sends(job, cut.chunks)
        transits = [sends.transits(copy, batches, cut.edges) for copy in copies]
    orders = _orders(job, times, cut.edges, batches, transits)
    memory = RankMemory(job, cut.chunks, cut.axes, orders, times.recomputed)
    room = Room(job, cut, memory, batches)
    return Decided(times, cut.axes, batches, cut.edges, cut.shared, room, orders, transits)


def _orders(
    job: Staging,
    times: ChunkTimes,
    edges: _Edges,
    batches: Batches,
    transits: Sequence[Transits],
) -> list[tuple[tuple[Instruction, ...], ...]]:
    """Return the instructions of every position, by copy; found once for copies that are alike."""
    found: list[tuple[tuple[Instruction, ...], ...]] = []
    known: dict[object, tuple[tuple[Instruction, ...], ...]] = {}
    positions = [Position(held) for held in job.chunks_of_positions()]
    name = job.form.pipeline.schedule if job.form.pipeline else "1f1b"
    for copy, underway in enumerate(transits):
        taken = times.durations(copy, batches.largest(copy))
        owners, count = batches.owners[copy], len(batches.samples[copy])
        alike = (tuple(taken.items()), tuple(underway.items()), owners, count)
        if alike not in known:
            durations = {place: Durations(*each) for place, each in taken.items()}
            known[alike] = schedule(name, positions, owners, edges, count, durations, underway)
        found.append(known[alike])
    return found


def _explained_devices(job: Staging) -> Iterator[Decision]:
    """Say which degrees nobody gave."""
    form, count = job.form, len(job.cluster.devices)
    if form.added > 1:
        reason = f"an outer replicate of {form.added} uses all {count} devices"
        asked = str(form.copies // form.added)
        yield Decision("strategy.graph", str(form.copies), asked, reason)
    elif form.filled is not None:
        reason = f"all devices of hardware={job.cluster.name}"
        yield Decision(f"{form.filled}.degree", str(count), "", reason)


def _explained_shares(job: Staging, batches: Batches) -> Iterator[Decision]:
    """Say how copies, or the members that share a stage's samples, share them, where not evenly."""
    shares = [sum(stop - start for start, stop in of_copy) for of_copy in batches.samples]
    if batches.members:
        sharing = (next(filter(None, copy)) for copy in batches.members)
        by_member = zip(*(of for copy in sharing for of in copy), strict=True)
        shares = [sum(stop - start for start, stop in of) for of in by_member]
    total, count = sum(shares), len(shares)
    even = even_shares(total, count, [total] * count) or ()
    if sorted(even) != sorted(shares):
        reason = "each takes what it does in the time of the slowest, within its memory"
        yield Decision("strategy.balance", _folded(shares), f"even {_folded(even)}", reason)


def _folded(shares: Sequence[int]) -> str:
    """`8 x 43, 8 x 25` for equal neighbours."""
    runs = ((len(list(equal)), share) for share, equal in groupby(shares))
    return ", ".join(f"{times} x {share}" for times, share in runs)


def _explained(
    job: Staging, chunks: Sequence[StageChunk], recomputed: Set[int]
) -> Iterator[Decision]:
    form = job.form
    for stage, asked in enumerate(form.stages):
        if asked.recompute == "auto":
            chosen = "full" if stage in recomputed else "none"
            rejected = "none" if stage in recomputed else "full"
            reason = f"its activations {'do not fit' if stage in recomputed else 'fit'}"
            yield Decision(f"{asked.path}.recompute", chosen, rejected, reason)
    for chunk in chunks:
        yield from _explained_head(job, chunk)
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


def _explained_head(job: Staging, chunk: StageChunk) -> Iterator[Decision]:
    """Say which projection is the head that is split."""
    if chunk.head is None:
        return
    split = job.form.stages[chunk.stage].split
    assert split is not None
    reason = f"the output projection of {job.profile.name}: {chunk.head.weight} with "
    reason += f"{chunk.head.classes} classes"
    yield Decision(f"{split.path}.modules", chunk.head.module or "(the model)", "", reason)
