"""Report the metrics of a running trial to Optuna, and stop a pruned trial."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whale_train.launcher.study.objectives import OF_STEPS

if TYPE_CHECKING:
    from optuna.trial import Trial

_REPORTS = 100  # the largest number of reports on a metric that every step has


class TrialFollower:
    """The follower of a trial's job (`launcher/followed.py`).

    Every result of an evaluation is reported. A metric that every step has is reported as a mean
    over each hundredth of the steps, so that trials are compared at the same steps.

    trial: Optuna's trial.
    series: the name of the metric in `metrics.jsonl`; None reports and prunes nothing.
    reported: the optimizer step of the last report.
    """

    def __init__(self, trial: "Trial", series: str | None) -> None:
        self._trial, self._series = trial, series
        self._steps = self._every = 1
        self._values: dict[int, float] = {}  # since the last report, by step
        self.reported = 0
        self.ends = False

    def begin(self, steps: int) -> None:
        """Receive the job's number of optimizer steps."""
        self._steps = steps
        self._every = -(-steps // _REPORTS) if self._series in OF_STEPS else 1

    def hear(self, record: Mapping[str, Any]) -> None:
        """Receive one new line of `metrics.jsonl`, parsed, and report its value if one is due. Null
        is reported as NaN, which prunes the trial."""
        if self._series is None or self.ends or self._series not in record:
            return
        value, step = record[self._series], int(record["step"])
        if step <= self.reported:  # a new attempt repeats steps
            return
        self._values[step] = float("nan") if value is None else float(value)
        if step % self._every:
            return
        self._trial.report(sum(self._values.values()) / len(self._values), step)
        self._values, self.reported = {}, step
        self.ends = step < self._steps and self._trial.should_prune()
