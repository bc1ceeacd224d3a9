"""The hardware inventory: devices, the links inside a node, the network between nodes.

Ranks are numbered in the order of the inventory's list. Nothing here looks at the machine.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

CPU_PROCESS = "cpu_process"  # the catalogue's name of a device that is a process, and no GPU


@dataclass(frozen=True)
class Roofline:
    """What operations of one kind reach: `overhead_s` each, then arithmetic at `flops_s` FLOP/s and
    memory traffic at `bytes_s` bytes/s. After Williams et al., "Roofline" (CACM 2009), whose two
    times hide under each other; within one operation they hardly do, so they are added. Traffic is
    counted in fp32 (`op_work.py`)."""

    overhead_s: float
    flops_s: float
    bytes_s: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        return self.overhead_s + flops / self.flops_s + num_bytes / self.bytes_s


@dataclass(frozen=True)
class Kernel:
    """The rooflines of a kind of operation: of its forward, and of all its backward does."""

    forward: Roofline
    backward: Roofline


@dataclass(frozen=True)
class HostShare:
    """What one device has of its host, in bytes/s: of the memory, for the optimizer of what is kept
    there, and of the link between the two, one way."""

    memory_bytes_s: float
    link_bytes_s: float


@dataclass(frozen=True)
class Reached:
    """What operations reach of a device's peaks, as parts of them, until it is calibrated: large
    `products` and fused `attention` (None: what it reaches of such a device's) of its FLOP/s, what
    reads and writes of its memory `bandwidth`; and what starting one takes. The defaults are what
    the cost model of meta-pytorch's autoparallel assumes of every GPU."""

    products: float = 0.7
    attention: float | None = None
    bandwidth: float = 0.7
    overhead_s: float = 7e-6


@dataclass(frozen=True)
class Device:
    """One kind of accelerator (or one CPU process).

    `flops` maps a precision (`fp32`, `bf16`, `fp16`) to peak dense FLOP/s; a precision the device
    has no unit for is absent. `kernels` are what was measured on it (`mode=calibrate`): by
    precision, then by kind of operation; for all else it has `reached` so much of its peaks.
    `host` is absent where the inventory does not say. `reserved_bytes` of its memory are no
    tensor's: CUDA's context, the workspaces of its libraries, NCCL's buffers.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth_bytes_s: float
    kernels: Mapping[str, Mapping[str, Kernel]] = field(default_factory=dict)
    host: HostShare | None = None
    reached: Reached = Reached()
    reserved_bytes: float = 0.0

    @property
    def room_bytes(self) -> float:
        """What tensors may take of its memory."""
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True)
class Link:
    """An alpha-beta link: `latency_s` a message plus bytes / `bandwidth_bytes_s`, one way. `busy`
    is the part of a transfer's time for which the devices it joins cannot compute, as processors
    cannot that copy the bytes themselves."""

    name: str
    bandwidth_bytes_s: float
    latency_s: float
    busy: float = 0.0


@dataclass(frozen=True)
class Host:
    """What holds devices: its memory, and the link that each of them has to it."""

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_s: float
    link: Link


@dataclass(frozen=True)
class Node:
    """A host: its devices in order, the link that joins them, and what is known of itself. `at`
    names the host that it is, where one was found to be it."""

    devices: tuple[Device, ...]
    link: Link
    host: Host | None = None
    at: str = ""


@dataclass(frozen=True)
class Cluster:
    """All nodes of an inventory, and the network that joins them. Where its devices are processes
    of one host, `processors` are what they share to compute on, and `shared_memory` joins those of
    a shard group, and stages; `fewer` are so many of them alone, where each then has other
    threads."""

    name: str
    nodes: tuple[Node, ...]
    network: Link
    processors: float = inf
    shared_memory: Link | None = None
    fewer: Mapping[int, "Cluster"] = field(default_factory=dict)

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

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """The number of devices of each kind."""
        return Counter(device.name for device in self.devices)

    def in_tf32(self) -> "Cluster":
        """Return the cluster with the FLOP/s in fp32 of devices whose tensor cores compute that in
        TF32: half of bf16's, which came with the same generation (NVIDIA's whitepapers of GA100,
        GA102, AD102, GH100 and RTX Blackwell)."""

        def of(device: Device) -> Device:
            rate = max(device.flops.get("fp32", 0.0), device.flops.get("bf16", 0.0) / 2)
            return replace(device, flops={**device.flops, "fp32": rate})

        known = {id(device): of(device) for device in self.devices}
        nodes = tuple(
            replace(node, devices=tuple(known[id(device)] for device in node.devices))
            for node in self.nodes
        )
        return replace(self, nodes=nodes)

    def chosen(self, devices: "int | Mapping[str, int] | None") -> "Cluster":
        """Return the devices that a strategy's `devices:` names: all (None), the first so many in
        rank order, or so many of each kind. There have to be as many."""
        if devices is None:
            return self
        return self.first(devices) if isinstance(devices, int) else self.of_kinds(devices)

    def of_kinds(self, counts: Mapping[str, int]) -> "Cluster":
        """Return `counts` devices of each kind, as they are where the others stay idle, and number
        their ranks kind by kind, in the order of `counts`. Nodes with most devices of a kind come
        first, so that neither the choice nor the order depends on that of the inventory."""
        if len(self.kinds) == 1 and self.fewer:  # processes with other threads where they are fewer
            return self.first(sum(counts.values()))
        places = {kind: place for place, kind in enumerate(counts)}
        left, nodes = dict(counts), []
        for node in sorted(self.nodes, key=lambda node: _precedence(node, places)):
            used = []
            for device in node.devices:
                if left.get(device.name, 0) > 0:
                    left[device.name] -= 1
                    used.append(device)
            if used:
                nodes.append(replace(node, devices=tuple(used)))
        return replace(self, nodes=tuple(nodes), fewer={})

    def first(self, count: int) -> "Cluster":
        """Return the first `count` devices, in rank order, as they are where the others stay
        idle."""
        if count in self.fewer:
            return self.fewer[count]
        nodes, left = [], count
        for node in self.nodes:
            if left > 0:
                nodes.append(replace(node, devices=node.devices[:left]))
                left -= len(node.devices)
        fewer = {number: each for number, each in self.fewer.items() if number < count}
        return replace(self, nodes=tuple(nodes), fewer=fewer)


def _precedence(node: Node, places: Mapping[str, int]) -> tuple[object, ...]:
    """Return the sort key of a node: by the first of its kinds in `places`, the fullest first."""
    kinds = Counter(device.name for device in node.devices if device.name in places)
    first = min((places[kind] for kind in kinds), default=len(places))
    full = sorted((places[kind], -number) for kind, number in kinds.items())
    return first, full, -node.link.bandwidth_bytes_s, -len(node.devices)
