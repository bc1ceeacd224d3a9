"""Say why a strategy was decided as it was: a plan's decisions on what its request leaves open."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from whale_train.quantities import fold_parts, in_seconds
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.resolver.write import PlanDecisions, sums_in_two_levels
from whale_train.strategies.schedule.apportion import even_shares
from whale_train.strategies.stages.attention_groups import explained_attention
from whale_train.strategies.stages.micro_batches import Batches
from whale_train.strategies.stages.placement import PlanningContext, StageChunk
from whale_train.strategies.stages.recomputation import described
from whale_train.strategies.stages.split_names import why_whole


def explained_devices(job: PlanningContext) -> Iterator[Decision]:
    """Yield a decision on the degree that the request leaves open, if there is one."""
    form, count = job.form, len(job.cluster.devices)
    if form.added > 1:
        reason = f"an outer replicate of {form.added} uses all {count} devices"
        asked = str(form.copies // form.added)
        yield Decision("strategy.graph", str(form.copies), asked, reason)
    elif form.filled is not None:
        reason = f"all devices of hardware={job.cluster.name}"
        yield Decision(f"{form.filled}.degree", str(count), "", reason)


def explained_shares(job: PlanningContext, batches: Batches) -> Iterator[Decision]:
    """Yield a decision on uneven shares of the batch, among replicas or among members that divide a
    stage's samples."""
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


def explained_sums(job: PlanningContext, decided: PlanDecisions) -> Iterator[Decision]:
    """Yield a decision where gradients are summed inside hosts first, with the longest of these
    sums."""
    sums = sums_in_two_levels(job, decided).values()
    if sums:
        longest = max(sums, key=lambda x: x.seconds)
        reason = "gradients are summed inside each host, then across hosts, in "
        reason += f"{in_seconds(longest.hierarchical_s)}; all at once takes "
        reason += in_seconds(longest.flat_s)
        yield Decision("train.all_reduce", "hierarchical", "flat", reason)


def explained_scaling(job: PlanningContext) -> Iterator[Decision]:
    """Yield a decision on the linear layers that round the factors of their products to 8 bits."""
    scaled, layers = job.findings.scaled_weights, job.profile.linear_weights
    if scaled:
        chosen = f"{len(scaled)} of {len(layers)} linear layers"
        reason = "those in repeated blocks, with sizes of 64 and more that are multiples of 16; "
        yield Decision("train.precision", chosen, "", reason + "all else is bf16")


def explained_state(job: PlanningContext, decided: PlanDecisions) -> Iterator[Decision]:
    """Yield a decision on how ZeRO cuts the state, where devices differ in memory or the parts
    follow it."""
    keeper, parts = job.form.keeper, decided.room.memory.parts
    if keeper is None or not keeper.zero or keeper.offloads:
        return
    key = f"{keeper.path}.state"
    rooms = {device.room_bytes for device in job.cluster.devices}
    if keeper.state.mode == "memory":
        reason = "each device keeps a part in proportion to the memory that it has left"
        chosen = "; ".join(fold_parts(of_stage) for of_stage in parts if of_stage)
        yield Decision(key, chosen, "even", reason)
    elif keeper.state.mode == "auto" and job.as_is and len(rooms) > 1:
        yield Decision(key, "even", "memory", "equal parts fit every device")


def _folded(shares: Sequence[int]) -> str:
    """Return shares as text, with runs of equal shares folded: `8 x 43, 8 x 25`."""
    runs = ((len(list(equal)), share) for share, equal in groupby(shares))
    return ", ".join(f"{times} x {share}" for times, share in runs)


def explained_chunks(
    job: PlanningContext, chunks: Sequence[StageChunk], decided: PlanDecisions
) -> Iterator[Decision]:
    """Yield the decisions on recomputation, offloaded activations, heads, unsharded tensors, and
    unused parameters."""
    form, recomputed = job.form, decided.recomputed
    yield from _explained_offload(job, chunks, decided)
    for stage, asked in enumerate(form.stages):
        if not asked.recompute.is_open:
            continue
        of_stage = [chunk for chunk in chunks if chunk.stage == stage]
        chosen = described(job, of_stage, recomputed.get(stage, frozenset()))
        rejected = "none" if stage in recomputed else "full"
        reason = f"its activations {'do not fit' if stage in recomputed else 'fit'}"
        if asked.recompute.mode == "memory":
            reason = f"the fewest that keep {asked.recompute.share:.0%} of the activations"
        yield Decision(asked.recompute.path, chosen, rejected, reason)
    for chunk in chunks:
        yield from _explained_head(job, chunk)
        if chunk.sharded is None:
            continue
        yield from explained_attention(job, chunk)
        path = form.stages[chunk.stage].path
        for module in chunk.sharded.whole:
            reason = f"{why_whole(job, chunk, module)}: every device of the group holds it whole"
            yield Decision(f"{path} {module}", "whole", "sharded", reason)
        for name in chunk.sharded.assignment.gathered:
            reason = "no rule for it: it is given whole tensors, which is slower"
            yield Decision(f"operation {name}", "whole", "sharded", reason)
    for path in job.profile.unused_parameters:
        reason = "the loss does not depend on it"
        yield Decision(path, "not trained", "", reason)


def _explained_offload(
    job: PlanningContext, chunks: Sequence[StageChunk], decided: PlanDecisions
) -> Iterator[Decision]:
    """Yield the decisions on what blocks save: how many blocks send it to the host, where that is
    open, and that it frees nothing on CPUs."""
    for stage, form in enumerate(job.form.stages):
        if form.offload == "none":
            continue
        chosen = decided.offloaded.get(stage, frozenset())
        if job.cluster.on_cpu:
            reason = "the memory of the host is that of its CPU processes"
            yield Decision(form.offload_path, form.offload if chosen else "none", "", reason)
        elif form.offload == "auto":
            here = [chunk for chunk in chunks if chunk.stage == stage]
            text = described(job, here, chosen).replace("full", "cpu")
            reason = f"activations {'do not fit' if chosen else 'fit'}"
            reason += ", with what is recomputed" if stage in decided.recomputed else ""
            yield Decision(form.offload_path, text, "none" if chosen else "cpu", reason)


def _explained_head(job: PlanningContext, chunk: StageChunk) -> Iterator[Decision]:
    """Yield a decision that names the projection that is split as the head."""
    if chunk.head is None:
        return
    split = job.form.stages[chunk.stage].split
    assert split is not None
    reason = f"the output projection of {job.profile.name}: {chunk.head.weight} with "
    reason += f"{chunk.head.classes} classes"
    yield Decision(f"{split.path}.modules", chunk.head.module or "(the model)", "", reason)
