"""The groups of a strategy's stages that divide the positions of attentions, with their costs."""

from collections.abc import Iterator, Sequence

from whale_train.quantities import in_seconds
from whale_train.strategies.context_parallel.attention import WAYS, AttentionGroup, attentions
from whale_train.strategies.context_parallel.rules import CONTEXT_ATTENTION
from whale_train.strategies.cost.collectives import group_link
from whale_train.strategies.hardware.cluster import Device, Link
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.stages.placement import PlanningContext, StageChunk


def attention_group(job: PlanningContext, stage: int) -> AttentionGroup:
    """Return the first group of `stage`, for as many samples as a micro-batch of the strategy has
    at most."""
    ranks = job.replicas[stage][0]
    pipeline = job.form.pipeline
    pieces = (pipeline.micro_batches or 1) if pipeline else job.training.accumulate
    samples = max(1, job.training.global_batch // (job.form.copies * pieces))
    return group_of(job, ranks, samples, group_link(job.cluster, ranks, by_memory=True))


def group_of(
    job: PlanningContext, ranks: Sequence[int], samples: float, link: Link
) -> AttentionGroup:
    """Return the group of `ranks`, joined by `link`, for micro-batches of `samples`."""
    slowest: Device = min(
        (job.cluster.devices[rank] for rank in ranks),
        key=lambda device: device.flops[job.training.precision],
    )
    nodes = {job.cluster.node_of[rank] for rank in ranks}
    by_memory = job.cluster.shared_memory is not None and len(nodes) == 1
    repeated = job.findings.once("repeated keys", lambda: _repeated(job))
    return AttentionGroup(
        *(job.graph, repeated, len(ranks), samples, job.training.precision, link, slowest),
        hides=not by_memory,
    )


def _repeated(job: PlanningContext) -> dict[str, int]:
    """Return the times that keys are repeated for the queries that share them, by attention."""
    times: dict[str, int] = {}
    for rewrite in job.findings.grouped_keys:
        key, source = next(iter(rewrite.repeated(job.graph).items()))
        before = job.graph[job.graph[source].name].shape or ()
        after = job.graph[key].shape or ()
        times[rewrite.operations[-1]] = after[1].fixed // before[1].fixed
    return times


def explained_attention(job: PlanningContext, chunk: StageChunk) -> Iterator[Decision]:
    """Yield a decision on how the first attention of a chunk is divided, where the request leaves
    it open, with the seconds of each way."""
    split = job.form.stages[chunk.stage].split
    if split is None or not chunk.shares_sequence or split.attention != "auto":
        return
    assert chunk.sharded is not None
    becomes = chunk.sharded.assignment.becomes
    group = attention_group(job, chunk.stage)
    for operation in attentions(job.graph, chunk.slice.operations):
        chosen = becomes.get(operation.name, "")
        if chosen not in CONTEXT_ATTENTION:
            continue
        seconds = {
            way: group.seconds(operation, kind)
            for way, kind in WAYS.items()
            if kind in group.possible(operation)
        }
        names = {kind: way for way, kind in WAYS.items()}
        others = [way for way in seconds if way != names[chosen]]
        priced = ", ".join(f"{way} {in_seconds(seconds[way])}" for way in seconds)
        reason = f"exchanges and waits of each attention: {priced}"
        yield Decision(f"{split.path}.attention", names[chosen], ", ".join(others), reason)
        return
