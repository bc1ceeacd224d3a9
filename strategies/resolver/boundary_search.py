"""Where stages end, moved as long as the simulated step gets shorter.

The balanced cut is the best for the slowest stage by FLOP/s. What else a step waits for (what is
bound by memory, first and last micro-batches, sums of gradients over copies) the simulator knows,
and says of one cut at a time: no formula adds it up. So the ends of stages move one by one to
neighbouring places, and stay where that shortens the step; where nothing fits, what is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, TypeVar

Boundaries = tuple[int, ...]
T = TypeVar("T")

_SHORTER = 1 - 1e-3  # times a step is one that is worth another cut
_FAR = (-1, 1, -2, 2)  # places that an end moves at once, the nearest first


@dataclass(frozen=True)
class Look(Generic[T]):
    """What comes of a cut, `found`: its step's `seconds`, unless it is `short_bytes` of memory on
    some device. `work` is what was simulated to find that out."""

    found: T
    short_bytes: float
    seconds: float
    work: int


def move_ends(
    cut: Boundaries, first: Look[T], look: Callable[[Boundaries], Look[T] | None], work: int
) -> tuple[Boundaries, Look[T]]:
    """Return the cut that no move of one end makes better, from `cut`, of which comes `first`, and
    what comes of it. `look` gives None for what cannot be cut so. A cut is better that is short of
    less memory, or, short of none, takes less time by a thousandth. Looks take no more than `work`
    together, each taken for the first; the answer, which says how much, is the same every time."""
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
            found = look(other)
            if found is not None:
                done += found.work
                if _is_better(found, best):
                    cut, best = other, found
        if cut == before:
            return cut, replace(best, work=done)


def _is_better(one: Look[T], other: Look[T]) -> bool:
    if one.short_bytes > 0 or other.short_bytes > 0:
        return one.short_bytes < other.short_bytes
    return one.seconds < other.seconds * _SHORTER
