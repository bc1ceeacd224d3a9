"""Fit the planner's step time to the measured steps of one job.

The planner says how long a step's computing, communication, optimizer and waiting take. A job's own
steps say how far each of those is off, and how much time the planner does not count. Few measured
plans determine few numbers, so each number is held near one common ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from scipy.optimize import nnls

_HELD = 0.03  # relative error of a step that weighs as much as a number twice the common ratio
_HELD_AT_0 = 0.1  # relative error that weighs as much as a typical step that is not predicted


@dataclass(frozen=True)
class StepParts:
    """A predicted step: what the busiest rank does with its time, in seconds.

    compute_s, communication_s, optimizer_s, idle_s: the parts of `Prediction`.
    micro_batches: micro-batches of a rank.
    crowding: ranks for each core that runs them, at least 1.
    """

    compute_s: float
    communication_s: float
    optimizer_s: float
    idle_s: float
    micro_batches: int = 1
    crowding: float = 1.0

    @property
    def seconds(self) -> float:
        """Return the predicted time of the step."""
        return self.compute_s + self.communication_s + self.optimizer_s + self.idle_s


@dataclass(frozen=True)
class FittedStepTime:
    """A job's step time, as a sum of the predicted parts.

    compute, communication, optimizer, idle: measured seconds for each predicted one.
    constant_s: seconds of every step that are not predicted, on a core of the rank's own.
    micro_batch_s: those of every micro-batch after the first.
    """

    compute: float = 1.0
    communication: float = 1.0
    optimizer: float = 1.0
    idle: float = 1.0
    constant_s: float = 0.0
    micro_batch_s: float = 0.0

    def seconds(self, parts: StepParts) -> float:
        """Return the time of a step, in seconds."""
        return (
            self.compute * parts.compute_s
            + self.communication * parts.communication_s
            + self.optimizer * parts.optimizer_s
            + self.idle * parts.idle_s
            + self.constant_s * parts.crowding
            + self.micro_batch_s * parts.crowding * (parts.micro_batches - 1)
        )


def fit_step_time(measured: Sequence[tuple[StepParts, float]]) -> FittedStepTime:
    """Return the step time that fits measured steps, by non-negative least squares of relative
    errors.

    measured: the parts of each measured plan and the seconds of its step. Without any, the
        prediction itself is returned.
    """
    if not measured:
        return FittedStepTime()
    ratio = median(seconds / parts.seconds for parts, seconds in measured)
    typical_s = median(seconds for _, seconds in measured)
    rows, wanted = [], []
    for parts, seconds in measured:
        values = (parts.compute_s, parts.communication_s, parts.optimizer_s, parts.idle_s)
        times = (parts.crowding, parts.crowding * (parts.micro_batches - 1))
        rows.append([x / seconds for x in (*values, *(typical_s * x for x in times))])
        wanted.append(1.0)
    for place in range(6):
        row = [0.0] * 6
        row[place] = _HELD / ratio if place < 4 else _HELD_AT_0
        rows.append(row)
        wanted.append(_HELD if place < 4 else 0.0)
    numbers, _ = nnls(np.array(rows), np.array(wanted))
    compute, communication, optimizer, idle, constant, micro_batch = map(float, numbers)
    unpredicted = (constant * typical_s, micro_batch * typical_s)
    return FittedStepTime(compute, communication, optimizer, idle, *unpredicted)
