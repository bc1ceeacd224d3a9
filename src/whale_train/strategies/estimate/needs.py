"""Estimate the memory of a candidate besides activations: weights, gradients, optimizers."""

from dataclasses import dataclass
from math import inf

from whale_train.strategies.estimate.candidates import Candidate
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.memory.engine_memory import (
    frozen_bytes,
    precision_bytes,
    weights_bytes,
)
from whale_train.strategies.memory.host_memory import host_bytes
from whale_train.strategies.plan.training import Training
from whale_train.strategies.stages.analysis import ModelAnalysis

_OFFLOADED = {"none": (), "optimizer": ("optimizer",), "all": ("optimizer", "parameters")}


@dataclass(frozen=True)
class Needs:
    """Bytes that candidates need on the devices of `cluster`, and on their hosts."""

    findings: ModelAnalysis
    cluster: Cluster
    training: Training

    def element_bytes(self, candidate: Candidate, holders: int) -> float:
        """Return the bytes per trained element on each of `holders` devices.

        Offloaded optimizers take no bytes on the device, from ZeRO 2 on with their gradients, and
        neither do offloaded parameters. CPU processes are their own hosts, so offloaded state still
        counts.
        """
        zero, on_cpu = candidate.zero, self.cluster.on_cpu
        weights, master, casts = self._sizes(zero, candidate.offload == "all")
        part = 1 / holders if zero else 1.0
        optimizer = (4 * self.training.optimizer_states + master) * part
        gradients = 4.0 * (part if zero >= 2 else 1.0)
        if candidate.offload != "none" and not on_cpu:
            optimizer, gradients = 0.0, 0.0 if zero >= 2 else gradients
        if candidate.offload == "all" and not on_cpu:
            weights = 0.0
        return weights * (part if zero == 3 else 1.0) + casts + optimizer + gradients

    def standing_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound on the bytes of a device that do not scale with its trained
        parameters.

        These are frozen weights, as if shared evenly, and the largest parameter with its gradient,
        which ZeRO 3 gathers. Heads, which may be split, and experts that are spread over devices do
        not count as the largest parameter.
        """
        mesh, profile = candidate.mesh, self.findings.profile
        frozen = 0.0 if candidate.offload == "all" else self._frozen_bytes
        frozen /= mesh.stages * mesh.shards
        if candidate.zero < 3 or mesh.copies == 1:
            return frozen
        heads = self.findings.heads if profile.graph else ()
        apart = {head.weight for head in heads}
        if candidate.experts and (experts := self.findings.experts) is not None:
            apart.update(experts.sharded.weights)
        largest = max((p.elements for p in profile.parameters if p.path not in apart), default=0)
        widths = precision_bytes(self.training.precision, candidate.zero, narrow=True)
        gathered = (widths.weights + widths.gradients) * largest / mesh.shards
        return frozen / mesh.copies + gathered

    @property
    def _frozen_bytes(self) -> float:
        """Return the bytes of all frozen weights."""
        findings = self.findings
        return findings.once(
            "all frozen bytes",
            lambda: sum(frozen_bytes(findings.profile, self.training).values()),
        )

    def _sizes(self, zero: int, apart: bool) -> tuple[float, float, float]:
        """Return the mean bytes per element of weights, master copies, and copies that autocast
        makes. `apart` is True if the optimizer is apart from the parameters, as when these are
        offloaded."""
        findings = self.findings

        def found() -> tuple[float, float, float]:
            profile = findings.profile
            elements = {p.path: float(p.elements) for p in profile.parameters}
            sizes = weights_bytes(elements, profile, self.training.precision, zero, apart)
            total = max(1.0, sum(elements.values()))
            return sizes.weights / total, sizes.master / total, sizes.casts / total

        return findings.once(("bytes of an element", zero, apart), found)

    def short_on_hosts(self, candidate: Candidate) -> float:
        """Return the bytes, per device, that hosts are short of for offloaded state; 0 or less
        where they have enough. The memory of all hosts counts as shared evenly among all
        devices."""
        if candidate.offload == "none":
            return 0.0
        elements = self.findings.copied_elements(candidate.split_head)
        host_need = (
            host_bytes(candidate.zero, _OFFLOADED[candidate.offload], self.training) * elements
        )
        hosts = [node.host for node in self.cluster.nodes]
        has = sum(inf if host is None else host.memory_bytes for host in hosts)
        return (host_need - has) / len(self.cluster.devices)
