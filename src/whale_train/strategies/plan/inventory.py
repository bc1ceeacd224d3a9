"""Describe the cluster of a plan, so that the plan is self-contained."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_train.strategies.plan.program import OMITTED, Number


@dataclass(frozen=True)
class PlannedLink:
    """Link between devices, or between hosts; its figures are for one direction.

    name: name of the link.
    bandwidth_bytes_s: bytes per second.
    latency_s: seconds of an empty message.
    """

    name: str
    bandwidth_bytes_s: Number
    latency_s: Number


@dataclass(frozen=True)
class PlannedDevice:
    """A kind of device.

    flops: FLOP/s by precision.
    memory_bytes: bytes of memory.
    memory_bandwidth_bytes_s: bytes per second of memory.
    calibrated: True if times were predicted from measurements of the device instead of these
        figures.
    reserved_bytes: bytes of memory that are not available for tensors, such as CUDA's context.
    """

    flops: Mapping[str, Number]
    memory_bytes: Number
    memory_bandwidth_bytes_s: Number
    calibrated: bool = field(default=False, metadata=OMITTED)
    reserved_bytes: Number = field(default=0, metadata=OMITTED)

    @property
    def room_bytes(self) -> float:
        """Return the bytes of memory that are available for tensors."""
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True)
class PlannedNodes:
    """Consecutive equal nodes.

    count: number of nodes.
    devices: names of one node's devices, in order.
    link: link that joins the devices of a node.
    host_memory_bytes: bytes of a host's memory, if the inventory has them.
    """

    count: int
    devices: tuple[str, ...]
    link: PlannedLink
    host_memory_bytes: Number | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True)
class PlannedInventory:
    """The cluster of a plan.

    nodes: nodes in the order of the ranks.
    devices: kinds of devices, by name.
    network: link that joins the nodes.
    """

    nodes: tuple[PlannedNodes, ...]
    devices: Mapping[str, PlannedDevice]
    network: PlannedLink
