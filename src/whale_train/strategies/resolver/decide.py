"""The decisions of the resolver on a strategy: from its form on the devices to its simulated step.

They are made in the order a reader would decide by hand: which devices form which stage, where the
model is cut, who takes which samples and micro-batches, how each stage's tensors are sharded over
its group, and how much memory that takes. All of this uses the operation graph, or the whole model
where nothing cuts it; no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
from whale_train.strategies.memory.nvme import (
    buffer_bytes,
    file_bytes,
    in_files,
    kept_in_files,
)
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.boundary_search import Trial, shift_boundaries
from whale_train.strategies.resolver.evaluated import EvaluatedStrategy
from whale_train.strategies.resolver.reasons import (
    explained_chunks,
    explained_devices,
    explained_scaling,
    explained_shares,
    explained_state,
    explained_sums,
)
from whale_train.strategies.resolver.refusals import refuse_model, refuse_own_losses, refuse_pieces
from whale_train.strategies.resolver.uneven_state import (
    refuse_state,
    why_uneven,
    with_uneven_state,
)
from whale_train.strategies.resolver.write import (
    PlanDecisions,
    build_plan,
    simulated_step,
)
from whale_train.strategies.schedule.instructions import Durations, Instruction, Position, Transits
from whale_train.strategies.schedule.orders import schedule
from whale_train.strategies.simulate.prediction import Simulated
from whale_train.strategies.stage_memory.rank_memory import RankMemory
from whale_train.strategies.stage_memory.state_by_memory import with_state_parts
from whale_train.strategies.stage_memory.within_memory import (
    MemoryBudget,
    ShortOfMemoryError,
    refuse_memory,
    stages_without_room,
)
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.stages.chunk_cost import ChunkTimes
from whale_train.strategies.stages.chunks import Chunked, chunked
from whale_train.strategies.stages.engines import engines_of_stages, held_elements
from whale_train.strategies.stages.logical_workers import explained_workers
from whale_train.strategies.stages.micro_batches import (
    Batches,
    BatchTooLargeError,
    count_micro_batches,
    refuse_batch_norm,
    share_batch,
)
from whale_train.strategies.stages.offloading import (
    around_recomputed,
    blocks_to_offload,
    transfer_times,
    with_activations_settled,
)
from whale_train.strategies.stages.p2p import P2PCosts
from whale_train.strategies.stages.placement import PlanningContext, form_of
from whale_train.strategies.stages.recomputation import (
    Units,
    all_blocks,
    in_order_of_worth,
    second_forward_s,
    units_asked_for,
)

_Edges = Mapping[tuple[int, int], bool]

_MOVING = 8_000  # limit on simulated tasks and laid-out ranks in the search for a better cut


def decide(
    strategy: Strategy,
    cluster: Cluster,
    findings: ModelAnalysis,
    training: Training,
    *,
    moving: bool = False,
    cut: tuple[int, ...] = (),
) -> EvaluatedStrategy:
    """Return `strategy`, resolved as far as its step.

    strategy: the request's strategy.
    cluster: the devices that the strategy uses.
    findings: analysis cache of the model.
    training: batch, precision and optimizer.
    moving: True if the ends of stages are moved to where the simulated step is shortest.
    cut: places at which the model is cut (indices into `Sequenced.places`); empty for a balanced
        cut.

    Raises PlanError with all faults that one check finds.
    """
    job = _staging(strategy, cluster, findings, training)
    refuse_state(job)
    try:
        return _decided_on(job, moving, cut)
    except ShortOfMemoryError as error:
        uneven = with_uneven_state(job)
        if uneven is None:
            raise
        try:
            return _decided_on(uneven, moving, cut, [why_uneven(job, error)])
        except ShortOfMemoryError as uneven_error:
            by_memory = uneven_error.most_samples > error.most_samples
            raise (uneven_error if by_memory else error) from None


def _decided_on(
    job: PlanningContext, moving: bool, cut: tuple[int, ...], reasons: Sequence[Decision] = ()
) -> EvaluatedStrategy:
    """Return the strategy of `job`, resolved as far as its step.

    moving, cut: as in `decide`.
    reasons: decisions on the form of `job`.
    """
    decisions = list(reasons)
    refuse_pieces(job, _asked_micro_batches(job))
    first = chunked(job, cut or None)
    refuse_own_losses(job, first.chunks)
    asked = units_asked_for(job, first.chunks)
    sent = around_recomputed(blocks_to_offload(job, first.chunks), asked)
    priced = ChunkTimes(job, first.chunks, first.axes, asked, offloaded=sent)
    micro_batches = count_micro_batches(job, priced, decisions)
    refuse_batch_norm(job, micro_batches)
    refuse_pieces(job, micro_batches)
    look = _look(job, first, micro_batches)
    if moving and _may_move(job):
        look = _moved(job, micro_batches, look, decisions)
    return _considered(job, micro_batches, look, decisions)


@dataclass(frozen=True)
class _Resolved:
    """A cut, and the decisions that follow from it.

    cut: the model in chunks.
    decided: micro-batches, orders and memory.
    step: the simulated step; None where the strategy does not fit the memory.
    kept: bytes that each host holds for its ranks; empty where nothing is offloaded.
    files: the note of what is in files, if anything is.
    """

    cut: Chunked
    decided: PlanDecisions
    step: Simulated | None
    kept: Sequence[float]
    files: Sequence[Decision]


def _look(job: PlanningContext, cut: Chunked, micro_batches: int) -> Trial[_Resolved]:
    """Return the outcome of a cut, with infinite seconds where the strategy does not fit the
    memory."""
    cut, decided = _fitted(job, cut, micro_batches)
    short = decided.room.short_bytes
    ranks = len(job.cluster.devices)
    if short > 0:
        return Trial(_Resolved(cut, decided, None, (), ()), short, inf, ranks)
    files = (*kept_in_files(job.form.keeper, lambda: _in_files(job, cut), job.cluster),)
    path = _offload_path(job, decided)
    host_loads = kept_on_hosts(path, lambda: _on_hosts(job, cut, decided), job.cluster)
    spans = (step := simulated_step(job, decided)).spans
    return Trial(
        _Resolved(cut, decided, step, host_loads, files),
        short,
        spans.seconds,
        len(spans.tasks) + ranks,
    )


def _may_move(job: PlanningContext) -> bool:
    """Return True if the strategy leaves the ends of stages open and balances by the hardware."""
    named = any(stage.modules for stage in job.form.stages)
    return job.chunk_count > 1 and job.strategy.balance == "hardware" and not named


def _moved(
    job: PlanningContext, micro_batches: int, first: Trial[_Resolved], decisions: list[Decision]
) -> Trial[_Resolved]:
    """Return the outcome of the cut with the shortest simulated step, found by moving the ends of
    stages from `first`. Add a decision for a cut other than the first to `decisions`."""
    weights, balanced = job.findings.order.weights, first.found.cut

    def look(places: tuple[int, ...]) -> Trial[_Resolved] | None:
        if any(weights[a] == weights[b] for a, b in pairwise(places)):
            return None  # nothing to train
        try:
            return _look(job, chunked(job, places), micro_batches)
        except PlanError:
            return None

    places, best = shift_boundaries(balanced.places, first, look, _MOVING)
    if places != balanced.places:
        assert job.form.pipeline is not None
        reason = f"{in_seconds(best.seconds)} a step, simulated, and {in_seconds(first.seconds)} "
        reason += "if the slowest stage were done first"
        if first.short_bytes > 0:
            reason = f"by speed alone, memory is {in_bytes(first.short_bytes)} short"
        chosen, rejected = (_parts(job, cut) for cut in (best.found.cut, balanced))
        decisions.append(Decision(f"{job.form.pipeline.path}.stages", chosen, rejected, reason))
    return best


def _parts(job: PlanningContext, cut: Chunked) -> str:
    """Return each chunk's share of the work, as text."""
    flops = job.findings.order.flops
    chunk_flops = (flops[last] - flops[first] for first, last in pairwise(cut.places))
    return ", ".join(f"{100 * part / (flops[-1] or 1.0):.0f}%" for part in chunk_flops)


def _considered(
    job: PlanningContext, micro_batches: int, look: Trial[_Resolved], decisions: Sequence[Decision]
) -> EvaluatedStrategy:
    """Return the outcome `look` as a strategy with functions that write its plan and simulate it on
    other devices. Raises ShortOfMemoryError where it does not fit."""
    cut, decided, step = look.found.cut, look.found.decided, look.found.step
    refuse_memory(decided.room, decided.times, micro_batches, look.work)
    assert step is not None

    def plan() -> Plan:
        explained = [*decisions, *explained_devices(job), *explained_shares(job, decided.batches)]
        explained += [*cut.decisions, *explained_chunks(job, cut.chunks, decided)]
        explained += explained_sums(job, decided)
        explained += [*explained_state(job, decided), *explained_scaling(job)]
        explained += offload_decisions(
            _offload_path(job, decided), _contents(job, decided), look.found.kept, job.cluster
        )
        explained += look.found.files
        plan = build_plan(job, decided, step.prediction(), explained)
        if plan.logical_workers is None:
            return plan
        of_workers = explained_workers(job, plan.logical_workers)
        return replace(plan, decisions=(*plan.decisions, *of_workers))

    def on(others: Cluster) -> Simulated:
        elsewhere = replace(job, cluster=others)
        limits = decided.times.limits
        units = (decided.recomputed, limits, decided.offloaded)
        taken = ChunkTimes(elsewhere, cut.chunks, cut.axes, *units)
        return simulated_step(elsewhere, replace(decided, times=taken))

    return EvaluatedStrategy(step, plan, on, look.work, cut.places)


def _contents(job: PlanningContext, decided: PlanDecisions) -> Sequence[str]:
    """Return the names of what the strategy offloads."""
    keeper = job.form.keeper
    state = [*offloaded(keeper)] if keeper is not None else []
    state += ["buffers of what is in files"] if keeper is not None and in_files(keeper) else []
    return [*state, *(("activations",) if decided.offloaded else ())]


def _offload_path(job: PlanningContext, decided: PlanDecisions) -> str | None:
    """Return the path of the key that offloads; None where nothing is offloaded."""
    keeper = job.form.keeper
    if keeper is not None and (offloaded(keeper) or in_files(keeper)):
        return f"{keeper.path}.offload"
    stages = (job.form.stages[stage] for stage in decided.offloaded)
    return next((stage.offload_path.rpartition(".")[0] for stage in stages), None)


def _on_hosts(job: PlanningContext, cut: Chunked, decided: PlanDecisions) -> Sequence[float]:
    """Return the bytes of parameters, optimizer states and activations that each rank offloads to
    its host, by rank."""
    engines, by_rank = engines_of_stages(job, cut.chunks, cut.axes), []
    for rank in range(len(job.cluster.devices)):
        copy, position = job.place_of(rank)
        stage = job.seats.stage_of[position]
        member = job.seats.positions[copy][position].index(rank)
        host_bytes_of_rank = decided.room.memory.on_hosts(rank, decided.batches)
        for engine in engines[stage]:
            if engine.keeper is not None and (states := in_files(engine.keeper)):
                is_once = job.has_gradients_in_files(decided.orders[copy][position])
                host_bytes_of_rank += _beside_files(
                    job, cut, rank, states, holds_gradients=not is_once
                )
            if engine.keeper is not None and offloaded(engine.keeper):
                element_bytes = host_bytes(
                    engine.keeper.zero, offloaded(engine.keeper), job.training
                )
                host_bytes_of_rank += (
                    element_bytes * engine.elements[member] / len(engine.groups[0])
                )
        by_rank.append(host_bytes_of_rank)
    return by_rank


def _beside_files(
    job: PlanningContext,
    cut: Chunked,
    rank: int,
    states: Sequence[str],
    *,
    holds_gradients: bool,
) -> float:
    """Return the bytes of the host's memory that a rank with `states` in files takes: buffers, and
    the gradients that several backwards accumulate (`holds_gradients`)."""
    parts = _parts_of_rank(job, cut, rank)
    in_memory = "optimizer" in states and holds_gradients
    gradients = 4 * sum(parts.values()) if in_memory else 0.0
    return gradients + buffer_bytes(states, parts.items())


def _in_files(job: PlanningContext, cut: Chunked) -> Sequence[float]:
    """Return the bytes in files of each rank, by rank."""
    assert job.form.keeper is not None
    element_bytes = file_bytes(in_files(job.form.keeper), job.training)
    ranks = range(len(job.cluster.devices))
    return [element_bytes * sum(_parts_of_rank(job, cut, rank).values()) for rank in ranks]


def _parts_of_rank(job: PlanningContext, cut: Chunked, rank: int) -> Mapping[str, float]:
    """Return the elements of each parameter that ZeRO leaves to `rank`, by path."""
    copy, position = job.place_of(rank)
    stage = job.seats.stage_of[position]
    member = job.seats.positions[copy][position].index(rank)
    copies, held = len(job.copies_of_rest[stage][0]), dict[str, float]()
    for chunk in cut.chunks:
        if chunk.stage == stage:
            held |= held_elements(job, chunk, cut.axes, member)
    return {path: count / copies for path, count in held.items()}


def _staging(
    strategy: Strategy, cluster: Cluster, findings: ModelAnalysis, training: Training
) -> PlanningContext:
    """Return the strategy in its form on `cluster`. Raises PlanError where it has no form, or
    cannot train the model."""
    faults: list[Fault] = []
    if strategy.logical_workers is not None:  # each has the statistics of its own samples
        training = replace(training, sync_batchnorm=False, all_reduce="flat")
    form = form_of(strategy, cluster, training, faults)
    if faults or form is None:
        raise PlanError(faults)
    job = PlanningContext(strategy, cluster, findings, training, form)
    refuse_model(job)
    return replace(job, form=with_activations_settled(job))


def _asked_micro_batches(job: PlanningContext) -> int:
    """Return the number of micro-batches of a replica that the request asks for; 1 where it asks
    for none."""
    pipeline = job.form.pipeline
    if pipeline is None:
        return job.strategy.logical_workers or job.training.accumulate
    return pipeline.micro_batches or 1


def _fitted(
    job: PlanningContext, cut: Chunked, micro_batches: int
) -> tuple[Chunked, PlanDecisions]:
    """Return the cut and all decisions on it, with shares that fit every device if such shares
    exist. The units of split parts (classes, experts) are divided anew first, then the samples."""
    decided = _decided(job, cut, micro_batches)
    for own in (None, 1):  # with the samples that members take, else with one sample
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


def _decided(
    job: PlanningContext, cut: Chunked, micro_batches: int, limits: Sequence[int] = ()
) -> PlanDecisions:
    """Return the decisions on a cut: the order in which positions work, and the blocks that are
    recomputed or offloaded.

    Positions have more micro-batches in flight while messages travel, where memory allows. Stages
    with `auto` recompute, or offload, as many blocks as it takes to fit without these. `limits` are
    as in `share_batch`.
    """
    asked = units_asked_for(job, cut.chunks), blocks_to_offload(job, cut.chunks)
    decided = _in_memory(job, cut, micro_batches, limits, *asked)
    for offloads in _cheaper_first(job, cut):
        decided = _with_fewest(job, cut, micro_batches, limits, decided, offloads)
    return decided


def _cheaper_first(job: PlanningContext, cut: Chunked) -> Sequence[bool]:
    """Return the open choices in the order in which they are made: False for the blocks that are
    recomputed, True for those that are offloaded. Where a stage leaves both open, the one that adds
    fewer seconds comes first: both free about the same bytes of a block."""
    both = [
        n
        for n, stage in enumerate(job.form.stages)
        if stage.recompute.mode == "auto" and stage.offload == "auto"
    ]
    if not both or job.cluster.on_cpu:
        return (False, True)
    chunks = [chunk for chunk in cut.chunks if chunk.stage == both[0]]
    device = job.cluster.devices[job.replicas[both[0]][0][0]]
    names = [name for chunk in chunks for name in chunk.slice.operations]
    samples = max(1, job.training.global_batch // job.form.copies)
    sent = transfer_times(job, names, all_blocks(job, chunks), (), device, samples)
    sends_first = sent.total / samples < second_forward_s(job, chunks)
    return (True, False) if sends_first else (False, True)


def _with_fewest(
    job: PlanningContext,
    cut: Chunked,
    micro_batches: int,
    limits: Sequence[int],
    decided: PlanDecisions,
    offloads: bool,
) -> PlanDecisions:
    """Return `decided` with as many blocks recomputed, or offloaded (`offloads`), as it takes to
    fit, in the stages that leave it open."""
    open_stages = {
        n
        for n, stage in enumerate(job.form.stages)
        if (stage.offload if offloads else stage.recompute.mode) == "auto"
    }
    # On CPUs the host's memory is the device's.
    if offloads and job.cluster.on_cpu:
        return decided
    if not (over := open_stages & stages_without_room(job, decided.memory)):
        return decided
    of_stages = {n: [chunk for chunk in cut.chunks if chunk.stage == n] for n in over}
    blocks = {n: in_order_of_worth(job, chunks) for n, chunks in of_stages.items()}

    def units(chosen: Mapping[int, frozenset[str]]) -> tuple[Units, Units]:
        if offloads:
            return decided.recomputed, {**decided.offloaded, **chosen}
        return {**decided.recomputed, **chosen}, decided.offloaded

    most = {n: frozenset(order) for n, order in blocks.items() if order}
    with_most = _in_memory(job, cut, micro_batches, limits, *units(most))
    fewest = _fewest_blocks(job, cut, with_most, blocks, units)
    if fewest == most:
        return with_most
    fitted = _in_memory(job, cut, micro_batches, limits, *units(fewest))
    return with_most if stages_without_room(job, fitted.memory) else fitted


def _fewest_blocks(
    job: PlanningContext,
    cut: Chunked,
    decided: PlanDecisions,
    blocks: Mapping[int, Sequence[str]],
    units: Callable[[Mapping[int, frozenset[str]]], tuple[Units, Units]],
) -> dict[int, frozenset[str]]:
    """Return the fewest blocks of each stage that make its ranks fit their devices, by bisection;
    all where not even these do.

    decided: the decisions under which all blocks are recomputed or offloaded, whose orders are
        taken.
    blocks: the blocks of each stage, in the order in which they are taken.
    units: returns the modules that are recomputed and offloaded, for the blocks that are taken.
    """
    low = dict.fromkeys(blocks, 0)  # too few, as the stages without room have shown
    high = {stage: len(order) for stage, order in blocks.items()}
    while any(high[stage] - low[stage] > 1 for stage in blocks):
        middle = {stage: (low[stage] + high[stage]) // 2 for stage in blocks}
        again, sent = units({n: frozenset(blocks[n][: middle[n]]) for n in blocks})
        sent = around_recomputed(sent, again)
        memory = RankMemory(job, cut.chunks, cut.axes, decided.orders, again, sent)
        memory = with_state_parts(job, memory, decided.batches)
        over = stages_without_room(job, memory.of_batches(decided.batches))
        for stage, number in middle.items():
            if number == low[stage]:
                continue
            bound = low if stage in over else high
            bound[stage] = number
    return {n: frozenset(order[: high[n]]) for n, order in blocks.items() if order}


def _in_memory(
    job: PlanningContext,
    cut: Chunked,
    micro_batches: int,
    limits: Sequence[int],
    recomputed: Units,
    offloaded: Units,
) -> PlanDecisions:
    """Return the decisions with extra micro-batches in flight to cover the travel time of messages,
    or without these if they do not fit."""
    sent = around_recomputed(offloaded, recomputed)
    times = ChunkTimes(job, cut.chunks, cut.axes, recomputed, limits, sent)
    batches = share_batch(job, times, micro_batches, limits)
    decided = _ordered(job, cut, times, batches)
    if any(decided.transits) and decided.room.short_bytes > 0:
        return _ordered(job, cut, times, batches, in_transit=False)
    return decided


def _ordered(
    job: PlanningContext, cut: Chunked, times: ChunkTimes, batches: Batches, in_transit: bool = True
) -> PlanDecisions:
    """Return the decisions with the order of work. With `in_transit`, the order accounts for the
    travel time of messages."""
    copies = range(job.form.copies)
    transits: list[Transits] = [{} for _ in copies]
    if in_transit and cut.edges:
        sends = P2PCosts(job, cut.chunks)
        transits = [sends.transits(copy, batches, cut.edges) for copy in copies]
    orders = _orders(job, times, cut.edges, batches, transits)
    units = (times.recomputed, times.offloaded)
    memory = RankMemory(job, cut.chunks, cut.axes, orders, *units)
    memory = with_state_parts(job, memory, batches)
    room = MemoryBudget(job, cut, memory, batches)
    return PlanDecisions(times, cut.axes, batches, cut.edges, cut.shared, room, orders, transits)


def _orders(
    job: PlanningContext,
    times: ChunkTimes,
    edges: _Edges,
    batches: Batches,
    transits: Sequence[Transits],
) -> list[tuple[tuple[Instruction, ...], ...]]:
    """Return the instructions of every position, by replica. Equal replicas share one order."""
    orders: list[tuple[tuple[Instruction, ...], ...]] = []
    known: dict[object, tuple[tuple[Instruction, ...], ...]] = {}
    positions = [Position(held) for held in job.chunks_of_positions()]
    name = job.form.pipeline.schedule if job.form.pipeline else "1f1b"
    for copy, underway in enumerate(transits):
        taken = times.durations(copy, batches.largest(copy))
        owners, count = batches.owners[copy], len(batches.samples[copy])
        alike = (tuple(taken.items()), tuple(underway.items()), owners, count)
        if alike not in known:
            durations = {place: Durations(*seconds) for place, seconds in taken.items()}
            known[alike] = schedule(name, positions, owners, edges, count, durations, underway)
        orders.append(known[alike])
    return orders
