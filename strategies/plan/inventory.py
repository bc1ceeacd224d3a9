"""The cluster that a plan is for, as the plan says it: a plan can be read alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_train.strategies.plan.program import OMITTED, Number


@dataclass(frozen=True)
class PlannedLink:
    """What joins devices, or hosts: one way, `latency_s` a message and its bytes by
    `bandwidth_bytes_s`."""

    name: str
    bandwidth_bytes_s: Number
    latency_s: Number


@dataclass(frozen=True)
class PlannedDevice:
    """A kind of device: FLOP/s by precision, bytes of memory, bytes/s of it. `calibrated`: times
    were predicted by what was measured of it, and not by these figures."""

    flops: Mapping[str, Number]
    memory_bytes: Number
    memory_bandwidth_bytes_s: Number
    calibrated: bool = field(default=False, metadata=OMITTED)


@dataclass(frozen=True)
class PlannedNodes:
    """`count` neighbouring nodes that are alike: the names of one's devices in order, the `link`
    that joins them, and the bytes of its host's memory, where the inventory says them."""

    count: int
    devices: tuple[str, ...]
    link: PlannedLink
    host_memory_bytes: Number | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class PlannedInventory:
    """Nodes in the order of the ranks, the kinds of their devices by name, and the `network`."""

    nodes: tuple[PlannedNodes, ...]
    devices: Mapping[str, PlannedDevice]
    network: PlannedLink
