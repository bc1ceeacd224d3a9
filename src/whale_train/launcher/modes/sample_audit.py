"""Judge a run's history: whether each sample was taken once an epoch, and on which device.

The proof uses the run's record alone: the launches, plans, metrics and checkpoints. The data is not
opened.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from whale_train.data.coverage import (
    Places,
    SampleOrder,
    missing_places,
    not_tiled,
    repeated_places,
    taken_twice,
)
from whale_train.errors import listed
from whale_train.launcher.modes.run_history import RunHistory, StepRange
from whale_train.quantities import fold_numbers
from whale_train.strategies.plan.plan import Plan

_LOOKED_UP = 2**16  # places whose samples are named, at most
_SHOWN = 3


@dataclass(frozen=True)
class Epochs:
    """The epochs of one source of data under one order of samples.

    steps: the first and the last step that took samples in this order.
    source: number of the source, from 0; None where the data has one source.
    num_samples: number of samples in the source.
    taken: number of samples taken, repeated ones included.
    """

    steps: tuple[int, int]
    source: int | None
    num_samples: int
    taken: int

    @property
    def whole(self) -> int:
        """Return the number of complete epochs."""
        return self.taken // self.num_samples

    @property
    def begun(self) -> int:
        """Return the number of samples taken in the epoch that is not complete."""
        return self.taken % self.num_samples


@dataclass(frozen=True)
class Audit:
    """The proof that a run took each sample once an epoch, or the faults that contradict it.

    history: the steps of the run, each once.
    epochs: the epochs of each source, for each order of samples.
    wrong: one sentence for each fault; empty where each sample was taken once an epoch.
    """

    history: RunHistory
    epochs: tuple[Epochs, ...]
    wrong: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Return the number of the last step; 0 without a step."""
        return max((x.ended for x in self.history.segments), default=0)

    @property
    def samples(self) -> int:
        """Return the number of samples that the steps took, skipped ones included."""
        return sum((x.ended - x.began) * x.batch for x in self.history.segments)


@dataclass(frozen=True)
class TakenSamples:
    """The samples of one step that a group of ranks took.

    ranks: the ranks, which all took the same samples.
    device: the kinds of the ranks' devices, joined by commas.
    nodes: the numbers of the ranks' nodes.
    samples: numbers of the samples, in the order of the batch.
    """

    ranks: tuple[int, ...]
    device: str
    nodes: tuple[int, ...]
    samples: tuple[int, ...]


def holding(history: RunHistory, step: int) -> StepRange | None:
    """Return the segment with the step `step`, which is counted from 1; None without one."""
    return next((x for x in history.segments if x.began < step <= x.ended), None)


def audited(history: RunHistory) -> Audit:
    """Return the audit of a run's history. Raises ConfigError where a plan cannot be read."""
    wrong = list(history.wrong)
    if not history.segments:
        return Audit(history, (), (*wrong, "the run has done no step"))
    for segment in history.segments:
        wrong += _not_shared_out(segment.plan, segment)
    runs = list(_orders(history.segments))
    for before, after in pairwise(runs):
        wrong += _left_unfinished(before, after)
    for segments in runs:
        wrong += _gaps(segments, history.skipped)
    return Audit(history, tuple(x for segments in runs for x in _epochs(segments)), tuple(wrong))


def _orders(segments: Sequence[StepRange]) -> Iterator[list[StepRange]]:
    """Yield lists of consecutive segments, each list with one order of samples, taken from the
    order's beginning."""
    current: list[StepRange] = []
    for segment in segments:
        if current and (segment.anew or segment.order != current[-1].order):
            yield current
            current = []
        current.append(segment)
    yield current


def _epochs(segments: Sequence[StepRange]) -> tuple[Epochs, ...]:
    """Return the epochs of each source that segments with one order of samples went through."""
    order, stop = segments[0].order, max(x.after for x in segments)
    taken = order.taken_before(stop)
    several, steps = len(taken) > 1, (segments[0].began + 1, segments[-1].ended)
    return tuple(
        Epochs(steps, number if several else None, size, count)
        for number, (size, count) in enumerate(zip(order.sizes, taken, strict=True))
    )


def _not_shared_out(plan: Plan, segment: StepRange) -> list[str]:
    """Return a sentence on the first TaskGraph whose replicas do not take each place of a batch
    exactly once, in a list; an empty list without one."""
    for task_graph in plan.task_graphs:
        replicas = [
            [places for rank in replica for places in plan.ranks[rank].samples]
            for replica in task_graph.replicas
        ]
        wrong = not_tiled(replicas, plan.global_batch)
        if wrong:
            steps = f"steps {segment.began + 1:,} to {segment.ended:,}"
            start, stop = wrong[0]
            at = f"place {start}" if stop == start + 1 else f"places {start} to {stop - 1}"
            are = "is" if stop == start + 1 else "are"
            owned = f"{at} of the batch {are} not of exactly one copy of {task_graph.name}"
            return [f"in {steps}, {owned}"]
    return []


def _left_unfinished(before: Sequence[StepRange], after: Sequence[StepRange]) -> list[str]:
    """Return a sentence on an epoch that was not complete when another order of samples began; no
    sentence where the epoch was complete.

    before, after: the segments of two orders of samples, one after the other.
    """
    last, first = before[-1], after[0]
    place = f"after step {last.ended:,} the data was begun with its first sample"
    if not first.anew:
        place = f"after step {last.ended:,} samples are in another order"
    left = sum(x.num_samples - x.begun for x in _epochs(before) if x.begun)
    if not left:
        return []
    is_same = last.digest is not None and last.digest == first.digest
    again = ", and the next epoch is of the same samples" if is_same else ""
    said = f"{left:,} samples of the epoch before were left out{again}"
    return [f"{place} (train.resume_data=any): {said}"]


def _gaps(segments: Sequence[StepRange], skipped: frozenset[int]) -> Iterator[str]:
    """Yield sentences on samples that segments with one order of samples missed, took again, or
    took in a step without an update.

    skipped: the steps without an update.
    """
    order, first = segments[0].order, segments[0]
    stop = max(x.after for x in segments)
    taken = [(x.first, x.after) for x in segments]
    if first.began and not first.anew:  # earlier steps have no record, and count as taken
        taken.append((0, first.first))
    for places in missing_places(taken, stop):
        yield f"{_samples(order, [places])} were missed"
    for places in repeated_places(taken):
        yield f"{_samples(order, [places])} were taken again"
    without = [(step, x) for x in segments for step in _within(x, skipped)]
    if without:
        steps = [step for step, _ in without]
        named = f"step {steps[0]:,} was"
        if len(steps) > 1:
            named = f"{len(steps):,} steps ({fold_numbers(steps)}) were"
        changed = _samples(order, [x.places(step) for step, x in without])
        yield f"{named} skipped, and {changed} changed nothing"
    twice = taken_twice(order, stop)
    if twice:
        yield f"samples {listed(map(str, twice))} are in an epoch twice"


def _within(segment: StepRange, skipped: frozenset[int]) -> list[int]:
    """Return the skipped steps of a segment."""
    return sorted(step for step in skipped if segment.began < step <= segment.ended)


def _samples(order: SampleOrder, intervals: Sequence[Places]) -> str:
    """Return text on the samples at places of an order: their number, their epochs, and the numbers
    of the first ones."""
    count = sum(stop - start for start, stop in intervals)
    start, stop = intervals[0]
    looked_up = (start, min(stop, start + _LOOKED_UP))
    numbers = [int(x) for x in order.samples(looked_up)[:_SHOWN]]
    last = intervals[-1][1] - 1
    epochs = sorted({int(order.epochs((x, x + 1))[0]) + 1 for x in (start, last)})
    more = f" and {count - len(numbers):,} more" if count > len(numbers) else ""
    shown = ", ".join(map(str, numbers)) + more
    of = f"epoch {epochs[0]:,}" if len(epochs) == 1 else f"epochs {epochs[0]:,} to {epochs[-1]:,}"
    return f"{count:,} samples of {of} ({shown})"


def taken_in(segment: StepRange, step: int) -> tuple[TakenSamples, ...]:
    """Return the samples that each rank took in `step`, counted from 1. Ranks with the same samples
    are one entry."""
    plan, samples = segment.plan, segment.order.samples(segment.places(step))
    together: dict[tuple[Places, ...], list[int]] = {}
    for rank in plan.ranks:
        together.setdefault(rank.samples, []).append(rank.rank)
    return tuple(
        TakenSamples(
            tuple(ranks),
            ", ".join(dict.fromkeys(plan.ranks[rank].device for rank in ranks)),
            tuple(dict.fromkeys(plan.ranks[rank].node for rank in ranks)),
            tuple(int(x) for start, stop in places for x in samples[start:stop]),
        )
        for places, ranks in together.items()
    )
