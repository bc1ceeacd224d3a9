"""Choose by estimates which candidates on a set of devices are worth a simulation.

Pipelines are estimated three times, fewer of them each time: roughly, for any order of their parts;
as if the model could be cut anywhere; and cut by the dynamic program. Each kind of pipeline has a
list of its own, so that a wrong estimate of one kind does not displace the others. A kind is a
family, a number of replicas, and whether some stage has several copies.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf

from whale_train.errors import PlanError
from whale_train.strategies.estimate.candidates import Candidate, Estimate, Mesh
from whale_train.strategies.estimate.estimate import Estimator
from whale_train.strategies.search.space import Devices, Space

_ROUGHLY = 14  # pipelines of a kind that are estimated as if they could be cut anywhere;
_CUT = 10  # pipelines among these that are cut at most;
_KEPT = 3  # pipelines of a kind that fit, after which no other is cut
_FAR = 1.7  # times the smallest rough estimate: kinds with only slower pipelines are skipped


@dataclass(order=True)
class Promise:
    """A candidate with its estimate; promises are ordered by the estimated seconds of a step."""

    seconds: float
    candidate: Candidate
    estimate: Estimate = field(compare=False)


@dataclass
class Shortlist:
    """The candidates of one set of devices that are worth a simulation.

    promises: the most promising candidates of each family that fit.
    estimated: number of estimates made.
    short: smallest memory shortfall in bytes and its candidate, by family.
    """

    promises: list[Promise] = field(default_factory=list)
    estimated: int = 0
    short: dict[str, tuple[float, Candidate]] = field(default_factory=dict)

    def note(self, candidate: Candidate, estimate: Estimate) -> bool:
        """Record a candidate that fits, or its memory shortfall. Return True if it fits."""
        if estimate.seconds < inf:
            self.promises.append(Promise(estimate.seconds, candidate, estimate))
        elif estimate.short_bytes > 0:
            short, name = (estimate.short_bytes, candidate), candidate.family
            self.short[name] = min(self.short.get(name, short), short)
        return estimate.seconds < inf


def shortlist(space: Space, devices: Devices, estimator: Estimator) -> Shortlist:
    """Return the most promising candidates of every family on `devices`."""
    shortlisted = Shortlist()
    pipelines: defaultdict[object, list[tuple[float, Mesh, int, str]]] = defaultdict(list)
    for mesh in space.meshes(devices, estimator.costs.cluster):
        for pieces in space.numbers_of_micro_batches(mesh):
            for dim in space.dims(mesh):
                if not pieces:
                    for candidate in space.variants(mesh, 0, dim):
                        shortlisted.note(candidate, estimator.of(candidate))
                        shortlisted.estimated += 1
                    continue
                try:
                    seconds = estimator.rough_s(mesh, pieces, dim)
                except PlanError:  # no layout for such a split
                    continue
                family = Candidate(mesh, pieces, dim=dim).family
                pipelines[family, mesh.copies, mesh.widest > 1].append((seconds, mesh, pieces, dim))
    nearest = min(
        (entry[0] for rough_pipelines in pipelines.values() for entry in rough_pipelines),
        default=0.0,
    )
    for rough_pipelines in pipelines.values():
        shortlisted.estimated += len(rough_pipelines)
        if min(rough_pipelines)[0] > _FAR * nearest:
            continue
        uncut = [
            (estimator.uncut_s(candidate), candidate)
            for _, mesh, pieces, dim in nsmallest(_ROUGHLY, rough_pipelines)
            for candidate in _ordered(space, mesh, pieces, dim)
        ]
        shortlisted.estimated += len(uncut)
        _keep_best(nsmallest(_CUT, uncut), space, estimator, shortlisted)
    return shortlisted


def _keep_best(
    uncut: list[tuple[float, Candidate]], space: Space, estimator: Estimator, shortlisted: Shortlist
) -> None:
    """Estimate pipelines with their best cut, the most promising first, and note those that fit.

    A variant with ZeRO is estimated only if no earlier variant of its pipeline fits, or if no
    pipeline before it fits. The work ends once `_KEPT` pipelines fit.

    uncut: pipelines with their estimated seconds as if they could be cut anywhere, ascending.
    """
    fitting = 0
    for _, candidate in uncut:
        if fitting == _KEPT:
            return
        fits = False
        for variant in space.variants(candidate.mesh, candidate.micro_batches, candidate.dim):
            without_zero = variant.zero == 0
            if without_zero or not fits or not fitting:
                shortlisted.estimated += 1
                fits = shortlisted.note(variant, estimator.of(variant)) or fits
        fitting += fits


def _ordered(space: Space, mesh: Mesh, pieces: int, dim: str) -> Iterator[Candidate]:
    """Yield the candidates of a pipeline, one for every order of its parts."""
    schedule = "zero_bubble" if mesh.stages > 1 else "1f1b"
    for ordered in space.orders(mesh):
        yield Candidate(ordered, pieces, schedule, dim=dim)
