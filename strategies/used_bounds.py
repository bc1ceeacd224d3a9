"""Bounds of what candidates take on as many devices as they use, the others staying idle.

Fewer devices may be others than all are (`Cluster.fewer`), and processes that share processors do
all of their work on these. What a candidate takes on given devices is bounded in `bounds.py`.
"""

from dataclasses import dataclass, field
from math import inf

from whale_train.strategies.bounds import Bounds
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.findings import Findings
from whale_train.strategies.space import Arrangement, Batched, Candidate, Opening
from whale_train.strategies.training import Training


@dataclass(frozen=True)
class UsedBounds:
    """Of candidates for a model on devices of `cluster`, whose work is shared by `balance`."""

    findings: Findings
    cluster: Cluster
    training: Training
    balance: str = "hardware"
    _of_number: dict[int, Bounds] = field(default_factory=dict)

    def shortfall_bytes(self, candidate: Candidate) -> float:
        """By how much a copy's devices have too little memory."""
        return self._of(candidate.arrangement).shortfall_bytes(candidate)

    def least_of(self, opening: Opening) -> float:
        """Seconds that no candidate of it is faster than."""
        bounds = self._of(opening.arrangement)
        return max(bounds.least_of(opening), self._shared_s(bounds))

    def least_of_batched(self, batched: Batched) -> float:
        """Seconds that no candidate of these is faster than."""
        bounds = self._of(batched.arrangement)
        return max(bounds.least_of_batched(batched), self._shared_s(bounds))

    def least(self, candidate: Candidate) -> float:
        """Seconds that its step is not faster than."""
        bounds = self._of(candidate.arrangement)
        return max(bounds.least(candidate), self._shared_s(bounds))

    def _of(self, shape: Arrangement) -> Bounds:
        if shape.devices not in self._of_number:
            used = self.cluster.first(shape.devices)
            bounds = Bounds(self.findings, used, self.training, self.balance)
            self._of_number[shape.devices] = bounds
        return self._of_number[shape.devices]

    def _shared_s(self, bounds: Bounds) -> float:
        """All that grows with the samples, on the processors that more processes share."""
        cluster = bounds.cluster
        if cluster.processors == inf or cluster.processors >= len(cluster.devices):
            return 0.0
        each = bounds.segments.whole(cluster.devices[0], 1).each.total
        return self.training.global_batch * each / cluster.processors
