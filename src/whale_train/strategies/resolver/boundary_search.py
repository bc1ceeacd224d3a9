"""Local search over the ends of stages, which shortens the simulated step.

The balanced cut is the best for the slowest stage by FLOP/s. A step depends on more than that:
operations bound by memory, the first and last micro-batches, gradient reductions over replicas. The
simulator knows this for one cut at a time, and no formula adds it up. So the ends of stages move
one by one to neighbouring places. A move is kept if it shortens the step or, where nothing fits the
memory, if it reduces the shortfall.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, TypeVar

Boundaries = tuple[int, ...]
T = TypeVar("T")

_SHORTER = 1 - 1e-3  # fraction of a step's seconds below which another cut is better
_FAR = (-1, 1, -2, 2)  # places by which an end moves, the nearest first


@dataclass(frozen=True)
class Trial(Generic[T]):
    """The outcome of a cut.

    found: the caller's result for the cut.
    short_bytes: memory shortfall of the worst device, in bytes; zero or negative where all fit.
    seconds: simulated seconds of the step.
    work: simulated tasks and laid-out ranks that the trial took.
    """

    found: T
    short_bytes: float
    seconds: float
    work: int


def shift_boundaries(
    cut: Boundaries, first: Trial[T], look: Callable[[Boundaries], Trial[T] | None], work: int
) -> tuple[Boundaries, Trial[T]]:
    """Return a cut that no move of one end improves, and its outcome.

    cut: places where stages begin and the last one ends, to start from.
    first: the outcome of `cut`.
    look: function that returns the outcome of a cut; None for places at which the model cannot be
        cut.
    work: limit on the work of all trials together. A cut is not tried if its work, assumed to equal
        that of `first`, would exceed the limit.

    A cut is better if its shortfall is smaller or, where both fit, if it is faster by a thousandth.
    The outcome carries the work of all trials. The result is deterministic.
    """
    best, looked, done = first, {cut}, first.work
    while True:
        before = cut
        for far, end in product(_FAR, range(1, len(cut) - 1)):
            other = (*cut[:end], cut[end] + far, *cut[end + 1 :])
            if other in looked or not cut[end - 1] < other[end] < cut[end + 1]:
                continue
            if done + first.work > work:
                return cut, replace(best, work=done)
            looked.add(other)
            candidate = look(other)
            if candidate is not None:
                done += candidate.work
                if _is_better(candidate, best):
                    cut, best = other, candidate
        if cut == before:
            return cut, replace(best, work=done)


def _is_better(one: Trial[T], other: Trial[T]) -> bool:
    """Return True if `one` has a smaller shortfall than `other` or, where both fit, is faster by a
    thousandth."""
    if one.short_bytes > 0 or other.short_bytes > 0:
        return one.short_bytes < other.short_bytes
    return one.seconds < other.seconds * _SHORTER
