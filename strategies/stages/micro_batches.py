"""Micro-batches: how a copy of a pipeline cuts its samples, and who owns which.

Copies share the global batch so that all are done at once, by the seconds their slowest stage
takes; copies of a stage own micro-batches, and the members beside a split head take samples, in
the same way. Nobody takes more at a time than fits its memory, where that is known (`limits`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from whale_train.errors import Fault, PlanError
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.schedule.apportion import (
    apportion_by_time,
    even_shares,
    most_shared,
    tile,
)
from whale_train.strategies.schedule.orders import owners
from whale_train.strategies.stages.chunk_cost import ChunkTimes
from whale_train.strategies.stages.placement import Staging

PER_STAGE = 4  # micro-batches, where nobody says: a bubble of at most a fifth (GPipe, section 2.3)

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Batches:
    """Per copy of the pipeline: its micro-batches as intervals of the global batch, and which
    position owns each micro-batch of each chunk. Beside a split head `members` are, per copy and
    micro-batch, the intervals of it that the members of the shard group take; else empty."""

    samples: tuple[Intervals, ...]
    owners: tuple[tuple[tuple[int, ...], ...], ...]
    members: tuple[tuple[Intervals, ...], ...] = ()

    def largest(self, copy: int) -> int:
        """Return the samples of the largest micro-batch of a copy."""
        return self._largest[copy]

    @cached_property
    def _largest(self) -> Sequence[int]:
        return [max(stop - start for start, stop in of_copy) for of_copy in self.samples]


class BatchTooLargeError(Exception):
    """The limits of all devices leave no room for the global batch, of which `most` samples fit."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most


def share_batch(
    job: Staging, times: ChunkTimes, micro_batches: int, limits: Sequence[int] = ()
) -> Batches:
    """Return the global batch in micro-batches, as even as whole samples allow. `times` price the
    chunks of `job`; each rank takes at most as many samples at a time as `limits` say (empty: any
    number). Raises PlanError where a copy would be left without, BatchTooLargeError where limits
    are too low."""
    samples: list[Intervals] = []
    owned: list[tuple[tuple[int, ...], ...]] = []
    members: list[tuple[Intervals, ...]] = []
    start = 0
    for copy, share in enumerate(copy_shares(job, times, micro_batches, limits)):
        sizes = even_shares(share, micro_batches, [share] * micro_batches)
        assert sizes is not None
        samples.append(tuple((start + a, start + b) for a, b in tile(share, sizes)))
        start += share
        owned.append(_owners(job, times, copy, micro_batches, sizes[0]))
        members.append(_members(job, times, copy, sizes))
    return Batches(tuple(samples), tuple(owned), tuple(members) if any(members) else ())


def count_micro_batches(job: Staging, times: ChunkTimes, decisions: list[Decision]) -> int:
    """Return the micro-batches of a copy: as many as were asked for, or enough for a small
    bubble."""
    form, pipeline = job.form, job.form.pipeline
    widest = max(stage.copies for stage in form.stages)
    if pipeline is None:
        return job.training.accumulate
    if pipeline.micro_batches:
        return pipeline.micro_batches
    least = min(copy_shares(job, times, 1))
    wanted = max(PER_STAGE * len(form.stages), widest)
    if len(form.stages) == 1:
        wanted = widest
    chosen = max(1, min(wanted, least // form.members))
    reason = f"{PER_STAGE} a stage, of a copy's {least} samples"
    decisions.append(Decision(f"{pipeline.path}.micro_batches", str(chosen), "", reason))
    return chosen


def copy_shares(
    job: Staging, times: ChunkTimes, micro_batches: int, limits: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the samples of each copy of the pipeline, `micro_batches` of at least one sample for
    each copy of a stage, and each member beside a split head. Raises as `share_batch` does."""
    form, total = job.form, job.training.global_batch
    minimum = form.members * max(micro_batches, *(stage.copies for stage in form.stages))
    copies = range(form.copies)
    if total < minimum * form.copies:
        rule = f"gives some of {form.copies} copies fewer than {minimum} samples"
        remedy = f"use at least {minimum * form.copies}"
        raise PlanError([Fault("train.global_batch", str(total), rule, remedy)])
    caps = [total] * form.copies
    if limits:
        caps = [min(total, micro_batches * _most_of_copy(job, copy, limits)) for copy in copies]
    seconds = [partial(_step_s, job, times, copy, micro_batches) for copy in copies]
    if form.copies > 1:
        seconds = _shared_by_equals(job, seconds)
    found = apportion_by_time(job.strategy.balance, total, seconds, caps, minimum)
    if found is None:
        raise BatchTooLargeError(most_shared(job.strategy.balance, caps))
    return found


def _most_of_copy(job: Staging, copy: int, limits: Sequence[int]) -> int:
    """Return the samples of the largest micro-batch that all ranks of a copy have room for."""
    most = []
    for position, ranks in enumerate(job.seats.positions[copy]):
        stage = job.form.stages[job.seats.stage_of[position]]
        of_ranks = [limits[rank] for rank in ranks]
        shared = most_shared(job.strategy.balance, of_ranks)
        most.append(shared if stage.body else min(of_ranks))
    return min(most)


def _step_s(job: Staging, times: ChunkTimes, copy: int, micro_batches: int, share: int) -> float:
    """Return the seconds of the slowest stage of a copy that takes `share` samples a step, in
    micro-batches as equal as whole samples allow."""
    size, larger = divmod(max(share, micro_batches), micro_batches)
    sizes = {size: micro_batches - larger, size + 1: larger}
    slowest = 0.0
    for stage in range(len(job.form.stages)):
        positions = job.seats.of_stage(stage)  # copies of the stage, which take turns
        seconds = 0.0
        for each, count in sizes.items():
            if count:
                rate = sum(_rate(job, times, copy, position, each) for position in positions)
                seconds += count * each / rate
        slowest = max(slowest, seconds)
    return slowest


def _rate(job: Staging, times: ChunkTimes, copy: int, position: int, size: int) -> float:
    """Return the samples a second of one position, in micro-batches of `size`."""
    seconds = times.stage_s(job.seats.stage_of[position], copy, position, size)
    return size / max(seconds, 1e-30)


def _shared_by_equals(job: Staging, seconds: Sequence["partial[float]"]) -> list["partial[float]"]:
    """Return for every copy the function of the first that is on devices of the same kinds, which
    is then asked once."""
    first: dict[tuple[int, ...], partial[float]] = {}
    return [
        first.setdefault(
            tuple(id(job.cluster.devices[rank]) for ranks in positions for rank in ranks), function
        )
        for positions, function in zip(job.seats.positions, seconds, strict=True)
    ]


def _owners(
    job: Staging, times: ChunkTimes, copy: int, micro_batches: int, size: int
) -> tuple[tuple[int, ...], ...]:
    """Return, per chunk, the position that owns each micro-batch."""
    of_stage = []
    for stage in range(len(job.form.stages)):
        positions = job.seats.of_stage(stage)
        weights = [1.0] * len(positions)
        if job.strategy.balance != "even" and len(positions) > 1:
            weights = [_rate(job, times, copy, position, size) for position in positions]
        of_stage.append(tuple(positions[i] for i in owners(weights, micro_batches)))
    return tuple(of_stage[chunk % len(of_stage)] for chunk in range(job.chunk_count))


def _members(
    job: Staging, times: ChunkTimes, copy: int, sizes: Sequence[int]
) -> tuple[Intervals, ...]:
    """Return the part of every micro-batch that each member beside a split head takes; nothing
    where there is none."""
    heads = [number for number, chunk in enumerate(times.chunks) if chunk.head]
    if not heads:
        return ()
    (number,) = heads
    (position, *_) = job.seats.of_stage(times.chunks[number].stage)
    ranks = job.seats.positions[copy][position]
    return tuple(tile(size, times.member_shares(number, ranks, size)) for size in sizes)


def refuse_batch_norm(job: Staging, micro_batches: int) -> None:
    """Raise PlanError where micro-batches would each have BatchNorm statistics of their own."""
    norms = job.profile.batch_norm_modules
    if not norms or not job.training.sync_batchnorm or micro_batches == 1:
        return
    rule = (
        f"cuts the batch, over all of which {norms[0]} takes its statistics "
        "(model.sync_batchnorm=true)"
    )
    pipeline = job.form.pipeline
    key = f"{pipeline.path}.micro_batches" if pipeline else "train.accumulate"
    remedy = f"use {'micro_batches: 1' if pipeline else '1'}, or model.sync_batchnorm=false for "
    remedy += "those of a micro-batch"
    raise PlanError([Fault(key, str(micro_batches), rule, remedy)])
