"""A strategy resolved as far as its step: what that would take, before any plan is written."""

from collections.abc import Callable
from dataclasses import dataclass

from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.simulate.prediction import Simulated


@dataclass(frozen=True)
class Considered:
    """Its `step` on the devices it uses, and its plan, when asked for. `on` simulates the same step
    on other devices, one for each. `work` counts the tasks simulated for it. `cut` are the places
    where the stages of a pipeline begin and the last one ends."""

    step: Simulated
    plan: Callable[[], Plan]
    on: Callable[[Cluster], Simulated]
    work: int
    cut: tuple[int, ...] = ()
