"""The search behind `graph: auto`: the fastest of the strategies it simulates, and of how many.

The most promising first, then best first by estimates that are to be below the step
(`used_bounds.py`): an arrangement of devices is opened when no other one has a lower estimate, a
candidate is resolved and simulated, by the resolver itself, when its estimate is below the best
step found. The search ends when none is, or when that takes too much (docs/adr/034).
"""

import gc
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from time import monotonic
from typing import Any

from whale_train.errors import Fault, PlanError
from whale_train.quantities import in_bytes, in_seconds
from whale_train.strategies.calibration import is_measured
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.considered import Considered
from whale_train.strategies.findings import Findings
from whale_train.strategies.grammar import Strategy, read_strategy
from whale_train.strategies.left_out import left_out_families
from whale_train.strategies.plan import Decision
from whale_train.strategies.promising import Promising
from whale_train.strategies.resolve import consider, refuse_precision
from whale_train.strategies.space import Batched, Candidate, Opening, Space, space_of
from whale_train.strategies.training import Training
from whale_train.strategies.used_bounds import UsedBounds
from whale_train.strategies.within_memory import ShortOfMemoryError

_SAME = 1 - 1e-9  # steps closer than this are equally long
_TRIED = 12  # strategies by kind of device that promise most,
_LOOKED_AT = 30_000  # or fewer, when so many tasks have been simulated
# Tasks simulated and stages bounded for a proof, where a search may take no time: on one device,
# and on many as often less.
_AT_ONCE = 200_000
_NEAR = 1.25  # times the shortest step is one that may be shortest with stages of other sizes


@dataclass(frozen=True)
class Found:
    """The strategy found, as it would have been `written`, and why it and no other. `bound_s` is
    the least that the rest of the space is estimated to take; its own step's time where that is
    less. `resolved` counts the candidates that were resolved."""

    strategy: Strategy
    written: Mapping[str, Any]
    considered: Considered
    decisions: tuple[Decision, ...]
    bound_s: float
    resolved: int


def search(
    asked: Strategy,
    cluster: Cluster,
    findings: Findings,
    training: Training,
    *,
    can_offload: bool = True,
    use_all: bool = False,
    clock: Callable[[], float] = monotonic,
) -> Found:
    """Return the fastest strategy simulated for `training` on devices that `asked` leaves free, of
    which some may stay idle unless it has to `use_all`. Where it has a `time_limit_s`, strategies
    are simulated until so many seconds of `clock` have passed and there is one; at 0 those that
    promise most, and where few tasks are to be simulated for that, all that are estimated to be
    faster. Raises PlanError where nothing fits."""
    asked, idle = _able(asked, cluster, training.precision, use_all)
    cluster = cluster.first(asked.devices or len(cluster.devices))
    space = replace(space_of(cluster, findings, training, can_offload), use_all=use_all)
    spaces = [space]
    if space.exported:  # a shard group leaves its node where nothing else has room
        spaces.append(replace(space, wide_splits=True))
    with _uncollected():
        for each in spaces:
            run = _Search(asked, cluster, findings, training, each, clock)
            found = run.run()
            if found is not None:
                return replace(found, decisions=(*found.decisions, *idle))
    raise PlanError([run.nothing_fits()])


def _able(
    asked: Strategy, cluster: Cluster, precision: str, use_all: bool
) -> tuple[Strategy, Sequence[Decision]]:
    """`asked` of those devices before the first that does not compute `precision`, and why others
    are idle. Raises PlanError where there are none, or it has to `use_all`."""
    faults: list[Fault] = []
    there = cluster.first(asked.devices or len(cluster.devices))
    refuse_precision(precision, there, faults)
    if not faults:
        return asked, ()
    able = next(n for n, each in enumerate(there.devices) if precision not in each.flops)
    if use_all or not able:
        raise PlanError(faults)
    reason = f"train.precision={precision} {faults[0].rule}"
    idle = Decision("strategy.devices", str(able), str(len(there.devices)), reason)
    return replace(asked, devices=able), (idle,)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for reference cycles: there are none among millions of instructions and
    tasks, and to look takes a fifth of a search."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass
class _Family:
    """What is known of candidates of one kind: the least bound of those that were not resolved,
    the best step of those that were, the least bytes that others are short of, and why yet others
    cannot be."""

    bound_s: float = inf
    best_s: float = inf
    short_bytes: float = inf
    fault: Fault | None = None


class _Search:
    def __init__(
        self,
        asked: Strategy,
        cluster: Cluster,
        findings: Findings,
        training: Training,
        space: Space,
        clock: Callable[[], float],
    ) -> None:
        self.asked, self.cluster, self.findings = asked, cluster, findings
        self.training, self.space, self.clock = training, space, clock
        self.bounds = UsedBounds(findings, cluster, training, asked.balance)
        self.promising = Promising(space, self.bounds)
        self.families: defaultdict[str, _Family] = defaultdict(_Family)
        self.wider: dict[str, str] = {}  # of each family, that which its arrangements say
        self.waiting: list[tuple[float, int, Opening | Batched | Candidate]] = []
        self.numbers = count()
        self.best: tuple[Candidate, Considered] | None = None
        self.best_s = inf
        self.tried: set[Candidate] = set()
        self.steps: list[tuple[float, Candidate]] = []
        # Pipelines whose stages, balanced, are so many bytes short of memory.
        self.short: list[tuple[float, Candidate]] = []
        self.is_moved = False
        self.simulated: set[Candidate] = set()
        self.without_room = 0  # candidates estimated to need more memory than there is
        self.work = 0  # tasks simulated, and stages bounded

    def run(self) -> Found | None:
        """The search; None where nothing fits."""
        limit = self.asked.time_limit_s
        end = self.clock() + limit if limit else inf
        most = _AT_ONCE / len(self.cluster.devices) if limit == 0 else inf
        openings = {opening: self.bounds.least_of(opening) for opening in self.space.openings()}
        for opening, bound in openings.items():
            self.push(bound, opening)
        self.try_promising(openings, end)
        while self.waiting and self.waiting[0][0] < self.best_s * _SAME:
            if self.best is not None and (self.clock() > end or self.work > most):
                break
            bound, _, item = heapq.heappop(self.waiting)
            if isinstance(item, Candidate):
                self.resolve(item)
            else:
                self.open(item, bound)
        self.move_ends(end, most)
        return self.found() if self.best is not None else None

    def push(self, bound: float, item: Opening | Batched | Candidate) -> None:
        heapq.heappush(self.waiting, (bound, next(self.numbers), item))

    def try_promising(self, openings: Mapping[Opening, float], end: float) -> None:
        """Resolve what promises most: of stages by kind of device, and of every family of copies
        that follow each other."""
        tried = 0
        for candidate in self.promising.of_kinds(openings):
            if self.clock() > end or tried == _TRIED or self.work > _LOOKED_AT:
                break
            if self.bounds.least(candidate) < self.best_s * _SAME:
                self.resolve(candidate)
                tried += 1
        for listed in self.promising.of_each_family(openings, self.best_s):
            for least, candidate in listed:
                family = self.family_of(candidate)
                if family.best_s < inf or least >= self.best_s * _SAME:
                    break
                self.resolve(candidate)

    def family_of(self, candidate: Candidate) -> _Family:
        """Of which more is known than of all with such an arrangement."""
        self.wider[candidate.family] = candidate.arrangement.family
        return self.families[candidate.family]

    def open(self, item: Opening | Batched, bound: float) -> None:
        """What there is in it to choose from."""
        if isinstance(item, Opening) and not item.ordered:
            for order in self.space.orders(item):
                self.push(max(bound, self.bounds.least_of(order)), order)
            return
        if isinstance(item, Opening):
            for each in self.space.batched(item):
                self.push(max(bound, self.bounds.least_of_batched(each)), each)
            return
        for candidate in self.space.candidates(item):
            self.work += item.arrangement.stages
            short = self.bounds.shortfall_bytes(candidate)
            if short > 0:
                family = self.family_of(candidate)
                family.short_bytes = min(family.short_bytes, short)
                self.without_room += 1
            elif candidate not in self.tried:
                self.push(max(bound, self.bounds.least(candidate)), candidate)

    def resolve(self, candidate: Candidate) -> None:
        self.tried.add(candidate)
        family = self.family_of(candidate)
        try:
            found = consider(self.read(candidate), self.cluster, self.findings, self.training)
        except PlanError as error:
            family.fault = family.fault or error.faults[0]
            if isinstance(error, ShortOfMemoryError) and candidate.arrangement.stages > 1:
                self.short.append((error.short_bytes, candidate))
            return
        seconds = found.step.spans.seconds
        self.steps.append((seconds, candidate))
        self.simulated.add(candidate)
        self.work += found.work
        family.best_s = min(family.best_s, seconds)
        faster = seconds < self.best_s * _SAME
        if faster or (self.best and seconds * _SAME <= self.best_s and candidate < self.best[0]):
            self.best, self.best_s = (candidate, found), seconds  # of equals the simplest

    def move_ends(self, end: float, most: float) -> None:
        """Of the fastest pipelines, at least one, and of those that might be faster if their
        stages had room, until stages end where simulation says: bounds are of balanced ones. Where
        nothing fits, of those that are short of the least."""
        listed, at_least = sorted(self.short), _TRIED
        if self.best is not None:
            near = sorted(
                (seconds, candidate)
                for seconds, candidate in self.steps
                if candidate.arrangement.stages > 1 and seconds <= _NEAR * self.best_s
            )
            short = ((self.bounds.least(candidate), candidate) for _, candidate in listed)
            rest = sorted((*near[1:], *(each for each in short if each[0] < self.best_s * _SAME)))
            listed, at_least = [*near[:1], *rest], 1
        for number, (_, candidate) in enumerate(listed):
            if number >= at_least and (self.clock() > end or self.work > most):
                break
            self.move_ends_of(candidate)

    def move_ends_of(self, candidate: Candidate) -> None:
        strategy = self.read(candidate)
        try:
            found = consider(strategy, self.cluster, self.findings, self.training, moving=True)
        except PlanError as error:
            self.work += error.work if isinstance(error, ShortOfMemoryError) else 0
            return
        seconds, family = found.step.spans.seconds, self.family_of(candidate)
        self.simulated.add(candidate)
        self.work += found.work
        family.best_s = min(family.best_s, seconds)
        if seconds < self.best_s * _SAME:
            self.best, self.best_s = (candidate, found), seconds
            self.is_moved = True

    def read(self, candidate: Candidate) -> Strategy:
        faults: list[Fault] = []
        strategy = read_strategy(self.written(candidate), self.asked.name, faults)
        assert strategy is not None, faults
        return strategy

    def written(self, candidate: Candidate) -> dict[str, Any]:
        balance = {} if self.asked.balance == "hardware" else {"balance": self.asked.balance}
        used = candidate.arrangement.devices
        devices = {"devices": used} if self.asked.devices or used < self.space.available else {}
        return {**devices, **balance, "graph": candidate.graph()}

    # --- What came of it ---

    def found(self) -> Found:
        assert self.best is not None
        chosen, considered = self.best
        left = self.waiting[0][0] if self.waiting else inf
        bound = left if left < self.best_s * _SAME else self.best_s
        unopened: defaultdict[str, float] = defaultdict(lambda: inf)
        for least, _, item in self.waiting:
            self.families[item.family].bound_s = min(self.families[item.family].bound_s, least)
            if not isinstance(item, Candidate):
                unopened[item.family] = min(unopened[item.family], least)
        for name, wider in self.wider.items():
            self.families[name].bound_s = min(self.families[name].bound_s, unopened[wider])
        return Found(
            self.read(chosen),
            self.written(chosen),
            considered,
            tuple(self.decisions(chosen, bound)),
            bound,
            len(self.tried),
        )

    def decisions(self, chosen: Candidate, bound: float) -> Iterator[Decision]:
        """Why this one, and of every other family why not."""
        reason = f"{in_seconds(self.best_s)} a step, the fastest of {self.counted()}"
        if self.is_moved:
            reason += "; then the ends of its stages were moved"
        if bound < self.best_s * _SAME and not self.asked.time_limit_s:
            reason += "; strategy.time_limit_s=60 looks further"
        if chosen.arrangement.devices < self.space.available:
            reason += "; on all devices, and on fewer: the inventory's first"
        yield Decision("strategy.graph", chosen.described, "", reason)
        yield from self.not_measured(chosen.arrangement.devices)
        listed = sorted(self.families.items(), key=lambda each: (each[1].best_s, each[1].bound_s))
        for name, family in listed:
            if name != chosen.family:
                yield Decision("strategy.graph", chosen.family, name, self.why_not(family))
        for name, reason in self.left_out.items():
            yield Decision("strategy.graph", chosen.family, name, reason)

    @property
    def left_out(self) -> Mapping[str, str]:
        return left_out_families(self.space, self.findings, self.training)

    def counted(self) -> str:
        """How many strategies were simulated, and how many were not."""
        number = len(self.simulated)
        said = f"{number} {'strategy' if number == 1 else 'strategies'} simulated"
        if self.asked.time_limit_s:
            said += f" in {self.asked.time_limit_s:g} s"
        alone = self.without_room + sum(isinstance(item, Candidate) for *_, item in self.waiting)
        unopened = len(self.waiting) + self.without_room - alone
        kinds = ((alone, "more", "more"), (unopened, "arrangement", "arrangements"))
        listed = [f"{n} {one if n == 1 else many}" for n, one, many in kinds if n]
        if unopened:
            listed[-1] += " of devices"
        return f"{said}; {' and '.join(listed)} only estimated" if listed else said

    def not_measured(self, chosen: int) -> Iterator[Decision]:
        """Of fewer processes with more threads each, why they were not looked at."""
        left_out = self.space.left_out
        if left_out:
            # With all of them, one alone is measured as well.
            all_are = is_measured(self.cluster, self.training.precision)
            missing = left_out[-1] if all_are else self.space.available
            listed = ", ".join(map(str, left_out))
            reason = "times of processes with other threads, as so few would have, are "
            reason += "not measured where those of all are, or the other way round: "
            reason += f"whale-train mode=calibrate hardware=cpu hardware.devices={missing}"
            yield Decision("strategy.devices", str(chosen), listed, reason)

    def why_not(self, family: _Family) -> str:
        said = []
        if family.best_s < inf:
            slower = f"{100 * (family.best_s / self.best_s - 1):.0f}% slower"
            said.append(f"{in_seconds(family.best_s)} a step, the fastest simulated, {slower}")
        if family.bound_s < family.best_s:
            which = "others" if said else "none simulated,"
            said.append(f"{which} estimated at {in_seconds(family.bound_s)} or more")
        if said:
            return "; ".join(said)
        if family.fault is not None:
            return str(family.fault)
        return f"{in_bytes(family.short_bytes)} more than there is memory for, at least"

    def nothing_fits(self) -> Fault:
        """Why there is no strategy: by how much memory falls short, or what is said against the
        last ones left."""
        key, value = "strategy", self.asked.name
        said = next((f.fault for f in self.families.values() if f.fault is not None), None)
        short = min((family.short_bytes for family in self.families.values()), default=inf)
        if said is None and short < inf:
            name = min(self.families, key=lambda name: self.families[name].short_bytes)
            rule = f"finds no strategy whose weights, gradients and optimizer fit: {name} comes "
            rule += f"nearest, {in_bytes(short)} more than hardware={self.cluster.name} has memory "
            rule += "for in a copy"
            remedy = "use more devices, a smaller model, bf16, or an optimizer with less state"
            if self.training.accumulate > 1 and "pipeline" in self.left_out:
                remedy = "use train.accumulate=1, with which models are cut as well"
            return Fault(key, value, rule, remedy)
        if said is None:
            rule = f"finds no strategy for {self.training.global_batch} samples a step"
            return Fault(key, value, rule, "use a larger train.global_batch, or fewer devices")
        rule = f"finds no strategy that can be; the most promising: {said.key}"
        rule += f"{'=' if said.value else ''}{said.value} {said.rule}"
        return Fault(key, value, rule, said.remedy)
