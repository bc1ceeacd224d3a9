"""Micro-batches: how a replica of a pipeline cuts its samples, and which position owns each
micro-batch.

Replicas divide the global batch so that all finish at once, by the seconds of their slowest stage.
Copies of a stage divide micro-batches in the same way, and members of a shard group whose rest is
replicated divide samples. Where `limits` are known, no rank takes more samples at a time than fit
its memory.
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
from whale_train.strategies.stages.logical_workers import worker_counts, worker_samples
from whale_train.strategies.stages.placement import PlanningContext

PER_STAGE = 4  # default micro-batches: a bubble of at most a fifth (GPipe, section 2.3)

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Batches:
    """The micro-batches of every replica of the pipeline. Intervals are [start, stop).

    samples: intervals of the global batch, by replica and micro-batch.
    owners: position that owns each micro-batch, by replica, chunk and micro-batch.
    members: interval of a micro-batch that each member of a shard group takes, by replica, stage
        and micro-batch; empty where no members divide samples.
    """

    samples: tuple[Intervals, ...]
    owners: tuple[tuple[tuple[int, ...], ...], ...]
    members: tuple[tuple[tuple[Intervals, ...], ...], ...] = ()

    def largest(self, copy: int) -> int:
        """Return the number of samples of the largest micro-batch of a replica."""
        return self._largest[copy]

    @cached_property
    def _largest(self) -> Sequence[int]:
        return [max(stop - start for start, stop in of_copy) for of_copy in self.samples]


class BatchTooLargeError(Exception):
    """The global batch does not fit the limits of all devices, which have room for only `most`
    samples."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most


MOST_PARTS = 1_000_000  # micro-batches of a step, over all stages of all replicas


def share_batch(
    job: PlanningContext, times: ChunkTimes, micro_batches: int, limits: Sequence[int] = ()
) -> Batches:
    """Return the global batch in micro-batches, as even as whole samples allow.

    job: the strategy on its devices.
    times: seconds of the chunks of `job`.
    micro_batches: number of micro-batches of every replica.
    limits: the most samples per micro-batch of each rank (empty: no limit).

    Raises PlanError where a replica would be left without samples, and BatchTooLargeError where the
    limits are too low.
    """
    if job.strategy.logical_workers is not None:
        return _shared_by_workers(job, times, limits)
    samples: list[Intervals] = []
    owned: list[tuple[tuple[int, ...], ...]] = []
    members: list[tuple[tuple[Intervals, ...], ...]] = []
    start = 0
    for copy, share in enumerate(copy_shares(job, times, micro_batches, limits)):
        sizes = even_shares(share, micro_batches, [share] * micro_batches)
        assert sizes is not None
        samples.append(tuple((start + a, start + b) for a, b in tile(share, sizes)))
        start += share
        owned.append(_owners(job, times, copy, micro_batches, sizes[0]))
        members.append(_members(job, times, copy, sizes))
    return Batches(tuple(samples), tuple(owned), tuple(members) if any(map(any, members)) else ())


def _shared_by_workers(job: PlanningContext, times: ChunkTimes, limits: Sequence[int]) -> Batches:
    """Return the global batch in the parts of its logical workers, one micro-batch each. Raises
    BatchTooLargeError where such a part does not fit all devices."""
    total = job.strategy.logical_workers
    assert total is not None
    size = job.training.global_batch // total
    if limits and min(limits) < size:
        raise BatchTooLargeError(min(limits) * total)
    samples = worker_samples(worker_counts(job, times), size)
    return Batches(tuple(samples), tuple(((0,) * len(of_device),) for of_device in samples))


def count_micro_batches(job: PlanningContext, times: ChunkTimes, decisions: list[Decision]) -> int:
    """Return the number of micro-batches of a replica: the number that the strategy asks for, or
    enough for a small pipeline bubble. A number that was not asked for is added to `decisions`.
    Raises PlanError where a step would have more than MOST_PARTS parts."""
    form, pipeline = job.form, job.form.pipeline
    if job.strategy.logical_workers is not None:
        return job.strategy.logical_workers
    if pipeline is None:
        key, asked = "train.accumulate", job.training.accumulate
    else:
        key, asked = f"{pipeline.path}.micro_batches", pipeline.micro_batches or 0
    num_stages = form.copies * len(form.stages)
    if asked > 1 and asked * num_stages > MOST_PARTS:
        rule = (
            f"makes {asked * num_stages:,} parts of a step on {num_stages:,} stages of all copies, "
            "and at "
        )
        rule += f"most {MOST_PARTS:,} are planned for"
        remedy = f"use at most {max(1, MOST_PARTS // num_stages)}"
        raise PlanError([Fault(key, str(asked), rule, remedy)])
    if asked or pipeline is None:
        return asked
    smallest_share = min(copy_shares(job, times, 1))
    wanted = max(stage.copies for stage in form.stages)
    if len(form.stages) > 1:
        wanted = max(PER_STAGE * len(form.stages), wanted)
    chosen = max(1, min(wanted, smallest_share // form.members))
    reason = f"{PER_STAGE} a stage, of a copy's {smallest_share} samples"
    if job.findings.samples.sums and not job.training.samples_are_independent:
        chosen, reason = 1, "of all its samples, some values are made at once"
    decisions.append(Decision(f"{pipeline.path}.micro_batches", str(chosen), "", reason))
    return chosen


def copy_shares(
    job: PlanningContext, times: ChunkTimes, micro_batches: int, limits: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the number of samples of each replica of the pipeline.

    Every share is large enough to give each copy of a stage, and each member that divides samples,
    at least one sample in `micro_batches`. Raises PlanError and BatchTooLargeError as `share_batch`
    does.
    """
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
    shares = apportion_by_time(job.strategy.balance, total, seconds, caps, minimum)
    if shares is None:
        raise BatchTooLargeError(most_shared(job.strategy.balance, caps))
    return shares


def _most_of_copy(job: PlanningContext, copy: int, limits: Sequence[int]) -> int:
    """Return the size in samples of the largest micro-batch that fits all ranks of a replica."""
    most = []
    for position, ranks in enumerate(job.seats.positions[copy]):
        stage = job.form.stages[job.seats.stage_of[position]]
        of_ranks = [limits[rank] for rank in ranks]
        shared = most_shared(job.strategy.balance, of_ranks)
        most.append(shared if stage.body else min(of_ranks))
    return min(most)


def _step_s(
    job: PlanningContext, times: ChunkTimes, copy: int, micro_batches: int, share: int
) -> float:
    """Return the seconds of the slowest stage of a replica that takes `share` samples a step, in
    micro-batches as equal as whole samples allow."""
    size, larger = divmod(max(share, micro_batches), micro_batches)
    sizes = {size: micro_batches - larger, size + 1: larger}
    slowest = 0.0
    for stage in range(len(job.form.stages)):
        positions = job.seats.of_stage(stage)  # copies of the stage, which take turns
        seconds = 0.0
        for samples, count in sizes.items():
            if count:
                rate = sum(_rate(job, times, copy, position, samples) for position in positions)
                seconds += count * samples / rate
        slowest = max(slowest, seconds)
    return slowest


def _rate(job: PlanningContext, times: ChunkTimes, copy: int, position: int, size: int) -> float:
    """Return the samples per second of one position, in micro-batches of `size`."""
    seconds = times.stage_s(job.seats.stage_of[position], copy, position, size)
    return size / max(seconds, 1e-30)


def _shared_by_equals(
    job: PlanningContext, seconds: Sequence["partial[float]"]
) -> list["partial[float]"]:
    """Return one function for each replica. Replicas on equal devices have the same function
    object, so that `apportion_by_time` calls it once for all of them."""
    first: dict[tuple[int, ...], partial[float]] = {}
    return [
        first.setdefault(
            tuple(id(job.cluster.devices[rank]) for ranks in positions for rank in ranks), function
        )
        for positions, function in zip(job.seats.positions, seconds, strict=True)
    ]


def _owners(
    job: PlanningContext, times: ChunkTimes, copy: int, micro_batches: int, size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the position that owns each micro-batch, by chunk."""
    of_stage = []
    for stage in range(len(job.form.stages)):
        positions = job.seats.of_stage(stage)
        weights = [1.0] * len(positions)
        if job.strategy.balance != "even" and len(positions) > 1:
            weights = [_rate(job, times, copy, position, size) for position in positions]
        of_stage.append(tuple(positions[i] for i in owners(weights, micro_batches)))
    return tuple(of_stage[chunk % len(of_stage)] for chunk in range(job.chunk_count))


def _members(
    job: PlanningContext, times: ChunkTimes, copy: int, sizes: Sequence[int]
) -> tuple[tuple[Intervals, ...], ...]:
    """Return the interval that each member of a shard group takes of every micro-batch, by stage.
    The entry is empty for a stage whose members do not divide samples."""
    by_stage: list[tuple[Intervals, ...]] = [()] * len(job.form.stages)
    for number, chunk in enumerate(times.chunks):
        if chunk.shares_samples and not by_stage[chunk.stage]:
            (position, *_) = job.seats.of_stage(chunk.stage)
            ranks = job.seats.positions[copy][position]
            by_stage[chunk.stage] = tuple(
                tile(size, times.member_shares(number, ranks, size)) for size in sizes
            )
    return tuple(by_stage)


def refuse_batch_norm(job: PlanningContext, micro_batches: int) -> None:
    """Raise PlanError where BatchNorm would take its statistics over each micro-batch instead of
    the whole batch."""
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
