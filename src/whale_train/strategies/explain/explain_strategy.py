"""Explain a strategy: whether it has a plan, what would make one of it, what would make it fastest.

Every line is a plan that was resolved and simulated; nothing is estimated.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, cast

from whale_train.errors import Fault, PlanError
from whale_train.strategies.explain.reliefs import (
    Kind,
    Relief,
    Setting,
    reliefs,
    strategy_reliefs,
    training_reliefs,
    with_batch,
    with_memory,
    with_network,
)
from whale_train.strategies.grammar.nodes import read_strategy
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider
from whale_train.strategies.search.search import search
from whale_train.strategies.simulate.prediction import Simulated
from whale_train.strategies.stage_memory.within_memory import ShortOfMemoryError
from whale_train.strategies.stages.analysis import ModelAnalysis

Quantity = Literal["samples", "memory", "network"]
_MOST_CHANGES = 5  # changes that are tried together where no single one makes a plan
_MOST_TIMES = 64  # largest factor of a device's memory, of a network or of a batch that is tried
_CLOSE = 1.005  # steps at most this many times the fastest are as fast
_MOST_MOVED = 64  # devices up to which the ends of stages are moved for every change
_MEMORY_STEPS = 6  # halvings of the interval in which the least memory lies


@dataclass(frozen=True)
class TriedPlan:
    """A setting, and the plan of it.

    change: what differs from what was asked, in words; '' for what was asked.
    kind: what the change is of: `strategy`, `training` or `hardware`; '' for what was asked.
    written: the content of the strategy file.
    overrides: the overrides that make the change beside the strategy's content.
    training: batch, precision and optimizer of the setting.
    step_s: seconds of a step; None where there is no plan.
    needed_bytes: bytes that the fullest device needs; None where there is no plan.
    room_bytes: bytes of that device that tensors may take; None where there is no plan.
    faults: why there is no plan; empty where there is one.
    short_bytes: bytes that a device is short of; 0 where there is a plan, infinite where memory is
        not what is short.
    plan: the plan; None where there is none.
    step: its simulated step; None where there is none.
    """

    change: str
    kind: str
    written: Mapping[str, Any]
    overrides: tuple[str, ...]
    training: Training
    step_s: float | None = None
    needed_bytes: float | None = None
    room_bytes: float | None = None
    faults: tuple[str, ...] = ()
    short_bytes: float = inf
    plan: Plan | None = None
    step: Simulated | None = None

    @property
    def samples(self) -> int:
        """Return the samples of a step."""
        return self.training.global_batch

    @property
    def is_legal(self) -> bool:
        """Return whether there is a plan."""
        return self.step_s is not None

    def to_plain(self) -> dict[str, Any]:
        """Return the trial as explanation.json has it."""
        names = ("change", "kind", "written", "overrides", "samples", "step_s")
        return {x: getattr(self, x) for x in (*names, "needed_bytes", "room_bytes", "faults")}


@dataclass(frozen=True)
class Condition:
    """What would have to be true for the strategy to be the fastest.

    quantity: what was changed: `samples` of a step, `memory` of every device, or the bandwidth of
        the `network` between nodes.
    times: the least factor of it, of powers of two, at which the strategy is the fastest; None
        where it is at none that was tried.
    amount: the quantity at that factor, or at the last that was tried, with which the strategy has
        a plan: samples, bytes of the smallest device, or bytes/s.
    """

    quantity: Quantity
    times: float | None
    amount: float


@dataclass(frozen=True)
class Explanation:
    """Why a strategy is not used here, and what would change that.

    asked: the strategy as it was asked for.
    fastest: the fastest strategy simulated; None where no strategy fits.
    trials: what every change would give, the plans first, by their samples a second.
    nearest: the plan that differs least from what was asked: itself where it has one; None where no
        change that was tried makes one.
    least_memory: the least factor of the devices' memory at which the strategy has a plan, within
        two percent; None where it has one, or memory does not help.
    conditions: what would make the strategy the fastest; empty where it is, or has no plan.
    """

    asked: TriedPlan
    fastest: TriedPlan | None
    trials: tuple[TriedPlan, ...]
    nearest: TriedPlan | None
    least_memory: float | None
    conditions: tuple[Condition, ...]

    @property
    def is_fastest(self) -> bool:
        """Return whether no strategy simulated is faster than what was asked."""
        return _wins(self.asked, self.fastest)

    def to_plain(self) -> dict[str, Any]:
        """Return the content of explanation.json."""
        return {
            "asked": self.asked.to_plain(),
            "is_fastest": self.is_fastest,
            "fastest": self.fastest and self.fastest.to_plain(),
            "nearest": self.nearest and self.nearest.to_plain(),
            "least_memory": self.least_memory,
            "trials": [trial.to_plain() for trial in self.trials],
            "conditions": [vars(condition) for condition in self.conditions],
        }


def explain_strategy(
    setting: Setting,
    name: str,
    profile: ModelProfile,
    *,
    can_offload: bool = True,
    progress: Callable[[str], None] = lambda said: None,
) -> Explanation:
    """Return the conditions under which a strategy has a plan, and those that make it the fastest.

    setting: the content of its file, the devices and the training.
    name: name of the strategy, for messages.
    can_offload: whether copies may keep state on the host.
    progress: called with what is tried next.
    """
    return _Explainer(name, profile, can_offload, progress).explain(setting)


class _Explainer:
    """Resolves one model's settings. An analysis of the model is kept for each precision."""

    def __init__(
        self, name: str, profile: ModelProfile, can_offload: bool, progress: Callable[[str], None]
    ) -> None:
        self._name, self._profile = name, profile
        self._can_offload, self._progress = can_offload, progress
        self._findings: dict[str, ModelAnalysis] = {}

    def explain(self, setting: Setting) -> Explanation:
        self._progress("as asked")
        asked = replace(self._trial(Relief("strategy", "", setting), moving=True), kind="")
        self._progress("the fastest strategy")
        fastest = self._fastest(setting)
        moving = len(setting.cluster.devices) <= _MOST_MOVED
        trials = [self._trial(relief, moving=moving) for relief in reliefs(setting)]
        own = [trial for trial in trials if trial.kind != "hardware"]
        if not asked.is_legal and not any(trial.is_legal for trial in own):
            trials += self._combined(setting, own)
        trials.sort(key=lambda trial: _rank(trial, asked.samples))
        nearest = asked if asked.is_legal else _nearest(trials)
        if nearest is not None and nearest is not asked:  # as its command plans it
            place, nearest = trials.index(nearest), self._moved(nearest, setting)
            trials[place] = nearest
        memory_times = None if asked.is_legal else self._least_memory(setting)
        conditions: tuple[Condition, ...] = ()
        if asked.is_legal and not _wins(asked, fastest):
            conditions = tuple(self._conditions(setting))
        return Explanation(asked, fastest, tuple(trials), nearest, memory_times, conditions)

    def _analysis(self, precision: str) -> ModelAnalysis:
        if precision not in self._findings:
            self._findings[precision] = ModelAnalysis(self._profile, precision)
        return self._findings[precision]

    def _trial(self, relief: Relief, *, moving: bool = False) -> TriedPlan:
        """Return the plan of a setting, or why there is none.

        moving: whether the ends of stages are moved to where the step is shortest.
        """
        if relief.change:
            self._progress(relief.change)
        setting, faults = relief.setting, list[Fault]()
        cluster, training = setting.cluster, setting.training
        told = (relief.change, relief.kind, setting.written, relief.overrides, training)
        strategy = read_strategy(setting.written, self._name, faults)
        if strategy is None or faults:
            return TriedPlan(*told, faults=tuple(map(str, faults)))
        try:
            findings = self._analysis(training.precision)
            considered = consider(strategy, cluster, findings, training, moving=moving)
            plan = considered.plan()
        except PlanError as error:
            short = error.short_bytes if isinstance(error, ShortOfMemoryError) else inf
            return TriedPlan(*told, faults=tuple(map(str, error.faults)), short_bytes=short)
        devices = cluster.chosen(strategy.devices).devices
        sizes = [(rank.memory_bytes.total, devices[rank.rank].room_bytes) for rank in plan.ranks]
        needed, room = max(sizes, key=lambda pair: pair[0] / pair[1])
        return TriedPlan(
            *told,
            step_s=plan.predicted.step_time_s,
            needed_bytes=needed,
            room_bytes=room,
            short_bytes=0.0,
            plan=plan,
            step=considered.step,
        )

    def _moved(self, trial: TriedPlan, setting: Setting) -> TriedPlan:
        """Return a trial on the devices of `setting` with the ends of its stages moved to where its
        step is the shortest."""
        changed = replace(setting, written=trial.written, training=trial.training)
        kind = cast(Kind, trial.kind)
        return self._trial(Relief(kind, trial.change, changed, trial.overrides), moving=True)

    def _fastest(self, setting: Setting) -> TriedPlan | None:
        """Return the fastest strategy that the planner simulates, or None where nothing fits."""
        training = setting.training
        asked = read_strategy({"graph": "auto"}, "auto", [])
        assert asked is not None
        findings = self._analysis(training.precision)
        try:
            result = search(
                asked, setting.cluster, findings, training, can_offload=self._can_offload
            )
        except PlanError:
            return None
        fastest = replace(setting, written=result.written)
        return self._trial(Relief("strategy", "the fastest", fastest), moving=True)

    def _combined(self, setting: Setting, first: Sequence[TriedPlan]) -> list[TriedPlan]:
        """Return the plans of several changes together, one after the other.

        Every round adds the change that leaves a device short of the fewest bytes, until changes
        make plans, or none helps.

        first: what single changes gave.
        """
        best = min(first, key=lambda trial: trial.short_bytes, default=None)
        for _ in range(_MOST_CHANGES - 1):
            if best is None or best.short_bytes == inf:
                return []
            base = best
            changed = replace(setting, written=base.written, training=base.training)
            tried = []
            for relief in (*strategy_reliefs(changed), *training_reliefs(changed)):
                change = _joined(base.change, relief.change)
                overrides = (*base.overrides, *relief.overrides)
                tried.append(self._trial(replace(relief, change=change, overrides=overrides)))
            plans = [trial for trial in tried if trial.is_legal]
            if plans:
                return plans
            best = min(tried, key=lambda trial: trial.short_bytes, default=None)
            if best is not None and best.short_bytes >= base.short_bytes:
                return []
        return []

    def _least_memory(self, setting: Setting) -> float | None:
        """Return the least factor of the devices' memory with which the strategy has a plan."""

        def is_legal(times: float) -> bool:
            changed = with_memory(setting, times)
            change = f"{times:.3g} times the memory"
            return self._trial(Relief("hardware", change, changed)).is_legal

        if not is_legal(_MOST_TIMES):
            return None
        low, high = 1.0, 2.0
        while not is_legal(high):
            low, high = high, 2 * high
        for _ in range(_MEMORY_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if is_legal(middle) else (middle, high)
        return high

    def _conditions(self, setting: Setting) -> list[Condition]:
        """Return the conditions that make a strategy with a plan the fastest, of each quantity
        alone."""
        cluster = setting.cluster
        memory = min(device.memory_bytes for device in cluster.devices)
        batch = setting.training.global_batch
        changes: list[tuple[Quantity, Callable[[float], Setting], float, Sequence[float]]] = [
            ("samples", lambda x: with_batch(setting, x), batch, _UP),
            ("memory", lambda x: with_memory(setting, x), memory, _DOWN),
        ]
        if len(cluster.nodes) > 1:
            network = cluster.network.bandwidth_bytes_s
            changes.append(("network", lambda x: with_network(setting, x), network, _UP))
        conditions = []
        for quantity, changed, amount, factors in changes:
            times, last = self._least_factor(quantity, changed, factors)
            conditions.append(Condition(quantity, times, amount * (times or last)))
        return conditions

    def _least_factor(
        self, quantity: Quantity, changed: Callable[[float], Setting], factors: Sequence[float]
    ) -> tuple[float | None, float]:
        """Return the first of `factors` at which the strategy is the fastest, or None, and the last
        factor at which the strategy has a plan, or the first factor where it has none.

        The first factor is bisected: the strategy is taken to stay the fastest once it is, for as
        long as it has a plan.
        """

        def is_fastest(times: float) -> bool | None:
            self._progress(f"{times:g} times the {quantity}")
            setting = changed(times)
            trial = self._trial(Relief("hardware", "", setting), moving=True)
            return _wins(trial, self._fastest(setting)) if trial.is_legal else None

        low, high = 0, len(factors) - 1
        while (is_last_fastest := is_fastest(factors[high])) is None and high > 0:
            high -= 1
        if not is_last_fastest:
            return None, factors[high]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_fastest(factors[middle]) else (middle + 1, high)
        return factors[high], factors[high]


_UP = tuple(2.0**x for x in range(1, 7))
_DOWN = tuple(0.5**x for x in range(1, 7))


def _joined(earlier: str, change: str) -> str:
    """Return changes in words, without those that a later one of the same kind replaces."""
    kind = re.sub(r"\d+", "#", change)
    stays = [x for x in earlier.split("; ") if re.sub(r"\d+", "#", x) != kind]
    return "; ".join([*stays, change])


def _wins(trial: TriedPlan, fastest: TriedPlan | None) -> bool:
    """Return whether a trial with a plan is as fast as the fastest strategy."""
    if trial.step_s is None:
        return False
    return fastest is None or fastest.step_s is None or trial.step_s <= fastest.step_s * _CLOSE


def _rank(trial: TriedPlan, samples: int) -> tuple[bool, bool, float]:
    """Return the sort key of a trial.

    Plans come first, those with `samples` a step before those with others, the fastest before
    slower ones.
    """
    is_other = trial.samples != samples
    if trial.step_s is None:
        return True, is_other, 0.0
    return False, is_other, -trial.samples / trial.step_s


def _nearest(trials: Sequence[TriedPlan]) -> TriedPlan | None:
    """Return the plan that differs least from what was asked: by a change of the strategy, or else
    of the training; the fastest of them. Trials are sorted."""
    for kind in ("strategy", "training"):
        for trial in trials:
            if trial.is_legal and trial.kind == kind:
                return trial
    return None
