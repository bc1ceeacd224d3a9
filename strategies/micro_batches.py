"""Micro-batches: how a copy of a pipeline cuts its samples, and who owns which.

Copies of a pipeline share the global batch in proportion to their slowest stage's speed; copies
of a stage own micro-batches in proportion to theirs.
"""

from dataclasses import dataclass

from whale_train.errors import Fault, PlanError
from whale_train.strategies.cost import flops_rate
from whale_train.strategies.plan import Decision
from whale_train.strategies.schedule import owners
from whale_train.strategies.shares import even_shares, optimal_shares, tile
from whale_train.strategies.staging import Staging

PER_STAGE = 4  # micro-batches, where nobody says: a bubble of at most a fifth (GPipe, section 2.3)


@dataclass(frozen=True)
class Batches:
    """Per copy of the pipeline: its micro-batches as intervals of the global batch, and which
    position owns each micro-batch of each chunk."""

    samples: tuple[tuple[tuple[int, int], ...], ...]
    owners: tuple[tuple[tuple[int, ...], ...], ...]


def share_batch(job: Staging, micro_batches: int) -> Batches:
    """The global batch in micro-batches, as even as whole samples allow."""
    samples, owned, start = [], [], 0
    for copy, share in enumerate(copy_shares(job, micro_batches)):
        sizes = even_shares(share, micro_batches, [share] * micro_batches)
        assert sizes is not None
        samples.append(tuple((start + a, start + b) for a, b in tile(share, sizes)))
        start += share
        owned.append(_owners(job, copy, micro_batches))
    return Batches(tuple(samples), tuple(owned))


def count_micro_batches(job: Staging, decisions: list[Decision]) -> int:
    """Micro-batches of a copy: what was asked for, or enough for a small bubble."""
    form, pipeline = job.form, job.form.pipeline
    widest = max(stage.copies for stage in form.stages)
    if pipeline is None:
        return 1
    if pipeline.micro_batches:
        return pipeline.micro_batches
    least = min(copy_shares(job))
    wanted = max(PER_STAGE * len(form.stages), widest)
    if len(form.stages) == 1:
        wanted = widest
    chosen = max(1, min(wanted, least))
    members = max((stage.shards for stage in form.stages if stage.body), default=0)
    while members and job.training.global_batch % chosen:
        chosen -= 1
    reason = f"{PER_STAGE} a stage, of a copy's {least} samples"
    decisions.append(Decision(f"{pipeline.path}.micro_batches", str(chosen), "", reason))
    return chosen


def copy_shares(job: Staging, micro_batches: int = 1) -> tuple[int, ...]:
    """Samples of each copy of the pipeline, in proportion to its slowest stage's speed.

    Beside a split head the samples of a micro-batch are themselves shared, one at least for each
    member: all micro-batches of a copy are then equal.
    """
    form = job.form
    members = max((stage.shards for stage in form.stages if stage.body), default=0)
    unit = micro_batches if members else 1
    total, over = divmod(job.training.global_batch, unit)
    minimum = max(stage.copies for stage in form.stages)
    if form.pipeline and form.pipeline.micro_batches:
        minimum = max(minimum, form.pipeline.micro_batches)
    minimum = max(-(-minimum // unit), members)
    speeds = [min(job.stage_speeds(copy)) for copy in range(form.copies)]
    if job.strategy.balance == "even":
        found = even_shares(total, form.copies, [total] * form.copies)
    else:
        found = optimal_shares(total, speeds, [total] * form.copies, minimum)
    if over or found is None or min(found) < minimum:
        rule = f"gives some of {form.copies} copies fewer than {minimum * unit} samples"
        if over:
            rule = f"cannot be {unit} equal micro-batches, as a split head beside copies wants"
        least = minimum * unit * form.copies
        remedy = (
            f"use a multiple of {unit}, at least {least}" if unit > 1 else f"use at least {least}"
        )
        raise PlanError([Fault("train.global_batch", str(job.training.global_batch), rule, remedy)])
    return tuple(share * unit for share in found)


def member_shares(job: Staging, stage: int, samples: int, copy: int) -> tuple[int, ...]:
    """Samples of a micro-batch that each member of a shard group beside a split head takes."""
    (position,) = (p for p in job.seats.of_stage(stage)[:1])
    ranks = job.seats.positions[copy][position]
    speeds = [flops_rate(job.cluster.devices[rank], job.training.precision) for rank in ranks]
    if job.strategy.balance == "even":
        found = even_shares(samples, len(ranks), [samples] * len(ranks))
    else:
        found = optimal_shares(samples, speeds, [samples] * len(ranks), 1)
    assert found is not None
    return found


def _owners(job: Staging, copy: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Per chunk, the position that owns each micro-batch."""
    of_stage = []
    for stage in range(len(job.form.stages)):
        positions = job.seats.of_stage(stage)
        weights = [
            sum(
                flops_rate(job.cluster.devices[rank], job.training.precision)
                for rank in job.seats.positions[copy][p]
            )
            for p in positions
        ]
        if job.strategy.balance == "even":
            weights = [1.0] * len(positions)
        of_stage.append(tuple(positions[i] for i in owners(weights, micro_batches)))
    return tuple(of_stage[chunk % len(of_stage)] for chunk in range(job.chunk_count))


def refuse_batch_norm(job: Staging, micro_batches: int) -> None:
    norms = job.profile.batch_norm_modules
    pieces = micro_batches
    if norms and job.training.sync_batchnorm and pieces > 1:
        key = f"{job.form.pipeline.path}.micro_batches" if job.form.pipeline else "strategy"
        rule = (
            f"cuts the batch, over all of which {norms[0]} takes its statistics "
            "(model.sync_batchnorm=true)"
        )
        remedy = "use micro_batches: 1, or model.sync_batchnorm=false for those of a micro-batch"
        raise PlanError([Fault(key, str(pieces), rule, remedy)])
