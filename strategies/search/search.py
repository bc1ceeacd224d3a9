"""The search behind `graph: auto`: many candidates estimated, the best of them simulated.

Every candidate of the space is estimated by formulas (`shortlist.py`); those that come first are
resolved and simulated by the resolver itself, family by family, until a number of tasks have been
simulated; the boundaries of the fastest pipelines' stages are moved; the fastest is the answer
(docs/adr/035). What is counted is work and not time: the answer is the same on every machine.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from time import monotonic
from typing import Any

from whale_train.errors import Fault, PlanError
from whale_train.strategies.estimate.block_costs import BlockCosts
from whale_train.strategies.estimate.candidate_costs import CandidateCosts
from whale_train.strategies.estimate.candidates import Candidate, Estimate
from whale_train.strategies.estimate.estimate import Estimator
from whale_train.strategies.grammar.nodes import Strategy, read_strategy
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.evaluated import Considered
from whale_train.strategies.resolver.resolve import consider, refuse_precision
from whale_train.strategies.search.explain import Family, decisions, nothing_fits
from whale_train.strategies.search.floor import floor_s
from whale_train.strategies.search.shipped import shipped
from whale_train.strategies.search.shortlist import Promise, shortlist
from whale_train.strategies.search.space import Devices, Space, space_of
from whale_train.strategies.search.written import with_cut, written
from whale_train.strategies.stage_memory.within_memory import ShortOfMemoryError
from whale_train.strategies.stages.analysis import Findings

MOST_KINDS = 32  # of devices that are searched
_SAME = 1 - 1e-9  # steps closer than this are equally long
_REFUSED = 4_000  # tasks that a strategy which cannot be counts for
_REFUSALS = 2  # of its like, after which no more of them are resolved
_BUDGET = 100_000  # tasks simulated, and ranks laid out, where a search has no time limit
_SHIPPED_BUDGET = 500_000  # after which no shipped strategies are simulated either
_FEW = 128  # promising candidates that are all simulated, near or not
_FAR = 1.3  # times the fastest: estimates err by less, so that what is further is not simulated
_NEAR = 1.1  # times the fastest: what is estimated further, once a family's error is known
_MOVED = 3  # pipelines whose boundaries are moved at the most,
_MOVABLE = 1.05  # of those that take up to so many times the fastest
_SHORT = 6  # pipelines whose boundaries are moved for memory, where nothing fits,
_LITTLE = 0.2  # of those that are short of so much of a device's memory at the most


@dataclass(frozen=True)
class Found:
    """The strategy found, as it would have been `written`, and why it and no other. `floor_s` is
    what the devices' own speed allows; `resolved` counts the candidates that were simulated, of
    those `estimated`."""

    strategy: Strategy
    written: Mapping[str, Any]
    considered: Considered
    decisions: tuple[Decision, ...]
    floor_s: float
    resolved: int
    estimated: int


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
    are simulated until so many seconds of `clock` have passed. Raises PlanError where nothing
    fits."""
    devices, idle = _able(asked, cluster, training.precision, use_all)
    space = space_of(cluster, devices, findings, training, can_offload, use_all)
    spaces = [space]
    if space.exported:  # a shard group leaves its node where nothing else has room
        spaces.append(replace(space, wide_splits=True))
    with _uncollected():
        for each in spaces:
            run = _Search(asked, findings, training, each, clock)
            found = run.run()
            if found is not None:
                return replace(found, decisions=(*found.decisions, *idle))
    raise PlanError([nothing_fits(run.families, space, asked, training)])


def _able(
    asked: Strategy, cluster: Cluster, precision: str, use_all: bool
) -> tuple[Devices, Sequence[Decision]]:
    """Return the devices that may be used, of each kind that computes `precision`, and why others
    are idle. Raises PlanError where there are none, or all have to be used."""
    faults: list[Fault] = []
    there = cluster.chosen(asked.devices)
    refuse_precision(precision, there, faults)
    able = {
        device.name: there.kinds[device.name]
        for device in there.devices
        if precision in device.flops
    }
    if faults and (use_all or not able):
        raise PlanError(faults)
    if len(able) > MOST_KINDS:
        rule = f"searches devices of at most {MOST_KINDS} kinds, and these are of {len(able)}"
        remedy = "name devices, as strategy.devices={KIND: COUNT}, or give a graph"
        raise PlanError([Fault("strategy.graph", "auto", rule, remedy)])
    idle = []
    if faults:
        reason = f"train.precision={precision} {faults[0].rule}"
        count = len(there.devices)
        idle.append(Decision("strategy.devices", str(sum(able.values())), str(count), reason))
    return tuple(sorted(able.items())), idle


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the look for reference cycles: there are none among millions of instructions and
    tasks, and to look takes a fifth of a search."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_Likes = tuple[str, Devices, int, bool, int, bool]  # candidates whose estimates err alike


def _likes(candidate: Candidate) -> _Likes:
    """Return what candidates have in common whose estimates err alike: the family, the devices, the
    number of copies, whether stages have some, over how many experts are spread, whether stages
    are interleaved."""
    mesh, interleaved = candidate.mesh, candidate.schedule == "interleaved_1f1b"
    copied = mesh.widest > 1
    return candidate.family, mesh.devices, mesh.copies, copied, candidate.experts, interleaved


class _Search:
    """One run over one space."""

    def __init__(
        self,
        asked: Strategy,
        findings: Findings,
        training: Training,
        space: Space,
        clock: Callable[[], float],
    ) -> None:
        self.asked, self.findings, self.training = asked, findings, training
        self.space, self.clock, self.cluster = space, clock, space.cluster
        self.costs = BlockCosts(findings)
        self.families: dict[str, Family] = {}
        self.waiting: dict[_Likes, list[Promise]] = {}
        self.refused: dict[_Likes, int] = {}
        self.errors: dict[_Likes, float] = {}  # by what factor the last step was off its estimate
        self.shipped: list[tuple[Promise, Mapping[str, Any]]] = []
        self.simulated: list[tuple[float, Candidate, Mapping[str, Any], tuple[int, ...]]] = []
        self.short: list[tuple[float, Candidate, Mapping[str, Any], tuple[int, ...]]] = []
        self.is_whole: dict[Devices, bool] = {}  # devices that are all, in the inventory's order
        self.best_s, self.estimated, self.work, self.resolved = inf, 0, 0, 0
        self.floor_s = inf

    def run(self) -> Found | None:
        """Search; None where nothing fits."""
        limit = self.asked.time_limit_s
        end = self.clock() + limit if limit else inf
        most = _BUDGET if limit == 0 else inf
        self.estimate()
        self.simulate(end, most)
        self.simulate_shipped()
        self.move_boundaries(end)
        return self.found() if self.simulated else None

    # --- Estimates ---

    def estimate(self) -> None:
        """List the promising candidates of every set of devices that may be fast enough."""
        sets = []
        for devices in self.space.sets():
            cluster = self.cluster_of(devices)
            sets.append((floor_s(self.costs, cluster, self.training), devices, cluster))
        self.floor_s = min(floor for floor, *_ in sets)
        for floor, devices, cluster in sorted(sets, key=lambda each: each[:2]):
            if floor < self.best_s:
                self.estimate_on(devices, cluster)

    def estimate_on(self, devices: Devices, cluster: Cluster) -> None:
        """List the promising candidates on a set of devices, and simulate the first, below which
        other sets are to come."""
        estimator = Estimator(
            CandidateCosts(self.costs, cluster, self.training, self.asked.balance)
        )
        listed = shortlist(self.space, devices, estimator)
        self.estimated += listed.estimated
        for name, (short, _) in listed.short.items():
            family = self.family(name)
            family.short_bytes = min(family.short_bytes, short)
        first = min(listed.promises, default=None)
        if first is not None and first.seconds < self.best_s * _NEAR:
            self.resolve(first.candidate, first.estimate)
        for promise in listed.promises:
            family = self.family(promise.candidate.family)
            family.estimate_s = min(family.estimate_s, promise.seconds)
            if promise is not first or first.seconds >= self.best_s * _NEAR:
                waiting = self.waiting.setdefault(_likes(promise.candidate), [])
                waiting.append(promise)
                waiting.sort(reverse=True)
        if self.space.exported:
            for each in shipped(cluster, self.training, self.asked.balance):
                if not self.space.keeps(each.candidate.zero, each.candidate.offload):
                    continue
                estimate = estimator.of(each.candidate)
                promise = Promise(estimate.seconds, each.candidate, estimate)
                mapping = {**each.written, **self.devices_of(each.candidate)}
                self.shipped.append((promise, mapping))

    def cluster_of(self, devices: Devices) -> Cluster:
        """Return the cluster of a set of devices, in the order in which ranks are numbered."""
        if self.space.use_all:
            return self.cluster.chosen(self.asked.devices)
        return self.cluster.of_kinds(dict(devices))

    def family(self, name: str) -> Family:
        """Return what is known of a family."""
        return self.families.setdefault(name, Family())

    # --- Simulations ---

    def simulate(self, end: float, most: float) -> None:
        """Simulate the first of each family, then whichever is estimated to be fastest by what is
        known of the errors of its like, until nothing is near, or the budget is spent."""
        far = _FAR if most == inf else _NEAR
        few = sum(map(len, self.waiting.values())) <= _FEW
        while True:
            listed = []
            for kind, promises in self.waiting.items():
                known = kind in self.errors
                if promises and (known or self.refused.get(kind, 0) < _REFUSALS):
                    name = promises[-1].candidate.family
                    family = self.family(name)
                    seconds = promises[-1].seconds * self.errors.get(kind, family.error)
                    near = far if family.simulated else _FAR
                    if seconds < self.best_s * near or few:
                        listed.append((family.simulated > 0, seconds, kind))
            if not listed:
                return
            if self.simulated and (self.clock() > end or self.work > most):
                return
            _, _, kind = min(listed)
            promise = self.waiting[kind].pop()
            self.resolve(promise.candidate, promise.estimate)

    def simulate_shipped(self) -> None:
        """Simulate the shipped strategies that are estimated to come near the fastest."""
        for promise, mapping in sorted(self.shipped, key=lambda each: each[0].seconds):
            family = self.family(promise.candidate.family)
            known = {each[1] for each in self.simulated}
            if self.simulated and self.work > _SHIPPED_BUDGET:
                return
            near = promise.seconds * min(1.0, family.error) < self.best_s * _FAR
            if near and promise.candidate not in known:
                self.resolve(promise.candidate, replace(promise.estimate, cut=()), mapping)

    def resolve(
        self,
        candidate: Candidate,
        estimate: Estimate,
        mapping: Mapping[str, Any] | None = None,
    ) -> None:
        """Resolve and simulate a candidate, cut as it was estimated."""
        family, even = self.family(candidate.family), self.asked.balance == "even"
        mapping = self.written(candidate) if mapping is None else mapping
        places = () if even else estimate.cut
        try:
            found = self.consider(mapping, cut=places)
        except PlanError as error:
            family.fault = family.fault or error.faults[0]
            self.work += _REFUSED
            self.refused[_likes(candidate)] = self.refused.get(_likes(candidate), 0) + 1
            room = max(device.room_bytes for device in self.cluster.devices)
            little = isinstance(error, ShortOfMemoryError) and error.short_bytes < _LITTLE * room
            if isinstance(error, ShortOfMemoryError) and little and candidate.mesh.stages > 1:
                self.short.append((error.short_bytes, candidate, mapping, places))
            return
        seconds = found.step.spans.seconds
        self.resolved += 1
        family.note(seconds, estimate.seconds)
        self.errors[_likes(candidate)] = seconds / estimate.seconds
        self.work += found.work + candidate.mesh.count
        self.simulated.append((seconds, candidate, mapping, places))
        self.best_s = min(self.best_s, seconds)

    def consider(self, mapping: Mapping[str, Any], **keys: Any) -> Considered:
        """Resolve what a file says as far as its step."""
        return consider(self.read(mapping), self.cluster, self.findings, self.training, **keys)

    def move_boundaries(self, end: float) -> None:
        """Move the boundaries of the fastest pipelines' stages; where nothing fits, of those that
        are short of least memory."""
        listed = sorted(self.simulated, key=lambda each: each[:2])
        near = (each for each in listed if each[0] < self.best_s * _MOVABLE)
        listed = [each for each in near if each[1].mesh.stages > 1][:_MOVED]
        if not self.simulated:
            listed = sorted(self.short, key=lambda each: each[:2])[:_SHORT]
        for number, (_, candidate, mapping, places) in enumerate(listed):
            if number and self.simulated and self.clock() > end:
                return
            try:
                found = self.consider(mapping, cut=places, moving=True)
            except PlanError as error:
                self.family(candidate.family).fault = error.faults[0]
                continue
            seconds = found.step.spans.seconds
            self.simulated.append((seconds, candidate, mapping, found.cut if places else ()))
            self.family(candidate.family).note(seconds, inf)
            self.best_s = min(self.best_s, seconds)

    # --- What came of it ---

    def found(self) -> Found:
        """Return the fastest, as a file that resolves to it, and why it is."""
        listed = sorted(self.simulated, key=lambda each: (each[0] * _SAME, each[1]))
        best = listed[0]
        _, candidate, mapping, places = best
        if places:
            named = with_cut(mapping, places, self.findings.order)
            mapping = self.fastest([mapping] if named is None else [named, mapping])
        considered = self.consider(mapping, moving=True)
        seconds = considered.step.spans.seconds
        said = decisions(
            candidate, seconds, self.families, self.space, self.asked, self.training, self.findings,
            counts=(self.resolved, self.estimated), floor_s=self.floor_s,
        )  # fmt: skip
        return Found(
            self.read(mapping),
            mapping,
            considered,
            tuple(said),
            self.floor_s,
            self.resolved,
            self.estimated,
        )

    def fastest(self, mappings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the file whose step is the shortest; the first of equals, and at once the one that
        keeps what was found."""
        best, chosen = inf, mappings[0]
        for mapping in mappings:
            seconds = self.consider(mapping, moving=True).step.spans.seconds
            if seconds < best * _SAME:
                best, chosen = seconds, mapping
            if seconds * _SAME <= self.best_s:
                return mapping
        return chosen

    def read(self, mapping: Mapping[str, Any]) -> Strategy:
        """Return what a file of this name would say."""
        faults: list[Fault] = []
        strategy = read_strategy(mapping, self.asked.name, faults)
        assert strategy is not None, faults
        return strategy

    def written(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return the file of a candidate."""
        return written(candidate, self.devices_of(candidate), self.asked.balance)

    def devices_of(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return the `devices:` of a file, where it has any: all in the inventory's order needs
        none."""
        if self.space.use_all:
            return {"devices": self.asked.devices} if self.asked.devices is not None else {}
        devices = candidate.mesh.devices
        if devices not in self.is_whole:
            self.is_whole[devices] = self.cluster.of_kinds(dict(devices)) == self.cluster
        return {} if self.is_whole[devices] else {"devices": dict(devices)}
