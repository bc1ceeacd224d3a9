"""Explain the outcome of a search: the choice, the other families, or why nothing fits.

Owns the sentences. No sentence claims more than was simulated or estimated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from whale_train.errors import Fault
from whale_train.quantities import in_bytes, in_seconds
from whale_train.strategies.estimate.candidates import Candidate
from whale_train.strategies.grammar.nodes import Strategy
from whale_train.strategies.hardware.calibration import is_measured
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.plan.training import Training
from whale_train.strategies.search.space import Space, left_out
from whale_train.strategies.stages.analysis import ModelAnalysis


@dataclass
class Family:
    """Summary of the candidates of one family, filled while a search runs.

    estimate_s: smallest estimated seconds of a step (infinite: none is estimated).
    best_s: seconds of the shortest simulated step (infinite: none is simulated).
    simulated: number of simulated steps that had an estimate.
    error: smallest ratio of a simulated step to its estimate.
    short_bytes: smallest memory shortfall of a candidate, in bytes (infinite: none has one).
    fault: reason why a candidate was refused, if one was.
    """

    estimate_s: float = inf
    best_s: float = inf
    simulated: int = 0
    error: float = 1.0
    short_bytes: float = inf
    fault: Fault | None = None

    @property
    def is_known(self) -> bool:
        """Return True if a candidate was estimated, simulated, short of memory or refused."""
        smallest = min(self.estimate_s, self.best_s, self.short_bytes)
        return smallest < inf or self.fault is not None

    def note(self, seconds: float, estimated_s: float) -> None:
        """Record a simulated step of `seconds`, whose estimate was `estimated_s` seconds.

        An infinite `estimated_s` stands for no estimate: `error` and `simulated` then stay the
        same.
        """
        self.best_s = min(self.best_s, seconds)
        if estimated_s < inf:
            error = seconds / estimated_s
            self.error = error if not self.simulated else min(self.error, error)
            self.simulated += 1


def decisions(
    chosen: Candidate,
    seconds: float,
    families: Mapping[str, Family],
    space: Space,
    asked: Strategy,
    training: Training,
    findings: ModelAnalysis,
    *,
    counts: tuple[int, int, int],
    floor_s: float,
) -> Iterator[Decision]:
    """Yield the decisions that explain a search: one for `chosen`, one against every other family.

    A family without candidates is explained by the reason why `space` leaves it out. One more
    decision names the numbers of processes that could not be compared.

    chosen: the chosen candidate, whose step takes `seconds`.
    families: summary of every family that had candidates, by name.
    counts: numbers of candidates simulated and estimated, and of simulated changes of the fastest.
    floor_s: seconds of a step if the devices computed at full speed.
    """
    simulated, estimated, changed = counts
    within = f" in {asked.time_limit_s:g} s" if asked.time_limit_s else ""
    reason = f"{in_seconds(seconds)} a step, the fastest of {simulated:,} "
    reason += f"{'strategy' if simulated == 1 else 'strategies'} simulated{within}, "
    reason += f"of {estimated:,} estimated"
    reason += f", and of {changed:,} changes of the fastest" if changed else ""
    reason += "; at their full speed the devices would compute for "
    reason += in_seconds(floor_s)
    if asked.time_limit_s == 0:
        reason += "; strategy.time_limit_s=60 simulates more"
    if chosen.mesh.count < space.available:
        reason += f"; {space.available - chosen.mesh.count} of {space.available} devices stay idle"
    yield Decision("strategy.graph", chosen.described, "", reason)
    yield from _not_measured(space, training, chosen.mesh.count)
    fastest_first = sorted(families.items(), key=lambda pair: (pair[1].best_s, pair[1].estimate_s))
    for name, family in fastest_first:
        if name != chosen.family and family.is_known:
            is_simulated = family.best_s < inf
            is_estimated = not is_simulated and family.fault is None and family.estimate_s < inf
            yield Decision(
                *("strategy.graph", chosen.family, name, _why_not(family, seconds)),
                rejected_step_s=family.best_s if is_simulated else None,
                rejected_floor_s=family.estimate_s if is_estimated else None,
            )
    for name, why in left_out(space, findings, training).items():
        if name != chosen.family and not families.get(name, Family()).is_known:
            yield Decision("strategy.graph", chosen.family, name, why)


def _not_measured(space: Space, training: Training, chosen: int) -> Iterator[Decision]:
    """Yield the decision that says why fewer processes, with more threads each, were not tried.
    `chosen` is the number of devices that the chosen strategy uses."""
    numbers = space.not_comparable()
    if numbers:
        # Calibrating all processes also measures a single one.
        missing = numbers[-1] if is_measured(space.cluster, training.precision) else space.available
        reason = "times of processes with other threads, as so few would have, are "
        reason += "not measured where those of all are, or the other way round: "
        reason += f"whale-train mode=calibrate hardware=cpu hardware.devices={missing}"
        yield Decision("strategy.devices", str(chosen), ", ".join(map(str, numbers)), reason)


def _why_not(family: Family, best_s: float) -> str:
    """Return the reason against a family. `best_s` is the step of the chosen strategy, in
    seconds."""
    if family.best_s < inf:
        slower = f"{100 * (family.best_s / best_s - 1):.0f}% slower"
        return f"{in_seconds(family.best_s)} a step, the fastest simulated, {slower}"
    if family.fault is not None:
        return str(family.fault)
    if family.estimate_s < inf:
        return f"none simulated, estimated at {in_seconds(family.estimate_s)} or more"
    return f"{in_bytes(family.short_bytes)} more than there is memory for, by estimate"


def nothing_fits(
    families: Mapping[str, Family], space: Space, asked: Strategy, training: Training
) -> Fault:
    """Return the fault of a search that finds no strategy.

    The fault says how many bytes of memory the nearest family is short of. If no family is short,
    it repeats the fault of a candidate that was resolved. If none was resolved, it blames the size
    of the global batch.
    """
    key, value = "strategy", asked.name
    fault = next((f.fault for f in families.values() if f.fault is not None), None)
    short = min((family.short_bytes for family in families.values()), default=inf)
    if short < inf:
        name = min(families, key=lambda name: families[name].short_bytes)
        rule = f"finds no strategy whose weights, gradients and optimizer fit: {name} comes "
        rule += f"nearest, {in_bytes(short)} more than hardware={space.cluster.name} has memory "
        rule += "for in a copy"
        remedy = "use more devices, a smaller model, bf16, or an optimizer with less state"
        if training.accumulate > 1:
            remedy = "use train.accumulate=1, with which models are cut as well"
        return Fault(key, value, rule, remedy)
    if fault is None:
        rule = f"finds no strategy for {training.global_batch} samples a step"
        return Fault(key, value, rule, "use a larger train.global_batch, or fewer devices")
    rule = f"finds no strategy that can be; the most promising: {fault.key}"
    rule += f"{'=' if fault.value else ''}{fault.value} {fault.rule}"
    return Fault(key, value, rule, fault.remedy)
