"""The resolver of nested strategies: copies of a pipeline of stages, of copies, of shards.

The same decisions in the same order as `resolve.py`'s for flat strategies: which devices form
which stage, where the model is cut, who takes which micro-batches, how each stage's tensors lie
over its shard group, what that needs of memory. All on the operation graph; no torch.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from whale_train.errors import Fault, PlanError
from whale_train.quantities import in_bytes, in_seconds
from whale_train.strategies.chunks import Chunked, chunked
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.considered import Considered
from whale_train.strategies.findings import Findings
from whale_train.strategies.grammar import Strategy
from whale_train.strategies.instructions import Durations, Instruction, Position, Transits
from whale_train.strategies.micro_batches import (
    Batches,
    count_micro_batches,
    refuse_batch_norm,
    share_batch,
)
from whale_train.strategies.offloading import kept_on_hosts, offload_decisions
from whale_train.strategies.plan import Decision, Plan
from whale_train.strategies.prediction import Simulated
from whale_train.strategies.samples import refuse_learned_targets, refuse_shared_batch
from whale_train.strategies.schedule import schedule
from whale_train.strategies.search.boundary_search import Look, move_ends
from whale_train.strategies.sends import Sends
from whale_train.strategies.sharing import Training
from whale_train.strategies.stage_engines import held_of_stages
from whale_train.strategies.stage_memory import (
    memory_of_ranks,
    recomputed_stages,
    refuse_memory,
    shortfall_bytes,
)
from whale_train.strategies.stage_times import ChunkTimes
from whale_train.strategies.staged_plan import Decided, simulated_step, written
from whale_train.strategies.staging import Chunk, Staging, nested_form

_Edges = Mapping[tuple[int, int], bool]

_MOVING = 8_000  # tasks simulated, and ranks laid out, for a better cut


def consider_nested(
    strategy: Strategy,
    cluster: Cluster,
    findings: Findings,
    training: Training,
    *,
    moving: bool = False,
    cut: tuple[int, ...] = (),
) -> Considered:
    """Resolve a nested strategy, cut at the places `cut` or balanced, and `moving` the ends of its
    stages to where its step is shortest. Raises PlanError with all faults of a stage."""
    job, decisions = _staging(strategy, cluster, findings, training), list[Decision]()
    micro_batches = count_micro_batches(job, decisions)
    refuse_batch_norm(job, micro_batches)
    _refuse_pieces(job, job.form.copies * micro_batches)
    batches = share_batch(job, micro_batches)
    look = _look(job, chunked(job, cut or None), batches)
    if moving and _may_move(job):
        look = _moved(job, batches, look, decisions)
    return _considered(job, batches, look, decisions)


@dataclass(frozen=True)
class _Resolved:
    """What a cut comes to, and the bytes `kept` on hosts; no step where that does not fit."""

    cut: Chunked
    decided: Decided
    step: Simulated | None
    kept: Sequence[float]


def _look(job: Staging, cut: Chunked, batches: Batches) -> Look[_Resolved]:
    decided = _decided(job, cut, batches)
    short = shortfall_bytes(job, decided.memory)
    ranks = len(job.cluster.devices)
    if short > 0:
        return Look(_Resolved(cut, decided, None, ()), short, inf, ranks)
    kept = kept_on_hosts(job.form.keeper, lambda: _owned(job, cut), job.cluster, job.training)
    spans = (step := simulated_step(job, decided)).spans
    return Look(_Resolved(cut, decided, step, kept), short, spans.seconds, len(spans.tasks) + ranks)


def _may_move(job: Staging) -> bool:
    """Whether the strategy leaves it to us where stages end, and wants them as devices are."""
    named = any(stage.modules for stage in job.form.stages)
    return job.chunk_count > 1 and job.strategy.balance == "hardware" and not named


def _moved(
    job: Staging, batches: Batches, first: Look[_Resolved], decisions: list[Decision]
) -> Look[_Resolved]:
    """The stages ending where the step is shortest."""
    weights, balanced = job.findings.order.weights, first.found.cut

    def look(places: tuple[int, ...]) -> Look[_Resolved] | None:
        if any(weights[a] == weights[b] for a, b in pairwise(places)):
            return None  # nothing to train
        try:
            return _look(job, chunked(job, places), batches)
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
    """Of the work that every chunk has."""
    flops = job.findings.order.flops
    each = (flops[last] - flops[first] for first, last in pairwise(cut.places))
    return ", ".join(f"{100 * part / (flops[-1] or 1.0):.0f}%" for part in each)


def _considered(
    job: Staging, batches: Batches, look: Look[_Resolved], decisions: Sequence[Decision]
) -> Considered:
    cut, decided, step = look.found.cut, look.found.decided, look.found.step
    refuse_memory(job, decided.memory, look.work)
    assert step is not None

    def plan() -> Plan:
        explained = [*decisions, *cut.decisions, *_explained(job, cut.chunks, decided.recomputed)]
        explained += offload_decisions(job.form.keeper, look.found.kept, job.cluster)
        return written(job, decided, step.prediction(), explained)

    def on(others: Cluster) -> Simulated:
        there = replace(job, cluster=others)
        taken = ChunkTimes(there, cut.chunks, cut.axes, frozenset(decided.recomputed))
        return simulated_step(there, replace(decided, times=taken))

    return Considered(step, plan, on, look.work, cut.places)


def _owned(job: Staging, cut: Chunked) -> Sequence[float]:
    """How many parameters every rank has a part of its own of, where copies partition them."""
    held, found = held_of_stages(job, cut.chunks, cut.axes), []
    for rank in range(len(job.cluster.devices)):
        copy, position = job.place_of(rank)
        stage = job.seats.stage_of[position]
        member = job.seats.positions[copy][position].index(rank)
        found.append(held[stage][member] / (job.form.copies * job.form.stages[stage].copies))
    return found


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
    each, pipeline = pieces // job.form.copies, job.form.pipeline
    if pieces > 1 or any(stage.body for stage in job.form.stages):
        refuse_shared_batch(job.findings, job.training, each, faults)
    if pipeline is not None and each > 1:
        key = f"{pipeline.path}.micro_batches"
        refuse_learned_targets(job.profile, key, str(each), "use 1, and one copy", faults)
    elif pieces > 1:
        key = job.strategy.graph[0].path
        refuse_learned_targets(job.profile, key, "", "use one copy, or strategy=dp", faults)
    if faults:
        raise PlanError(faults)


def _decided(job: Staging, cut: Chunked, batches: Batches) -> Decided:
    """In which order positions work, and which stages compute their blocks again. While what is
    sent is on its way, positions have more in flight where there is memory for that; blocks that
    may be computed again are where there is not even for less."""
    recomputed = {n for n, stage in enumerate(job.form.stages) if stage.recompute == "full"}
    found = _in_memory(job, cut, batches, recomputed)
    again = recomputed_stages(job, found.memory)
    return found if again == recomputed else _in_memory(job, cut, batches, again)


def _in_memory(job: Staging, cut: Chunked, batches: Batches, recomputed: Set[int]) -> Decided:
    """With more in flight for what is on its way, or, where that does not fit, without."""
    found = _ordered(job, cut, batches, recomputed)
    if any(found.transits) and shortfall_bytes(job, found.memory) > 0:
        return _ordered(job, cut, batches, recomputed, in_transit=False)
    return found


def _ordered(
    job: Staging, cut: Chunked, batches: Batches, recomputed: Set[int], in_transit: bool = True
) -> Decided:
    """Of these stages computing their blocks again. `in_transit`: the order counts with what is on
    its way."""
    times = ChunkTimes(job, cut.chunks, cut.axes, frozenset(recomputed))
    sends, copies = Sends(job, cut.chunks), range(job.form.copies)
    transits = [sends.transits(copy, batches, cut.edges) if in_transit else {} for copy in copies]
    orders = _orders(job, times, cut.edges, batches, transits)
    memory = memory_of_ranks(job, cut.chunks, cut.axes, batches, orders, recomputed)
    return Decided(
        times, cut.axes, batches, cut.edges, cut.shared, memory, orders, transits, recomputed
    )


def _orders(
    job: Staging,
    times: ChunkTimes,
    edges: _Edges,
    batches: Batches,
    transits: Sequence[Transits],
) -> list[tuple[tuple[Instruction, ...], ...]]:
    """The instructions of every position, by copy; found once for copies that are alike."""
    found: list[tuple[tuple[Instruction, ...], ...]] = []
    known: dict[object, tuple[tuple[Instruction, ...], ...]] = {}
    positions = [Position(held) for held in job.chunks_of_positions()]
    name = job.form.pipeline.schedule if job.form.pipeline else "1f1b"
    for copy, underway in enumerate(transits):
        taken = times.durations(copy, batches)
        owners, count = batches.owners[copy], len(batches.samples[copy])
        alike = (tuple(taken.items()), tuple(underway.items()), owners, count)
        if alike not in known:
            durations = {place: Durations(*each) for place, each in taken.items()}
            known[alike] = schedule(name, positions, owners, edges, count, durations, underway)
        found.append(known[alike])
    return found


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
