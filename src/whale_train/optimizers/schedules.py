"""Take the learning rate of each step from a torch scheduler that a config names by its class.

The scheduler runs over an optimizer that has a learning rate and nothing else. So the rate is a
function of the step alone, and a resumed run computes it again. A scheduler that changes something
else, as momentum, raises an error because it is missing.
"""

import math
import os
import warnings
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from whale_train.errors import ConfigError, Fault
from whale_train.optimizer_options import OfClass, OptimizerOptions
from whale_train.own_code import TargetKind, argument_faults, importable, imported, said

SCHEDULER = TargetKind(
    "torch.optim.lr_scheduler.LRScheduler", lambda made: issubclass(made, LRScheduler)
)
KEY = "optimizer.schedule._target_"


class _RateAlone(Optimizer):
    """An optimizer that has a learning rate and updates nothing."""

    def __init__(self, lr: float) -> None:
        super().__init__([torch.zeros((), device="cpu", requires_grad=True)], {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing."""


class ScheduledRates:
    """The learning rates of a scheduler by step, computed on demand.

    options: options of the optimizer, whose schedule is a class.

    Raises ConfigError where the class cannot be imported, or where its constructor raises.
    """

    def __init__(self, options: OptimizerOptions) -> None:
        schedule = options.schedule
        assert isinstance(schedule, OfClass)
        made, given = _loaded(schedule), schedule.given
        self._optimizer = _RateAlone(options.lr)
        try:
            self._scheduler = made(self._optimizer, **given)
        except Exception as error:
            rule = f"cannot be used: {schedule.class_name} raised {said(error)}"
            remedy = "correct its arguments"
            raise ConfigError([Fault(KEY, schedule.target, rule, remedy)]) from error
        self._optimizer.step()  # torch warns where a scheduler steps before its optimizer
        self._rates = [self._rate()]

    def __call__(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0. Raises whatever the scheduler
        raises."""
        while len(self._rates) <= step:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._scheduler.step()
            self._rates.append(self._rate())
        return self._rates[step]

    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])


def _loaded(schedule: OfClass) -> Any:
    """Return the class of a scheduler. Raises ConfigError where it cannot be imported, needs a
    metric, does not take an argument or lacks one."""
    with importable(os.getcwd()), torch.device("cpu"):
        made = imported(KEY, schedule.target, SCHEDULER)
    if isinstance(made, type) and issubclass(made, ReduceLROnPlateau):
        rule = "goes by a metric, and rates must follow from the step alone"
        remedy = "use optimizer.schedule=cosine, or the class of another scheduler"
        raise ConfigError([Fault(KEY, schedule.target, rule, remedy)])
    given = {"optimizer": None, **schedule.given}
    faults = argument_faults(made, given, "optimizer.schedule", schedule.class_name)
    if "optimizer" in schedule.given:
        rule, remedy = "is what training gives it", "leave it out"
        value = str(schedule.given["optimizer"])
        faults.append(Fault("optimizer.schedule.optimizer", value, rule, remedy))
    if faults:
        raise ConfigError(faults)
    return made


def try_schedule(options: OptimizerOptions, steps: int) -> bool:
    """Return whether the rates of a run of `steps` steps depend on `options.lr`.

    Raises ConfigError where the schedule cannot be made, raises, or gives a rate that is negative
    or not finite.
    """
    assert isinstance(options.schedule, OfClass)
    rates = ScheduledRates(options)
    other = ScheduledRates(options.model_copy(update={"lr": 2 * options.lr}))
    reads = False
    for step in range(max(1, steps - options.warmup_steps)):
        try:
            rate, of_other = rates(step), other(step)
        except Exception as error:
            rule = f"raises at step {step + 1} of {steps} ({said(error)})"
            remedy = "correct its arguments, or train.steps"
            raise ConfigError([Fault(KEY, options.schedule.target, rule, remedy)]) from error
        if not (math.isfinite(rate) and rate >= 0):
            rule = f"gives the rate {rate:g} at step {step + 1} of {steps}"
            remedy = "correct its arguments"
            raise ConfigError([Fault(KEY, options.schedule.target, rule, remedy)])
        reads = reads or rate != of_other
    return reads
