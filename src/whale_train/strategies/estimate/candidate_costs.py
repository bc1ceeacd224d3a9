"""Compute once the costs that the estimates of candidates for one model and cluster share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale_train.strategies.cost.roofline import flops_rate
from whale_train.strategies.estimate.block_costs import BlockCosts, Seconds
from whale_train.strategies.estimate.candidates import Mesh, Part
from whale_train.strategies.estimate.gradient_times import GradientTimes
from whale_train.strategies.estimate.needs import Needs
from whale_train.strategies.estimate.transfers import Transfers
from whale_train.strategies.hardware.cluster import Cluster, Device, Link
from whale_train.strategies.plan.training import Training


@dataclass(frozen=True)
class EqualCopies:
    """Replicas of a pipeline on equal devices.

    count: number of these replicas.
    devices: device of each stage.
    samples: samples that each replica takes in a step.
    """

    count: int
    devices: tuple[Device, ...]
    samples: int


@dataclass(frozen=True)
class CandidateCosts:
    """Costs of candidates for one model on one cluster.

    blocks: costs of the model's blocks.
    cluster: the devices, all of which every candidate uses.
    training: the training that the estimates are for.
    balance: how replicas divide work, `hardware` or `even`.
    expert_sums: seconds of the reduction of experts' gradients and the link of its group, by the
        number of devices that experts are spread over.
    """

    blocks: BlockCosts
    cluster: Cluster
    training: Training
    balance: str = "hardware"
    expert_sums: dict[int, tuple[float, Link]] = field(default_factory=dict)
    _copies: dict[Mesh, Sequence[EqualCopies]] = field(default_factory=dict)
    _crossings: dict[tuple[int, int], Sequence[float]] = field(default_factory=dict)
    _totals: dict[object, float] = field(default_factory=dict)

    def total_s(self, part: Part, dim: str, samples: int) -> float:
        """Return the seconds of the whole model on a shard group of `part`, for `samples`
        samples."""
        key = (part.kind, part.shards, dim, samples)
        if key not in self._totals:
            device = self.transfers.device_of[part.kind]
            self._totals[key] = self.seconds(device, part, dim, samples).total[-1]
        return self._totals[key]

    @cached_property
    def transfers(self) -> Transfers:
        """Return the transfers between the devices."""
        return Transfers(self.cluster)

    @cached_property
    def sums(self) -> GradientTimes:
        """Return the times of exchanging gradients and weights between replicas."""
        return GradientTimes(self.blocks.findings, self.cluster, self.training, self.transfers)

    @cached_property
    def needs(self) -> Needs:
        """Return the memory of weights, gradients and optimizers."""
        return Needs(self.blocks.findings, self.cluster, self.training)

    def by_processors(self, mesh: Mesh, micro_batches: int, times_s: float) -> float:
        """Return the seconds that shared processors take for the work of all ranks; 0 where every
        rank has a processor of its own. `times_s` are the seconds of the whole model on a shard
        group, for one micro-batch."""
        if len(self.cluster.devices) <= self.cluster.processors:
            return 0.0
        passes = mesh.copies * max(1, micro_batches) * mesh.shards
        return passes * times_s / self.cluster.processors

    def copies_of(self, mesh: Mesh) -> Sequence[EqualCopies]:
        """Return the replicas of the pipeline of `mesh`, grouped by equal devices."""
        if mesh not in self._copies:
            self._copies[mesh] = self._equal_copies(mesh)
        return self._copies[mesh]

    def _equal_copies(self, mesh: Mesh) -> Sequence[EqualCopies]:
        """Return the replicas of a mesh, grouped by equal devices.

        The slowest device of each stage stands for the stage. Replicas divide samples by the speed
        of their slowest stage, or evenly as `balance` says.
        """
        parts = [part for part in mesh.parts for _ in range(part.stages)]
        batch, device_of = self.training.global_batch, self.transfers.device_of
        if mesh.by_kind or len(mesh.devices) == 1:
            devices = tuple(device_of[part.kind] for part in parts)
            return [EqualCopies(mesh.copies, devices, -(-batch // mesh.copies))]
        counts: dict[tuple[str, ...], int] = {}
        rank, all_devices = 0, self.cluster.devices
        for _ in range(mesh.copies):
            names = []
            for part in parts:
                width = part.copies * part.shards
                held = {device.name: device for device in all_devices[rank : rank + width]}
                names.append(min(held, key=lambda name: (self._rate(held[name]), name)))
                rank += width
            counts[tuple(names)] = counts.get(tuple(names), 0) + 1
        speeds = {
            names: 1.0 if self.balance == "even" else min(self._rate(device_of[n]) for n in names)
            for names in counts
        }
        total = sum(speeds[names] * count for names, count in counts.items())
        return [
            EqualCopies(
                count,
                tuple(device_of[name] for name in names),
                max(1, -int(-batch * speeds[names] // total)),
            )
            for names, count in counts.items()
        ]

    def _rate(self, device: Device) -> float:
        """Return the peak FLOP/s of a device at the precision of training."""
        return flops_rate(device, self.training.precision)

    def seconds(self, device: Device, part: Part, dim: str, samples: float) -> Seconds:
        """Return the seconds of the units on a shard group of `part`, with devices like `device`,
        for a micro-batch of `samples`."""
        shards = part.shards
        link = self.transfers.shard_link(part.kind or device.name, shards) if shards > 1 else None
        return self.blocks.seconds(device, shards, dim if shards > 1 else "auto", link, samples)

    def crossing(self, shards: int, samples: int) -> Sequence[float]:
        """Return the bytes that cross the start of every unit, and the end, for `samples`
        samples."""
        if (shards, samples) not in self._crossings:
            units = range(len(self.blocks.units(shards)))
            crossing_bytes = [self.blocks.crossing_bytes(unit, shards, samples) for unit in units]
            self._crossings[shards, samples] = crossing_bytes
        return self._crossings[shards, samples]
