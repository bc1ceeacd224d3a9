"""The ends of stages, moved as long as the simulated step gets shorter.

The balanced cut is the best for the slowest stage by FLOP/s. A step waits for more than that:
operations bound by memory, first and last micro-batches, sums of gradients over copies. The
simulator knows this of one cut at a time, and no formula adds it up. So the ends of stages move one
by one to neighbouring places, and stay where that shortens the step, or, where nothing fits the
memory, the bytes that are missing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, TypeVar

Boundaries = tuple[int, ...]
T = TypeVar("T")

_SHORTER = 1 - 1e-3  # fraction of a step's seconds below which another cut is better
_FAR = (-1, 1, -2, 2)  # places that an end moves at once, the nearest first


@dataclass(frozen=True)
class Trial(Generic[T]):
    """The outcome of a cut.

    found: what the caller derives from the cut.
    short_bytes: bytes by which some device is short of memory; not positive where all fit.
    seconds: simulated seconds of the step.
    work: simulated tasks and laid-out ranks that it took.
    """

    found: T
    short_bytes: float
    seconds: float
    work: int


def shift_boundaries(
    cut: Boundaries, first: Trial[T], look: Callable[[Boundaries], Trial[T] | None], work: int
) -> tuple[Boundaries, Trial[T]]:
    """Return the cut that no move of one end makes better, and its outcome.

    cut: places where stages begin and the last one ends, to start from.
    first: the outcome of `cut`.
    look: function that returns the outcome of a cut; None for places at which the model cannot be
        cut.
    work: limit of the work of all outcomes together. A next cut is not looked at where its work,
        taken to be that of `first`, would exceed the limit.

    A cut is better that is short of less memory, or, short of none, takes less time by a
    thousandth. The outcome has the work of all cuts that were looked at. The answer is the same
    every time.
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
    """Return True if `one` is short of fewer bytes than `other`, or, where both fit, takes less
    time by a thousandth."""
    if one.short_bytes > 0 or other.short_bytes > 0:
        return one.short_bytes < other.short_bytes
    return one.seconds < other.seconds * _SHORTER
