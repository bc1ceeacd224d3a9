"""The hardware inventory: devices, the links inside a node, the network between nodes.

Ranks are numbered in the order of the inventory's list. Nothing here looks at the machine.
"""

from dataclasses import dataclass
from functools import cached_property

CPU_PROCESS = "cpu_process"  # the catalogue's name of a device that is a process, and no GPU


@dataclass(frozen=True)
class Device:
    """One kind of accelerator (or one CPU process).

    `flops` maps a precision (`fp32`, `bf16`, `fp16`) to peak dense FLOP/s; a precision the device
    has no unit for is absent.
    """

    name: str
    flops: dict[str, float]
    memory_bytes: float
    memory_bandwidth_bytes_s: float


@dataclass(frozen=True)
class Link:
    """An alpha-beta link: `latency_s` a message plus bytes / `bandwidth_bytes_s`, one way."""

    name: str
    bandwidth_bytes_s: float
    latency_s: float


@dataclass(frozen=True)
class Node:
    """A host: its devices in order, and the link that joins them."""

    devices: tuple[Device, ...]
    link: Link


@dataclass(frozen=True)
class Cluster:
    """All nodes of an inventory, and the network that joins them."""

    name: str
    nodes: tuple[Node, ...]
    network: Link

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        return tuple(i for i, node in enumerate(self.nodes) for _ in node.devices)

    @cached_property
    def on_cpu(self) -> bool:
        """Whether all its devices are CPU processes."""
        return all(device.name == CPU_PROCESS for device in self.devices)

    def first(self, count: int) -> "Cluster":
        """The first `count` devices, in rank order."""
        nodes, left = [], count
        for node in self.nodes:
            if left > 0:
                nodes.append(Node(node.devices[:left], node.link))
                left -= len(node.devices)
        return Cluster(self.name, tuple(nodes), self.network)
