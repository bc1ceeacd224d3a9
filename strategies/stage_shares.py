"""The least that the slowest stage takes, wherever a model is cut.

`costs` are, of every kind of stage, what it takes of all segments before each place (0 first), and
`stages` the kinds of a pipeline's stages in their order.
"""

from bisect import bisect_right
from collections.abc import Sequence

_STEPS = 24  # of halving what is not known of the least


def spread_s(costs: Sequence[Sequence[float]], stages: Sequence[int]) -> float:
    """Were every segment wherever it takes the least, beside what all take there. Stages weighed by
    how fast they are, the sum of what they take is at least that of all segments."""
    wholes = [cost[-1] for cost in costs]
    if min(wholes) <= 0:
        return 0.0
    parts = range(1, len(costs[0]))
    spread = sum(
        min((cost[i] - cost[i - 1]) / whole for cost, whole in zip(costs, wholes, strict=True))
        for i in parts
    )
    return spread / sum(1 / wholes[kind] for kind in stages)


def cut_s(costs: Sequence[Sequence[float]], stages: Sequence[int], least: float) -> float:
    """Were every stage segments that follow each other: not less than `least`, and as little under
    the optimum as bisection leaves. Each takes as many segments as it can in some seconds, and so
    long as these do not reach the end, they are too few."""
    most = max(cost[-1] for cost in costs)
    for _ in range(_STEPS):
        middle = (least + most) / 2
        place, end = 0, len(costs[0]) - 1
        for kind in stages:
            cost = costs[kind]
            place = bisect_right(cost, cost[place] + middle * (1 + 1e-12)) - 1
            if place == end:
                break
        least, most = (least, middle) if place == end else (middle, most)
    return least
