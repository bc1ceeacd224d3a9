"""Improve the fastest strategies of a search, one change at a time.

The space that is estimated is regular. Its fastest strategies are where changes begin that no
formula prices: each neighbour (`neighbours.py`) is resolved and simulated, and those that are near
the fastest step so far are changed again. Owns the order of trials, and when they end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

from whale_train.strategies.estimate.candidates import Candidate
from whale_train.strategies.search.neighbours import (
    Choices,
    general,
    other_numbers,
    other_patterns,
    other_stages,
)

_FAR = (1, -1, 2, -2)  # places by which the end of a stage is moved
_NEAR = 1.1  # times the fastest: strategies that are changed again
_SPLITTING = 1.1  # times the fastest: splits whose patterns are changed,
_SPLITS = 4  # and most of them
_FIRST = 4  # strategies that are changed, near the fastest or not

Cut = tuple[int, ...]


@dataclass(frozen=True)
class ChangedStep:
    """The step of a strategy in seconds, and the places where it is cut (empty: nowhere, or where
    no file can say so)."""

    seconds: float
    cut: Cut = ()


Simulate = Callable[[Candidate, Cut], ChangedStep | None]
_Entry = tuple[float, Candidate, Cut]


def improve(
    first: Sequence[tuple[float, Candidate, Cut]],
    choices: Choices,
    simulate: Simulate,
    has_time: Callable[[], bool],
) -> None:
    """Simulate the neighbours of the fastest strategies, and theirs, while any is near the fastest.
    Patterns are changed last, weight by weight, for as long as the fastest step gets shorter: each
    takes another search for layouts.

    first: seconds of a step, candidate and cut of strategies that were simulated.
    choices: what neighbours choose from.
    simulate: function that simulates a candidate with a cut (empty: a balanced one) and records it.
        None where it is refused, and once there is no time left.
    has_time: function that returns False once there is no time left.
    """
    waiting = [(seconds, general(candidate), cut) for seconds, candidate, cut in first]
    heapify(waiting)
    for split in _near_fastest(waiting, choices, simulate, has_time):
        best: _Entry | None = split
        while best is not None and has_time():
            best = _with_pattern(best, choices, simulate)


def _near_fastest(
    waiting: list[_Entry], choices: Choices, simulate: Simulate, has_time: Callable[[], bool]
) -> Sequence[_Entry]:
    """Return the fastest splits, one for every mesh and `dim`, of those `waiting`, a heap, and of
    all that are reached from those near the fastest."""
    splits: dict[object, _Entry] = {}
    seen, alike = set[tuple[Candidate, Cut]](), set[tuple[object, float]]()
    best_s, changed = min(waiting, default=(0.0,))[0], 0
    while waiting:
        seconds, candidate, cut = entry = heappop(waiting)
        if seconds > best_s * _NEAR and (changed >= _FIRST or not has_time()):
            break
        if candidate.mesh.shards > 1:
            splits.setdefault((candidate.mesh, candidate.dim), entry)
        if (candidate.mesh, seconds) in alike:  # a change without effect
            continue
        alike.add((candidate.mesh, seconds))
        changed += 1
        for other in _changes(candidate, cut, choices) if has_time() else ():
            if other not in seen:
                seen.add(other)
                outcome = simulate(*other)
                if outcome is not None:
                    best_s = min(best_s, outcome.seconds)
                    heappush(waiting, (outcome.seconds, other[0], outcome.cut))
    return sorted(entry for entry in splits.values() if entry[0] < best_s * _SPLITTING)[:_SPLITS]


def _changes(candidate: Candidate, cut: Cut, choices: Choices) -> Iterator[tuple[Candidate, Cut]]:
    """Yield the strategies that differ in one thing, each with a cut: the same one, for as many
    stages, and a balanced one for others."""
    for far in _FAR:
        for end in range(1, len(cut) - 1):
            if cut[end - 1] < cut[end] + far < cut[end + 1]:
                yield candidate, (*cut[:end], cut[end] + far, *cut[end + 1 :])
    for other in chain(other_numbers(candidate, choices), other_stages(candidate, choices)):
        same = other.mesh.stages == candidate.mesh.stages
        if same and cut and other.schedule != "interleaved_1f1b":
            yield other, cut
        if not (same and cut) or other.mesh != candidate.mesh:
            yield other, ()


def _with_pattern(best: _Entry, choices: Choices, simulate: Simulate) -> _Entry | None:
    """Return `best` with the pattern of one weight changed by which the step is shortest; None
    where no such change makes it shorter."""
    reached = list[_Entry]()
    for other in other_patterns(best[1], choices):
        outcome = simulate(other, best[2])
        if outcome is not None and outcome.seconds < best[0]:
            reached.append((outcome.seconds, other, best[2]))
    return min(reached, default=None)
