"""The best value of an evaluation, and how long none was better."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from whale_train.config import StopAfterOptions, WatchedMetric
from whale_train.runtime.train.best_values import BestValue, EvaluationWatch

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "is_lower", "min_change", "expected"),
    [
        ([3.0, 2.0, 1.0], True, 0.0, (1.0, 3, 0)),
        ([1.0, 2.0, 1.0, 0.99], True, 0.0, (0.99, 4, 0)),
        ([1.0, 2.0, 1.0, 0.99], True, 0.1, (1.0, 1, 3)),
        ([1.0, 1.0], True, 0.0, (1.0, 1, 1)),
        ([0.1, 0.3, 0.2], False, 0.0, (0.3, 2, 1)),
        ([NAN, 2.0, NAN], True, 0.0, (2.0, 2, 1)),
        ([NAN, NAN], False, 0.0, (None, 0, 2)),
    ],
)
def test_best(
    values: list[float],
    is_lower: bool,
    min_change: float,
    expected: tuple[float | None, int, int],
) -> None:
    best = BestValue()
    for step, value in enumerate(values, start=1):
        best = best.after(step, value, is_lower, min_change)
    assert (best.value, best.step, best.worse) == expected


@pytest.mark.parametrize(
    ("metric", "better", "is_lower"),
    [
        ("evaluation_loss", None, True),
        ("valid_accuracy", None, False),
        ("valid_loss", "higher", False),
        ("valid_perplexity", "lower", True),
    ],
)
def test_which_values_are_better(metric: str, better: str | None, is_lower: bool) -> None:
    assert WatchedMetric(metric=metric, better=better).is_lower == is_lower  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.0, 3.0, NAN], "x_loss was not better in 2 evaluations than after step 1 (2)"),
        ([NAN, NAN], "x_loss was no number in 2 evaluations"),
    ],
)
def test_the_end_says_what_was_best(values: list[float], expected: str) -> None:
    stop = StopAfterOptions(evaluations=2, metric="x_loss")
    parts = SimpleNamespace(stop_after=stop), SimpleNamespace(best=None)
    request = SimpleNamespace(train=parts[0], checkpoint=parts[1])
    watch = EvaluationWatch(cast(Any, request), {})
    for step, value in enumerate(values, start=1):
        assert not watch.end
        watch.add(step, {"x_loss": value})
    assert watch.end == expected
