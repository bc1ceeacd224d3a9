"""A strategy resolved as far as the prediction of its step, before any plan is written."""

from collections.abc import Callable
from dataclasses import dataclass

from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.simulate.prediction import Simulated


@dataclass(frozen=True)
class EvaluatedStrategy:
    """A strategy resolved as far as its step.

    step: the step, simulated on the devices that the strategy uses.
    plan: function that returns the plan.
    on: function that simulates the same step on other devices, one for each of the strategy's.
    work: number of simulated tasks and laid-out ranks spent.
    cut: places where the stages of a pipeline begin and the last one ends.
    """

    step: Simulated
    plan: Callable[[], Plan]
    on: Callable[[Cluster], Simulated]
    work: int
    cut: tuple[int, ...] = ()
