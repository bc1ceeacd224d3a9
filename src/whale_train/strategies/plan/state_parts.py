"""Cut a flat state into one interval for each copy, in proportion to relative parts."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

Interval = tuple[int, int]  # [start, stop)


def intervals_of(total: int, parts: Sequence[int]) -> tuple[Interval, ...]:
    """Return one interval [start, stop) of `total` elements for each of `parts`.

    The intervals tile [0, total) in the order of `parts`, and each is its part of the total to
    within one element. A part of 0 has an empty interval. `parts` are not negative, and their sum
    is positive.
    """
    all_parts = sum(parts)
    return tuple(pairwise(total * end // all_parts for end in accumulate(parts, initial=0)))


def overlap(first: Interval, second: Interval) -> Interval:
    """Return the interval that two intervals share; it is empty where they share none."""
    start = max(first[0], second[0])
    return start, max(start, min(first[1], second[1]))
