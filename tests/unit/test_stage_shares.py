"""The least that a slowest stage takes, against all cuts there are."""

from itertools import accumulate, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.strategies.stage_shares import cut_s, spread_s

Costs = list[list[float]]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Costs, list[int]]:
    """Up to three kinds of stages, of up to seven segments."""
    segments = draw(st.integers(1, 7))
    each = st.lists(st.integers(0, 20), min_size=segments, max_size=segments)
    listed = draw(st.lists(each, min_size=1, max_size=3))
    kinds = st.integers(0, len(listed) - 1)
    stages = draw(st.lists(kinds, min_size=1, max_size=4))
    return [[0.0, *map(float, accumulate(costs))] for costs in listed], stages


@given(pipelines())
def test_no_cut_has_a_faster_slowest_stage(pipeline: tuple[Costs, list[int]]) -> None:
    costs, stages = pipeline
    last = len(costs[0]) - 1
    slowest = []
    for inner in combinations([p for p in range(last + 1) for _ in stages], len(stages) - 1):
        ends = (0, *sorted(inner), last)
        pairs = zip(stages, ends, ends[1:], strict=False)
        slowest.append(max(costs[kind][b] - costs[kind][a] for kind, a, b in pairs))
    used = [costs[kind] for kind in sorted(set(stages))]
    numbers = {kind: number for number, kind in enumerate(sorted(set(stages)))}
    renumbered = [numbers[kind] for kind in stages]
    least = spread_s(used, renumbered)
    assert least <= min(slowest) * (1 + 1e-9)
    assert cut_s(used, renumbered, least) == pytest.approx(min(slowest), rel=1e-5, abs=1e-5)


def test_work_that_can_be_spread_is_done_at_once() -> None:
    """Six equal segments on two stages, of which one is twice as fast: four and two."""
    costs = [[2.0 * n for n in range(7)], [1.0 * n for n in range(7)]]
    assert spread_s(costs, [0, 1]) == pytest.approx(4.0)
    assert cut_s(costs, [0, 1], 0.0) == pytest.approx(4.0, rel=1e-5)
    # Five are not shared so: three and two, or four and one.
    assert cut_s([cost[:6] for cost in costs], [0, 1], 0.0) == pytest.approx(4.0, rel=1e-5)
