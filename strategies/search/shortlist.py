"""Which of all candidates on a set of devices are worth a simulation, by their estimates.

Pipelines are estimated three times, each time fewer of them: roughly, in whatever order of their
parts; as if the model could be cut anywhere; and cut by the dynamic programme. Each kind, which is
a family and a number of copies, has a list of its own, so that an estimate that errs in one leaves
the others theirs.
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

_ROUGHLY = 14  # pipelines of a kind that are estimated as if they could be cut anywhere,
_CUT = 10  # of these that are cut at the most,
_KEPT = 3  # until so many fit
_FAR = 1.7  # times the least rough estimate: pipelines of which all are further are passed over


@dataclass(order=True)
class Promise:
    """A candidate, by the seconds that a step is estimated to take."""

    seconds: float
    candidate: Candidate
    estimate: Estimate = field(compare=False)


@dataclass
class Shortlist:
    """The candidates of one set of devices: the most promising of each family that fit, how many
    were `estimated`, and the least bytes that a family is `short` of where nothing fits."""

    promises: list[Promise] = field(default_factory=list)
    estimated: int = 0
    short: dict[str, tuple[float, Candidate]] = field(default_factory=dict)

    def note(self, candidate: Candidate, estimate: Estimate) -> bool:
        """Keep a candidate that fits, or by how much it does not; return whether it does."""
        if estimate.seconds < inf:
            self.promises.append(Promise(estimate.seconds, candidate, estimate))
        elif estimate.short_bytes > 0:
            short, name = (estimate.short_bytes, candidate), candidate.family
            self.short[name] = min(self.short.get(name, short), short)
        return estimate.seconds < inf


def shortlist(space: Space, devices: Devices, estimator: Estimator) -> Shortlist:
    """Return the most promising candidates of every family on `devices`."""
    found = Shortlist()
    pipelines: defaultdict[object, list[tuple[float, Mesh, int, str]]] = defaultdict(list)
    for mesh in space.meshes(devices, estimator.costs.cluster):
        for pieces in space.numbers_of_micro_batches(mesh):
            for dim in space.dims(mesh):
                if not pieces:
                    for candidate in space.variants(mesh, 0, dim):
                        found.note(candidate, estimator.of(candidate))
                        found.estimated += 1
                    continue
                try:
                    seconds = estimator.rough_s(mesh, pieces, dim)
                except PlanError:  # nothing to cut so
                    continue
                family = Candidate(mesh, pieces, dim=dim).family
                pipelines[family, mesh.copies, mesh.widest > 1].append((seconds, mesh, pieces, dim))
    nearest = min((each[0] for listed in pipelines.values() for each in listed), default=0.0)
    for listed in pipelines.values():
        found.estimated += len(listed)
        if min(listed)[0] > _FAR * nearest:
            continue
        uncut = [
            (estimator.uncut_s(candidate), candidate)
            for _, mesh, pieces, dim in nsmallest(_ROUGHLY, listed)
            for candidate in _ordered(space, mesh, pieces, dim)
        ]
        found.estimated += len(uncut)
        _keep_best(nsmallest(_CUT, uncut), space, estimator, found)
    return found


def _keep_best(
    listed: list[tuple[float, Candidate]], space: Space, estimator: Estimator, found: Shortlist
) -> None:
    """Cut the pipelines, the most promising first, and keep those that fit, with more than their
    copies' optimizers whole only where these do not; of the best, both."""
    fitting = 0
    for _, candidate in listed:
        if fitting == _KEPT:
            return
        fits = False
        for kept in space.variants(candidate.mesh, candidate.micro_batches, candidate.dim):
            whole = kept.zero == 0
            if whole or not fits or not fitting:
                found.estimated += 1
                fits = found.note(kept, estimator.of(kept)) or fits
        fitting += fits


def _ordered(space: Space, mesh: Mesh, pieces: int, dim: str) -> Iterator[Candidate]:
    """Yield a pipeline in every order of its parts."""
    schedule = "zero_bubble" if mesh.stages > 1 else "1f1b"
    for ordered in space.orders(mesh):
        yield Candidate(ordered, pieces, schedule, dim=dim)
