"""Whether a candidate may fit: the memory its weights, gradients and optimizer take at the least.

What is only known once tensors are laid and instructions are ordered is left out: activations,
buckets, and which of a copy's devices holds what.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from whale_train.strategies.arranged import Arranged
from whale_train.strategies.findings import Findings
from whale_train.strategies.memory import precision_bytes, weights_bytes
from whale_train.strategies.offloading import host_bytes
from whale_train.strategies.space import Arrangement, Candidate, Part
from whale_train.strategies.training import Training

_OFFLOADED = {"none": (), "optimizer": ("optimizer",), "all": ("optimizer", "parameters")}


@dataclass(frozen=True)
class MemoryBound:
    """Of candidates for a model on the devices that are `arranged`."""

    findings: Findings
    training: Training
    arranged: Arranged
    _rooms: dict[tuple[int, str], float] = field(default_factory=dict)
    _held: dict[bool, Mapping[str, float]] = field(default_factory=dict)

    def shortfall_bytes(self, candidate: Candidate) -> float:
        """By how much the weights, gradients and optimizer's state of one copy of the pipeline,
        and what ZeRO 3 gathers of others at the least, are more than its devices hold together, or
        what is offloaded is more than their hosts do; not positive where they may fit."""
        shape, zero = candidate.arrangement, candidate.zero
        copies = shape.copies * shape.widest
        # Of what is offloaded, a CPU process keeps all.
        offload = "none" if self.arranged.cluster.on_cpu else candidate.offload
        held, training = self._copied(candidate.split_head), self.training
        elements = sum(held.values())
        sizes = weights_bytes(
            held, self.findings.profile, training.precision, zero, candidate.offload == "all"
        )
        weights = sizes.weights * (1 / copies if zero == 3 else 1.0)
        gradients = 4 * elements * (1 / copies if zero >= 2 else 1.0)
        states = 4 * training.optimizer_states * elements + sizes.master
        optimizer = states * (1 / copies if zero else 1.0)
        need = sizes.casts + (0.0 if offload == "all" else weights)
        need += 0.0 if offload != "none" else optimizer
        need += 0.0 if offload != "none" and zero >= 2 else gradients
        gathered = 0.0
        if zero == 3 and copies > 1:
            least = precision_bytes(training.precision, zero, narrow=True)
            gathered = (least.weights + least.gradients) * self._most_elements
        room = sum(
            part.stages * part.shards * self._room_bytes(shape, part) for part in shape.parts
        )
        on_hosts = host_bytes(zero, _OFFLOADED[offload], self.training) * elements
        return max(need + gathered - room, on_hosts - self._hosts_bytes)

    def _copied(self, split_head: bool) -> Mapping[str, float]:
        """Return the elements of every trained parameter that copies have, by its path."""
        if split_head not in self._held:
            profile = self.findings.profile
            left = {self.findings.head_weight} if split_head else set[str | None]()
            left.update(profile.unused_parameters)
            self._held[split_head] = {
                p.path: float(p.elements) for p in profile.parameters if p.path not in left
            }
        return self._held[split_head]

    def _room_bytes(self, shape: Arrangement, part: Part) -> float:
        """Of the device with most of it that may hold the part."""
        key = (shape.devices, part.kind)
        if key not in self._rooms:
            self._rooms[key] = max(d.memory_bytes for d in self.arranged.devices(shape, part))
        return self._rooms[key]

    @cached_property
    def _hosts_bytes(self) -> float:
        """Of all hosts together; without bound where one is not known."""
        hosts = [node.host for node in self.arranged.cluster.nodes]
        return sum(inf if host is None else host.memory_bytes for host in hosts)

    @cached_property
    def _most_elements(self) -> int:
        """Of a parameter that is no head's, which may be split."""
        heads = self.findings.heads if self.findings.profile.graph else ()
        apart = {head.weight for head in heads}
        listed = self.findings.profile.parameters
        return max((p.elements for p in listed if p.path not in apart), default=0)
