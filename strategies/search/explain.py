"""What a search says of itself: how many were simulated of how many, and why nothing else.

Owns the sentences; none says more than was simulated or estimated.
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
from whale_train.strategies.stages.analysis import Findings


@dataclass
class Family:
    """What is known of candidates of one family: the least estimate, the shortest step simulated,
    how many were `simulated` and by what factor a step was off its estimate at the least
    (`error`); the least bytes that others are short of, and why yet others cannot be."""

    estimate_s: float = inf
    best_s: float = inf
    simulated: int = 0
    error: float = 1.0
    short_bytes: float = inf
    fault: Fault | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything is known."""
        least = min(self.estimate_s, self.best_s, self.short_bytes)
        return least < inf or self.fault is not None

    def note(self, seconds: float, estimated_s: float) -> None:
        """Take note of a step that was simulated, and of what it had been estimated to take."""
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
    findings: Findings,
    *,
    counts: tuple[int, int],
    floor_s: float,
) -> Iterator[Decision]:
    """Yield why `chosen`, whose step takes so many seconds, and of every other family why not.
    `counts` are the candidates simulated, and estimated."""
    simulated, estimated = counts
    within = f" in {asked.time_limit_s:g} s" if asked.time_limit_s else ""
    reason = f"{in_seconds(seconds)} a step, the fastest of {simulated:,} "
    reason += f"{'strategy' if simulated == 1 else 'strategies'} simulated{within}, "
    reason += f"of {estimated:,} estimated; at their full speed the devices would compute for "
    reason += in_seconds(floor_s)
    if asked.time_limit_s == 0:
        reason += "; strategy.time_limit_s=60 simulates more"
    if chosen.mesh.count < space.available:
        reason += f"; {space.available - chosen.mesh.count} of {space.available} devices stay idle"
    yield Decision("strategy.graph", chosen.described, "", reason)
    yield from _not_measured(space, training, chosen.mesh.count)
    listed = sorted(families.items(), key=lambda each: (each[1].best_s, each[1].estimate_s))
    for name, family in listed:
        if name != chosen.family and family.is_known:
            yield Decision("strategy.graph", chosen.family, name, _why_not(family, seconds))
    for name, why in left_out(space, findings, training).items():
        if name != chosen.family and not families.get(name, Family()).is_known:
            yield Decision("strategy.graph", chosen.family, name, why)


def _not_measured(space: Space, training: Training, chosen: int) -> Iterator[Decision]:
    """Yield why fewer processes with more threads each were not looked at."""
    numbers = space.not_comparable()
    if numbers:
        # With all of them, one alone is measured as well.
        missing = numbers[-1] if is_measured(space.cluster, training.precision) else space.available
        reason = "times of processes with other threads, as so few would have, are "
        reason += "not measured where those of all are, or the other way round: "
        reason += f"whale-train mode=calibrate hardware=cpu hardware.devices={missing}"
        yield Decision("strategy.devices", str(chosen), ", ".join(map(str, numbers)), reason)


def _why_not(family: Family, best_s: float) -> str:
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
    """Return why there is no strategy: by how much memory falls short, or what is said against
    those that were resolved."""
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
