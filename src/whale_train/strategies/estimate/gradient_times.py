"""Time the exchanges between replicas of a stage: gradient reductions, updates, and ZeRO's
gathers."""

from dataclasses import dataclass, field
from functools import cached_property

from whale_train.strategies.cost.collectives import (
    all_reduce_time_s,
    gather_time_s,
    group_link,
    modules_of,
    partitioned_sum_time_s,
    sum_time_s,
    zero3_gather_overhead_s,
)
from whale_train.strategies.cost.roofline import (
    fetch_time_s,
    offloaded_update_time_s,
    update_time_s,
)
from whale_train.strategies.estimate.candidates import Candidate, Part
from whale_train.strategies.estimate.transfers import Group, Transfers
from whale_train.strategies.hardware.cluster import Cluster, Device
from whale_train.strategies.plan.training import Training
from whale_train.strategies.simulate.tasks import sum_pieces
from whale_train.strategies.stages.analysis import ModelAnalysis


@dataclass(frozen=True)
class GradientTimes:
    """Times of exchanging gradients and weights between replicas on the devices of `cluster`."""

    findings: ModelAnalysis
    cluster: Cluster
    training: Training
    transfers: Transfers
    _element: dict[tuple[int, Part], float] = field(default_factory=dict)

    def element_s(self, copies: int, part: Part) -> float:
        """Return the seconds per element of reducing gradients over all replicas of a stage."""
        key = (copies, part)
        if key not in self._element:
            group = self.transfers.group(copies, part)
            summed = self._sum_of(group, part)
            self._element[key] = summed
        return self._element[key]

    def _sum_of(self, group: Group, part: Part) -> float:
        """Return the seconds per element of an all-reduce of a million elements over a group."""
        if group.members == 1:
            return 0.0
        return self.transfers.sum_s(group, part, self.training.sent_width * 1e6) / 1e6

    def after_s(
        self, candidate: Candidate, part: Part, elements: float, backward_s: float, device: Device
    ) -> float:
        """Return the seconds from a stage's last backward to its updated weights: the gradient
        reduction that no backward hides, the update, and ZeRO's gathers.

        elements: trained elements of the stage on one member of a shard group.
        backward_s: seconds of the last backward, which can hide a reduction.
        device: the device that updates.
        """
        group = self.transfers.group(candidate.mesh.copies, part)
        copies, zero = group.members, candidate.zero
        own, states = elements / (copies if zero else 1), self.training.optimizer_states
        if candidate.offload == "none":
            update = update_time_s(own, states, device)
        else:
            update = offloaded_update_time_s(own, states, device, self.cluster.on_cpu)
        if copies == 1:
            return update
        sent = self.training.sent_width * elements
        summed = self._sum_s(candidate, group, part, sent)
        link = self.transfers.link(group, part)
        if zero == 0:
            pieces = sum_pieces(elements, self.training.bucket_elements)
            return max(summed / pieces, summed - (1 - 1 / pieces) * backward_s) + update
        if zero == 3:
            return gather_time_s(sent, copies, link) + update
        width = self.findings.weight_width(zero)
        gathered = gather_time_s(width * elements, copies, link)
        precision = self.training.precision
        return partitioned_sum_time_s(elements, summed, [device], precision) + update + gathered

    def _sum_s(self, candidate: Candidate, group: Group, part: Part, num_bytes: float) -> float:
        """Return the seconds of an all-reduce of `num_bytes` over a group.

        Replicas of the whole model on one host reduce in shared memory (docs/adr/013).
        """
        mesh = candidate.mesh
        is_whole_model = not (candidate.micro_batches or candidate.zero) and mesh.shards == 1
        in_memory = is_whole_model and self.training.reduce_dtype == "fp32"
        if in_memory and self.cluster.shared_memory is not None:
            return sum_time_s(self.cluster, range(group.members), num_bytes, by_memory=True)
        return self.transfers.sum_s(group, part, num_bytes)

    def gathers_s(
        self, candidate: Candidate, part: Part, device: Device, elements: float | None = None
    ) -> tuple[float, float]:
        """Return the seconds that ZeRO 3 adds to a forward and to a backward of a part; 0 for other
        ZeRO stages. `elements` are the trained elements of the part (None: an equal share of the
        model's)."""
        if candidate.zero < 3:
            return 0.0, 0.0
        findings, group = self.findings, self.transfers.group(candidate.mesh.copies, part)
        elements = findings.trained_elements / part.shards if elements is None else elements
        width = findings.weight_width(3)
        link = self.transfers.link(group, part)
        sent = gather_time_s(width * elements, group.members, link)
        if candidate.offload == "all":
            sent += fetch_time_s(width * elements / group.members, [device], self.cluster.on_cpu)
        modules = len(modules_of(parameter.path for parameter in findings.profile.parameters))
        forward, backward = zero3_gather_overhead_s(
            elements, modules, [device], self.training.precision
        )
        return sent + forward, sent + backward

    @cached_property
    def norm_s(self) -> float:
        """Return the seconds of the all-reduce of the gradient norm over all ranks."""
        ranks = range(len(self.cluster.devices))
        return all_reduce_time_s(4.0, len(ranks), group_link(self.cluster, ranks))
