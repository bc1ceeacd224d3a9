"""Search for the strategy of `graph: auto`: estimate many candidates, simulate the best of them.

Every candidate of the space is estimated by formulas (`shortlist.py`). The best ones are resolved
and simulated by the resolver itself, family by family, until the budget of simulated tasks is
spent. The stage boundaries of the fastest pipelines are then moved. The fastest candidate is the
result (docs/adr/035). Unless the user limits the seconds, the budget counts work and not time, so
that the result is the same on every machine.
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
from whale_train.strategies.resolver.evaluated import EvaluatedStrategy
from whale_train.strategies.resolver.resolve import consider, refuse_precision
from whale_train.strategies.search.explain import Family, decisions, nothing_fits
from whale_train.strategies.search.floor import floor_s
from whale_train.strategies.search.improve import ChangedStep, improve
from whale_train.strategies.search.neighbours import (
    choices_of,
    every_part_beside,
    every_pipeline,
)
from whale_train.strategies.search.shipped import shipped
from whale_train.strategies.search.shortlist import Promise, shortlist
from whale_train.strategies.search.space import Devices, Space, space_of
from whale_train.strategies.search.written import to_strategy_file, with_cut
from whale_train.strategies.stage_memory.within_memory import ShortOfMemoryError
from whale_train.strategies.stages.analysis import ModelAnalysis

MOST_KINDS = 32  # limit on the kinds of devices in a search
_SAME = 1 - 1e-9  # steps closer than this are equally long
_REFUSED = 4_000  # tasks that a refused candidate counts as
_REFUSALS = 2  # refusals after which no other similar candidate is resolved
_BUDGET = 100_000  # tasks simulated, and ranks laid out, where a search has no time limit
_SHIPPED_BUDGET = 500_000  # tasks after which no shipped strategy is simulated
_FEW = 128  # up to so many waiting candidates, all are simulated, near or not
_FAR = 1.3  # times the fastest: estimates err by less, and slower candidates are not simulated
_NEAR = 1.1  # times the fastest: the same limit, once the error of a family is known
_MOVED = 3  # fastest pipelines whose boundaries are moved,
_MOVABLE = 1.05  # if they take at most this many times the fastest
_IMPROVED = 10_000  # tasks simulated of changes of the fastest strategies,
_IMPROVED_FEW, _FEW_DEVICES = 30_000, 8  # for at most so many devices,
_LONGER = 10  # and so many times as many where little fits, and for a search with a time limit
_CHUNKED = "interleaved_1f1b"  # a schedule whose cut no file can say
_SHORT = 6  # pipelines whose boundaries are moved where nothing fits,
_LITTLE = 0.2  # if they are short of at most this fraction of a device's memory


@dataclass(frozen=True)
class SearchResult:
    """ChangedStep of a search.

    strategy: the fastest strategy simulated.
    written: the content of its strategy file.
    considered: the strategy, resolved as far as its step.
    decisions: reasons for the strategy and against the others.
    floor_s: lower bound on the seconds of a step, by the devices' own speed.
    resolved: number of candidates simulated.
    estimated: number of estimates made, of which one pipeline can have several.
    """

    strategy: Strategy
    written: Mapping[str, Any]
    considered: EvaluatedStrategy
    decisions: tuple[Decision, ...]
    floor_s: float
    resolved: int
    estimated: int


def search(
    asked: Strategy,
    cluster: Cluster,
    findings: ModelAnalysis,
    training: Training,
    *,
    can_offload: bool = True,
    use_all: bool = False,
    clock: Callable[[], float] = monotonic,
) -> SearchResult:
    """Return the fastest strategy simulated for `training` on the devices that `asked` allows.

    asked: the request. With a `time_limit_s` above 0, candidates are simulated until that many
        seconds of `clock` have passed.
    can_offload: True if replicas may offload their optimizer's state to the host.
    use_all: True if every device must be used; else some may stay idle.
    clock: function that returns the time in seconds.

    Raises PlanError where nothing fits, or where the devices cannot be searched (see `_able`).
    """
    devices, idle = _able(asked, cluster, training.precision, use_all)
    space = space_of(cluster, devices, findings, training, can_offload, use_all)
    spaces = [space]
    if space.exported:  # shard groups span nodes only where nothing else fits
        spaces.append(replace(space, wide_splits=True))
    with _uncollected():
        for candidate_space in spaces:
            run = _Search(asked, findings, training, candidate_space, clock)
            fastest = run.run()
            if fastest is not None:
                return replace(fastest, decisions=(*fastest.decisions, *idle))
    raise PlanError([nothing_fits(run.families, space, asked, training)])


def _able(
    asked: Strategy, cluster: Cluster, precision: str, use_all: bool
) -> tuple[Devices, Sequence[Decision]]:
    """Return the usable devices, as sorted pairs (kind, count), and the reasons why others stay
    idle.

    A device is usable if it supports `precision`. Raises PlanError where no device is usable, where
    one is not but `use_all` is set, and where there are more than `MOST_KINDS` kinds.
    """
    faults: list[Fault] = []
    allowed = cluster.chosen(asked.devices)
    refuse_precision(precision, allowed, faults)
    able = {
        device.name: allowed.kinds[device.name]
        for device in allowed.devices
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
        count = len(allowed.devices)
        idle.append(Decision("strategy.devices", str(sum(able.values())), str(count), reason))
    return tuple(sorted(able.items())), idle


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while a search runs.

    The millions of instructions and tasks of a search form no reference cycles, and the collector
    takes a fifth of a search to look for some.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_Likes = tuple[str, Devices, int, bool, int, bool]  # candidates with similar errors of estimates


def _likes(candidate: Candidate) -> _Likes:
    """Return a key that is equal for candidates whose estimates have similar errors.

    The key is (family, devices, number of replicas, whether some stage has several copies, number
    of devices that experts are spread over, whether stages are interleaved).
    """
    mesh, interleaved = candidate.mesh, candidate.schedule == "interleaved_1f1b"
    copied = mesh.widest > 1
    return candidate.family, mesh.devices, mesh.copies, copied, candidate.experts, interleaved


class _Search:
    """One search over one space: the candidates that wait, and the steps simulated so far."""

    def __init__(
        self,
        asked: Strategy,
        findings: ModelAnalysis,
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
        self.errors: dict[_Likes, float] = {}  # last step / its estimate
        self.shipped: list[tuple[Promise, Mapping[str, Any]]] = []
        self.simulated: list[tuple[float, Candidate, Mapping[str, Any], tuple[int, ...]]] = []
        self.short: list[tuple[float, Candidate, Mapping[str, Any], tuple[int, ...]]] = []
        self.is_whole: dict[Devices, bool] = {}  # True: all devices, in the inventory's order
        self.best_s, self.estimated, self.work, self.resolved = inf, 0, 0, 0
        self.changed = 0  # changes of the fastest that were simulated,
        self.regular = 0  # after so many others
        self.floor_s = inf

    def run(self) -> SearchResult | None:
        """Run the search; return the fastest strategy, or None where nothing fits."""
        limit = self.asked.time_limit_s
        end = self.clock() + limit if limit else inf
        most = _BUDGET if limit == 0 else inf
        self.estimate()
        self.simulate(end, most)
        self.simulate_shipped()
        self.move_boundaries(end)
        self.improve(end)
        return self.found() if self.simulated else None

    # --- Estimates ---

    def estimate(self) -> None:
        """Estimate the candidates on every set of devices whose lower bound is below the best step.
        Sets are taken in the order of their lower bounds (`floor_s`)."""
        sets = []
        for devices in self.space.sets():
            cluster = self.cluster_of(devices)
            sets.append((floor_s(self.costs, cluster, self.training), devices, cluster))
        self.floor_s = min(floor for floor, *_ in sets)
        for floor, devices, cluster in sorted(sets, key=lambda entry: entry[:2]):
            if floor < self.best_s:
                self.estimate_on(devices, cluster)

    def estimate_on(self, devices: Devices, cluster: Cluster) -> None:
        """Queue the promising candidates on a set of devices for simulation.

        The first candidate is simulated at once if its estimate is near the fastest step so far:
        its step is then a bound that other sets must beat.
        """
        estimator = Estimator(
            CandidateCosts(self.costs, cluster, self.training, self.asked.balance)
        )
        shortlisted = shortlist(self.space, devices, estimator)
        self.estimated += shortlisted.estimated
        for name, (short, _) in shortlisted.short.items():
            family = self.family(name)
            family.short_bytes = min(family.short_bytes, short)
        first = min(shortlisted.promises, default=None)
        if first is not None and first.seconds < self.best_s * _NEAR:
            self.resolve(first.candidate, first.estimate)
        for promise in shortlisted.promises:
            family = self.family(promise.candidate.family)
            family.estimate_s = min(family.estimate_s, promise.seconds)
            if promise is not first or first.seconds >= self.best_s * _NEAR:
                waiting = self.waiting.setdefault(_likes(promise.candidate), [])
                waiting.append(promise)
                waiting.sort(reverse=True)
        if self.space.exported:
            for strategy in shipped(cluster, self.training, self.asked.balance):
                if not self.space.keeps(strategy.candidate):
                    continue
                estimate = estimator.of(strategy.candidate)
                promise = Promise(estimate.seconds, strategy.candidate, estimate)
                mapping = {**strategy.written, **self.devices_of(strategy.candidate)}
                self.shipped.append((promise, mapping))

    def cluster_of(self, devices: Devices) -> Cluster:
        """Return the cluster of a set of devices, in the order in which ranks are numbered."""
        if self.space.use_all:
            return self.cluster.chosen(self.asked.devices)
        return self.cluster.of_kinds(dict(devices))

    def family(self, name: str) -> Family:
        """Return the summary of the family `name`, which starts empty."""
        return self.families.setdefault(name, Family())

    # --- Simulations ---

    def simulate(self, end: float, most: float) -> None:
        """Simulate waiting candidates until none is near the fastest, or the budget is spent.

        The first candidate of each family comes first, then the one with the smallest estimate,
        corrected by the error of similar candidates. At least one candidate is simulated. If at
        most `_FEW` candidates wait, all count as near.

        end: time of `clock`, in seconds, after which no other candidate is simulated.
        most: budget of simulated tasks and laid-out ranks.
        """
        far = _FAR if most == inf else _NEAR
        few = sum(map(len, self.waiting.values())) <= _FEW
        while True:
            kinds = []
            for kind, promises in self.waiting.items():
                known = kind in self.errors
                if promises and (known or self.refused.get(kind, 0) < _REFUSALS):
                    name = promises[-1].candidate.family
                    family = self.family(name)
                    seconds = promises[-1].seconds * self.errors.get(kind, family.error)
                    near = far if family.simulated else _FAR
                    if seconds < self.best_s * near or few:
                        kinds.append((family.simulated > 0, seconds, kind))
            if not kinds:
                return
            if self.simulated and (self.clock() > end or self.work > most):
                return
            _, _, kind = min(kinds)
            promise = self.waiting[kind].pop()
            self.resolve(promise.candidate, promise.estimate)

    def simulate_shipped(self) -> None:
        """Simulate the shipped strategies whose estimates are near the fastest step."""
        for promise, mapping in sorted(self.shipped, key=lambda entry: entry[0].seconds):
            family = self.family(promise.candidate.family)
            known = {entry[1] for entry in self.simulated}
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
        """Resolve and simulate a candidate, with the cut of its estimate.

        `mapping` is the candidate's strategy file (None: it is written here). A refused candidate
        leaves its fault in its family; a pipeline with a small memory shortfall is added to
        `short`.
        """
        family, even = self.family(candidate.family), self.asked.balance == "even"
        mapping = self.written(candidate) if mapping is None else mapping
        places = () if even else estimate.cut
        try:
            considered = self.consider(mapping, cut=places)
        except PlanError as error:
            family.fault = family.fault or error.faults[0]
            self.work += _REFUSED
            self.refused[_likes(candidate)] = self.refused.get(_likes(candidate), 0) + 1
            room = max(device.room_bytes for device in self.cluster.devices)
            little = isinstance(error, ShortOfMemoryError) and error.short_bytes < _LITTLE * room
            if isinstance(error, ShortOfMemoryError) and little and candidate.mesh.stages > 1:
                self.short.append((error.short_bytes, candidate, mapping, places))
            return
        seconds = considered.step.spans.seconds
        self.resolved += 1
        family.note(seconds, estimate.seconds)
        self.errors[_likes(candidate)] = seconds / estimate.seconds
        self.work += considered.work + candidate.mesh.count
        self.simulated.append((seconds, candidate, mapping, places))
        self.best_s = min(self.best_s, seconds)

    def consider(self, mapping: Mapping[str, Any], **keys: Any) -> EvaluatedStrategy:
        """Resolve the strategy file `mapping` as far as its step. Raises PlanError with all
        faults."""
        return consider(self.read(mapping), self.cluster, self.findings, self.training, **keys)

    def move_boundaries(self, end: float) -> None:
        """Move the stage boundaries of the fastest pipelines and simulate them again.

        Where nothing fits, the pipelines with the smallest memory shortfall are moved instead.
        After the first one, no fast pipeline is moved once `clock` has passed `end`, in seconds.
        """
        trials = sorted(self.simulated, key=lambda trial: trial[:2])
        near = (trial for trial in trials if trial[0] < self.best_s * _MOVABLE)
        trials = [trial for trial in near if trial[1].mesh.stages > 1][:_MOVED]
        if not self.simulated:
            trials = sorted(self.short, key=lambda trial: trial[:2])[:_SHORT]
        for number, (_, candidate, mapping, places) in enumerate(trials):
            if number and self.simulated and self.clock() > end:
                return
            try:
                considered = self.consider(mapping, cut=places, moving=True)
            except PlanError as error:
                self.family(candidate.family).fault = error.faults[0]
                continue
            seconds = considered.step.spans.seconds
            self.simulated.append((seconds, candidate, mapping, considered.cut if places else ()))
            self.family(candidate.family).note(seconds, inf)
            self.best_s = min(self.best_s, seconds)

    def improve(self, end: float) -> None:
        """Simulate changes of the fastest strategies, until a number of tasks are simulated, or
        `clock` has passed `end`, in seconds. Where little fits few devices, every list of stages
        is one of them, and stages are moved to where they fit."""
        self.regular, before = len(self.simulated), self.work
        best = min(self.simulated, key=lambda trial: trial[:2], default=None)
        few = len(self.cluster.devices) <= _FEW_DEVICES
        offloads = best is not None and best[1].offload != "none"
        little_fits = few and (self.resolved <= _SHORT or offloads)
        most = _IMPROVED_FEW if few else _IMPROVED
        most *= _LONGER if little_fits or self.asked.time_limit_s != 0 else 1

        def has_time() -> bool:
            return self.work - before < most and self.clock() <= end

        def simulate(candidate: Candidate, cut: tuple[int, ...]) -> ChangedStep | None:
            return self.change(candidate, cut, little_fits) if has_time() else None

        choices = choices_of(self.space, self.findings)
        for devices in self.space.sets() if little_fits else ():
            for candidate in every_pipeline(devices, choices):
                simulate(candidate, ())
        for devices in self.space.sets() if few and not self.simulated else ():
            for candidate in every_part_beside(devices, choices):
                simulate(candidate, ())
        self.resolved, self.changed = self.resolved + self.changed, 0
        first = [(seconds, candidate, places) for seconds, candidate, _, places in self.simulated]
        improve(first, choices, simulate, has_time)

    def change(
        self, candidate: Candidate, cut: tuple[int, ...], little_fits: bool
    ) -> ChangedStep | None:
        """Simulate a changed candidate, cut at `cut` (empty: as balanced, moved where
        `little_fits`); None where it is refused, or no file can say its cut."""
        mapping, mesh = self.written(candidate), candidate.mesh
        is_even, is_chunked = self.asked.balance == "even", candidate.schedule == _CHUNKED
        graph = self.findings.profile.graph
        self.work += mesh.count  # ranks, and layouts of all operations
        self.work += 0 if graph is None or mesh.shards == 1 else len(graph.operations)
        if is_even:
            cut = ()
        elif cut and with_cut(mapping, cut, self.findings.order) is None:
            return None
        moving = mesh.stages > 1 and not is_even and not cut and (is_chunked or little_fits)
        try:
            considered = self.consider(mapping, cut=cut, moving=moving)
        except PlanError as error:
            self.work += error.work if isinstance(error, ShortOfMemoryError) else 0
            return None
        seconds, is_cut = considered.step.spans.seconds, mesh.stages > 1
        places = considered.cut if is_cut and not is_even and not is_chunked else ()
        self.changed += 1
        self.work += considered.work
        self.simulated.append((seconds, candidate, mapping, places))
        self.family(candidate.family).note(seconds, inf)
        self.best_s = min(self.best_s, seconds)
        return ChangedStep(seconds, places)

    # --- The answer ---

    def found(self) -> SearchResult:
        """Return the fastest strategy, a file that resolves to it, and the reasons for it."""
        best = min(self.simulated, key=lambda trial: trial[:2])
        regular = min(self.simulated[: self.regular], key=lambda trial: trial[:2], default=best)
        if regular[0] * _SAME <= best[0]:  # as fast as any change
            best = regular
        _, candidate, mapping, places = best
        if places:
            named = with_cut(mapping, places, self.findings.order)
            mapping = self.fastest([mapping] if named is None else [named, mapping])
        considered = self.consider(mapping, moving=True)
        seconds = considered.step.spans.seconds
        explained = decisions(
            candidate, seconds, self.families, self.space, self.asked, self.training, self.findings,
            counts=(self.resolved, self.estimated, self.changed), floor_s=self.floor_s,
        )  # fmt: skip
        return SearchResult(
            self.read(mapping),
            mapping,
            considered,
            tuple(explained),
            self.floor_s,
            self.resolved,
            self.estimated,
        )

    def fastest(self, mappings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the strategy file with the shortest step, the first of equal ones. A file whose
        step is as short as the best simulated step is returned at once."""
        best, chosen = inf, mappings[0]
        for mapping in mappings:
            seconds = self.consider(mapping, moving=True).step.spans.seconds
            if seconds < best * _SAME:
                best, chosen = seconds, mapping
            if seconds * _SAME <= self.best_s:
                return mapping
        return chosen

    def read(self, mapping: Mapping[str, Any]) -> Strategy:
        """Return the strategy of a strategy file, under the name of the request."""
        faults: list[Fault] = []
        strategy = read_strategy(mapping, self.asked.name, faults)
        assert strategy is not None, faults
        return strategy

    def written(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return the strategy file of a candidate."""
        return to_strategy_file(candidate, self.devices_of(candidate), self.asked.balance)

    def devices_of(self, candidate: Candidate) -> Mapping[str, Any]:
        """Return the `devices` entry of a candidate's strategy file; an empty mapping for all
        devices in the inventory's order, which need none."""
        if self.space.use_all:
            return {"devices": self.asked.devices} if self.asked.devices is not None else {}
        devices = candidate.mesh.devices
        if devices not in self.is_whole:
            self.is_whole[devices] = self.cluster.of_kinds(dict(devices)) == self.cluster
        return {} if self.is_whole[devices] else {"devices": dict(devices)}
