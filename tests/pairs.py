"""Chooses the cases of a product, and the examples of a property, that a run of the tests takes.

All of them, where WHALE_TRAIN_FULL is in the environment (`make test-all`). Else so many that all
the test wants shown occurs in one of the cases: every pair of values of two axes, or every value
once, where another test shows pairs. What is marked `full` runs in a full run alone: real starts of
what a quicker test shows of one more kind, and what takes minutes.
"""

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row")

IS_FULL = bool(os.environ.get("WHALE_TRAIN_FULL"))


def pairs(*values: Hashable) -> set[Hashable]:
    """Return what a row of these values, one an axis, shows: every pair of two of them."""
    return set(combinations(enumerate(values), 2))


def once(*values: Hashable) -> set[Hashable]:
    """Return what a row of these values, one an axis, shows: each of them."""
    return set(enumerate(values))


def covering(
    rows: Sequence[Row], shown: Callable[[Row], Iterable[Hashable]], full: bool = IS_FULL
) -> list[Row]:
    """Return rows that show together all that `rows` show, in the order of `rows`.

    The greedy algorithm for set cover: again and again the row that shows the most of what is not
    shown yet; of several, one whose things have been shown the least often, so that what may be
    combined freely is combined evenly; of several, the first. It takes no more than ln(n) + 1
    times as many rows as the fewest that would do, of n things to show.
    """
    if full:
        return list(rows)
    things = [frozenset(shown(row)) for row in rows]
    everything = frozenset().union(*things)
    times: Counter[Hashable] = Counter()  # how often the chosen rows show a thing

    def rank(number: int) -> tuple[int, int, int]:
        new = sum(not times[thing] for thing in things[number])
        return new, -sum(times[thing] for thing in things[number]), -number

    chosen: list[int] = []
    while len(times) < len(everything):
        best = max(range(len(rows)), key=rank)
        times.update(things[best])
        chosen.append(best)
    return [rows[number] for number in sorted(chosen)]


def some(rows: Iterable[Row], kept: Iterable[Row]) -> list[Row]:
    """Return those of `rows` that are `kept` in a run of some of the tests, and all in a full run.

    Raises AssertionError where one that is kept is not among the rows.
    """
    rows, kept = list(rows), list(kept)
    missing = [row for row in kept if row not in rows]
    assert not missing, missing
    return [row for row in rows if IS_FULL or row in kept]


def examples(number: int) -> int:
    """Return how many examples of a property are tried, of `number` in a full run."""
    return number if IS_FULL else max(10, number // 4)
