"""Follow the values of evaluations: the best so far, and whether they still improve."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from whale_train.config import Request, StopAfterOptions, WatchedMetric
from whale_train.errors import LaunchError

STOP_AFTER, BEST = "train.stop_after", "checkpoint.best"


@dataclass(frozen=True)
class BestValue:
    """The best value of a metric so far.

    value: the value; None before the first evaluation.
    step: the step after which it was evaluated.
    worse: the number of evaluations since, none of which was better.
    """

    value: float | None = None
    step: int = 0
    worse: int = 0

    def after(self, step: int, value: float, is_lower: bool, min_change: float) -> "BestValue":
        """Return the best value, given that `value` was evaluated after `step`.

        is_lower: whether lower values are better.
        min_change: the change that an improvement has to exceed.
        """
        gain = 0.0 if self.value is None else self.value - value if is_lower else value - self.value
        if value == value and (self.value is None or gain > min_change):  # not NaN
            return BestValue(value, step)
        return replace(self, worse=self.worse + 1)


class EvaluationWatch:
    """Follows the evaluations of a run that may end early because of them, or keeps its best
    checkpoint.

    Every rank has one, and all of them must get the same values.
    """

    def __init__(self, request: Request, saved: Mapping[str, Any]) -> None:
        """Begin, or continue from `saved`, the result of `state` in a checkpoint."""
        options = {STOP_AFTER: request.train.stop_after, BEST: request.checkpoint.best}
        self._watched = {key: option for key, option in options.items() if option is not None}
        self._best = {
            key: _restored(option, saved.get(key)) for key, option in self._watched.items()
        }
        self._stop_after = request.train.stop_after
        self.end = ""  # why the run ends before its last step

    def __bool__(self) -> bool:
        return bool(self._watched)

    def add(self, step: int, values: Mapping[str, float]) -> bool:
        """Add the values of the evaluation after `step`; return whether it is the best step by
        `checkpoint.best`.

        Raises LaunchError where `values` lacks a metric that is watched.
        """
        is_best = False
        for key, option in self._watched.items():
            if option.metric not in values:
                listing = ", ".join(values)
                rule = f"{key} watches {option.metric}, and the evaluation gave {listing}"
                raise LaunchError(f"{rule}; use one of these")
            min_change = option.min_change if isinstance(option, StopAfterOptions) else 0.0
            now = self._best[key].after(step, values[option.metric], option.is_lower, min_change)
            is_best |= key == BEST and now.step == step
            self._best[key] = now
        stop, best = self._stop_after, self._best.get(STOP_AFTER)
        if stop is not None and best is not None and best.worse >= stop.evaluations:
            count = f"in {stop.evaluations} evaluations"
            self.end = f"{stop.metric} was no number {count}"
            if best.value is not None:
                self.end = f"{stop.metric} was not better {count} than after step {best.step} "
                self.end += f"({best.value:.6g})"
        return is_best

    @property
    def best(self) -> dict[str, Any] | None:
        """Return the metric, value and step of the best checkpoint, or None if there is none."""
        best = self._best.get(BEST)
        if best is None or best.value is None:
            return None
        return {
            "metric": self._watched[BEST].metric,
            "value": best.value,
            "step": best.step,
        }

    def state(self) -> dict[str, Any]:
        """Return the best values so far, as JSON data for a checkpoint."""
        return {
            key: {"metric": self._watched[key].metric, **vars(best)}
            for key, best in self._best.items()
        }


def _restored(option: WatchedMetric, saved: Mapping[str, Any] | None) -> BestValue:
    """Return the best value in a checkpoint, or a new BestValue if another metric was watched."""
    if saved is None or saved.get("metric") != option.metric:
        return BestValue()
    return BestValue(saved["value"], saved["step"], saved["worse"])
