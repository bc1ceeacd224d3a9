"""1F1B between stages of unlike speeds: never slower than the textbook's turns."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples

from whale_train.strategies.schedule.instructions import Durations, Position
from whale_train.strategies.schedule.orders import makespan


def ours(stages: Sequence[tuple[float, float]], micro_batches: int, name: str = "1f1b") -> float:
    numbers = range(len(stages))
    return makespan(
        name,
        [Position((s,)) for s in numbers],
        tuple((s,) * micro_batches for s in numbers),
        {(s, s + 1): True for s in numbers[:-1]},
        micro_batches,
        {(s, s): Durations(f, b / 2, b / 2) for s, (f, b) in enumerate(stages)},
    )


def textbook(stages: Sequence[tuple[float, float]], micro_batches: int) -> float:
    """PipeDream-Flush (Narayanan et al. 2021, arXiv 2104.04473): as many forwards as there are
    stages below, then a forward and a backward in turns, each as soon as what it needs is there."""
    orders = []
    for stage in range(len(stages)):
        ahead = min(len(stages) - stage - 1, micro_batches)
        order = [("F", m) for m in range(ahead)]
        for m in range(ahead, micro_batches):
            order += [("F", m), ("B", m - ahead)]
        orders.append(order + [("B", m) for m in range(micro_batches - ahead, micro_batches)])
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(stages), [0] * len(stages)
    while any(at[s] < len(orders[s]) for s in range(len(stages))):
        for stage, (forward, backward) in enumerate(stages):
            while at[stage] < len(orders[stage]):
                kind, m = orders[stage][at[stage]]
                other = stage - 1 if kind == "F" else stage + 1
                if 0 <= other < len(stages) and (kind, other, m) not in ends:
                    break
                start = max(free[stage], ends.get((kind, other, m), 0.0))
                free[stage] = start + (forward if kind == "F" else backward)
                ends[kind, stage, m] = free[stage]
                at[stage] += 1
    return max(free)


seconds = st.floats(0.5, 2.0)


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=6), st.integers(1, 24))
def test_never_slower_than_the_textbook(
    stages: list[tuple[float, float]], micro_batches: int
) -> None:
    assert ours(stages, micro_batches) <= textbook(stages, micro_batches) * (1 + 1e-9)


@pytest.mark.parametrize(
    "stages",
    [[(10, 20), (9.9, 19.8), (6, 12)], [(10, 20), (9.9, 19.8), (9.9, 19.8), (6, 12)]],
)
def test_a_first_stage_that_is_a_little_slower_is_kept_busy(
    stages: list[tuple[float, float]],
) -> None:
    """Whoever never waits where it can work is a twelfth and more slower here."""
    assert ours(stages, 128) == pytest.approx(textbook(stages, 128))
    assert ours(stages, 128) < 1.02 * 128 * 30
