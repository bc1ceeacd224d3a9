"""Choose the blocks of each stage that send their saved tensors to the host, and price this."""

from collections.abc import Container, Sequence
from dataclasses import replace

from whale_train.errors import Fault, PlanError
from whale_train.strategies.cost.op_work import PartOfValue, whole
from whale_train.strategies.cost.roofline import Times, fetch_time_s
from whale_train.strategies.grammar.form import Form
from whale_train.strategies.grammar.offload import WHERE_POSSIBLE
from whale_train.strategies.graph.block_paths import unit_of
from whale_train.strategies.graph.operation_graph import HELD, OWN
from whale_train.strategies.graph.saved_tensors import SENT_BYTES, entering_values, kept
from whale_train.strategies.hardware.cluster import Device
from whale_train.strategies.stages.placement import PlanningContext, StageChunk
from whale_train.strategies.stages.recomputation import Units, all_blocks, blocks_of_model


def blocks_to_offload(
    job: PlanningContext, chunks: Sequence[StageChunk]
) -> dict[int, frozenset[str]]:
    """Return the blocks of the stages with `offload: {activations: cpu}`, by stage.

    Raises PlanError where a stage cannot offload.
    """
    units: dict[int, frozenset[str]] = {}
    faults: dict[Fault, None] = {}
    for stage, form in enumerate(job.form.stages):
        if form.offload == "none":
            continue
        faults |= dict.fromkeys(_faults(job, stage))
        if form.offload == "cpu":
            here = all_blocks(job, [chunk for chunk in chunks if chunk.stage == stage])
            units[stage] = frozenset(here)
    if faults:
        raise PlanError(list(faults))
    return {stage: here for stage, here in units.items() if here}


def with_activations_settled(job: PlanningContext) -> Form:
    """Return the form of `job` with `auto` or `none` for the stages that send activations to the
    host where possible."""
    stages = tuple(
        replace(form, offload="none" if _faults(job, stage) else "auto")
        if form.offload == WHERE_POSSIBLE
        else form
        for stage, form in enumerate(job.form.stages)
    )
    return replace(job.form, stages=stages)


def around_recomputed(offloaded: Units, recomputed: Units) -> dict[int, frozenset[str]]:
    """Return the modules in `offloaded`, by stage. A module inside a recomputed one saves nothing
    in its first forward: the recomputed module takes its place."""
    return {
        stage: frozenset(
            unit_of(block, recomputed.get(stage, frozenset())) or block for block in blocks
        )
        for stage, blocks in offloaded.items()
    }


def transfer_times(
    job: PlanningContext,
    names: Sequence[str],
    sent: Container[str],
    again: Container[str],
    device: Device,
    samples: int,
    part: PartOfValue = whole,
) -> Times:
    """Return the seconds that the copies to the host and back add to the operations `names`.

    sent: modules whose saved tensors are sent.
    again: modules that are recomputed, of which the inputs are sent.
    part: gives the fraction of each value that the device holds.

    The copies of a module run beside the forward of the next one, and beside the backward of the
    one before: what counts is by how much they are longer. Modules that follow each other are
    taken to be equal.
    """
    graph, total = job.graph, Times()
    view = job.findings.view.held_by(lambda name: part(name, None))
    inside: dict[str, list[str]] = {}
    for name in names:
        if graph[name].target not in HELD and (unit := unit_of(graph[name].module, sent)):
            inside.setdefault(unit, []).append(name)
    for unit, of_unit in inside.items():
        runs_again = [x for x in of_unit if unit_of(graph[x].module, again)]
        saved = kept(view, of_unit)
        if len(runs_again) == len(of_unit):
            saved = {(x, OWN): view.num_bytes(x) for x in entering_values(graph, of_unit)}
        num_bytes = sum(n for x in saved.values() if (n := x * samples) >= SENT_BYTES)
        seconds = fetch_time_s(num_bytes, [device], job.cluster.on_cpu)
        key = ("sent", unit, of_unit[0], tuple(part(x, None) for x in of_unit))
        times = job.findings.prices.times(key, of_unit, device, samples, lambda: part)
        backward = times.total - times.forward
        total += Times(max(0.0, seconds - times.forward), max(0.0, seconds - backward))
    return total


def _faults(job: PlanningContext, stage: int) -> list[Fault]:
    """Return the faults of offloading what the blocks of a stage save."""
    form = job.form.stages[stage]
    if form.body is not None:
        rule = "is for copies of whole layers, and here modules are split beside the copies"
        return [Fault(form.offload_path, form.offload, rule, "use none, and recompute: full")]
    if form.offload != "cpu" and job.profile.graph is None:
        rule = "needs the model's graph, to know what each block keeps, and it has none"
        return [Fault(form.offload_path, form.offload, rule, "use cpu, or none")]
    if not blocks_of_model(job):
        rule = f"finds no list of blocks in {job.profile.name}"
        return [Fault(form.offload_path, form.offload, rule, "use none")]
    return []
