"""The hardware inventory: devices, the links inside a node, the network between nodes.

Ranks are numbered in the order of the inventory's list. Nothing here inspects the machine.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

CPU_PROCESS = "cpu_process"  # the catalogue's name of a device that is a CPU process


@dataclass(frozen=True)
class Roofline:
    """Rates that operations of one kind reach on a device.

    overhead_s: seconds of overhead of each operation.
    flops_s: FLOP/s of arithmetic.
    bytes_s: bytes/s of memory traffic, which is counted in fp32 (`op_work.py`).

    After Williams et al., "Roofline" (CACM 2009), where arithmetic and traffic overlap. Within one
    operation they hardly do, so their times are added.
    """

    overhead_s: float
    flops_s: float
    bytes_s: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Return the seconds of one operation of `flops` FLOP that moves `num_bytes` bytes."""
        return self.overhead_s + flops / self.flops_s + num_bytes / self.bytes_s


@dataclass(frozen=True)
class Kernel:
    """Rooflines of a kind of operation.

    forward: the roofline of the forward.
    backward: the roofline of the full backward.
    """

    forward: Roofline
    backward: Roofline

    def faster(self, factor: float) -> "Kernel":
        """Return the kernel with `factor` times the rates of arithmetic."""
        forward, backward = (
            replace(x, flops_s=factor * x.flops_s) for x in (self.forward, self.backward)
        )
        return Kernel(forward, backward)


@dataclass(frozen=True)
class HostShare:
    """The share of a host's bandwidths that one device has.

    memory_bytes_s: bytes/s of the host's memory, for updates of offloaded optimizer state.
    link_bytes_s: bytes/s, one way, of the link between the device and the host.
    """

    memory_bytes_s: float
    link_bytes_s: float


@dataclass(frozen=True)
class Reached:
    """Fractions of a device's peaks that operations reach, until the device is calibrated.

    products: fraction of the FLOP/s that large products reach.
    attention: fraction of the FLOP/s that fused attention reaches; None where nothing was published
        for the device, which then takes the value of similar devices.
    bandwidth: fraction of the memory bandwidth that reads and writes reach.
    overhead_s: seconds to start an operation.

    The defaults are those of the cost model of meta-pytorch's autoparallel for every GPU.
    """

    products: float = 0.7
    attention: float | None = None
    bandwidth: float = 0.7
    overhead_s: float = 7e-6


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, or one CPU process.

    name: the name in the catalogue or in the inventory.
    flops: peak dense FLOP/s by precision (`fp32`, `bf16`, `fp16`, `fp8`). A precision without a
        unit is absent.
    memory_bytes: bytes of its memory.
    memory_bandwidth_bytes_s: peak bytes/s of its memory.
    kernels: the rooflines measured on it (`mode=calibrate`), by precision and kind of operation.
    host: its share of its host; None where the inventory does not say.
    reached: the fractions of its peaks reached by operations that were not measured.
    reserved_bytes: bytes of its memory that are not available for tensors: CUDA's context,
        workspaces of libraries, NCCL's buffers.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth_bytes_s: float
    kernels: Mapping[str, Mapping[str, Kernel]] = field(default_factory=dict)
    host: HostShare | None = None
    reached: Reached = Reached()
    reserved_bytes: float = 0.0

    def measured(self, precision: str) -> Mapping[str, Kernel]:
        """Return the rooflines measured at `precision`, by kind of operation. Calibrations measure
        no products in fp8, where all else runs in bf16: for fp8 they are bf16's."""
        return self.kernels.get("bf16" if precision == "fp8" else precision, {})

    @property
    def room_bytes(self) -> float:
        """Return the bytes of the device's memory that are available for tensors."""
        return self.memory_bytes - self.reserved_bytes


@dataclass(frozen=True)
class Link:
    """An alpha-beta link: a message takes `latency_s` plus its bytes / `bandwidth_bytes_s`, one
    way.

    name: the name in the catalogue or in the inventory.
    bandwidth_bytes_s: bytes/s in one direction.
    latency_s: seconds of an empty message.
    busy: fraction of a transfer's time for which the joined devices cannot compute, as with
        processors that copy the bytes themselves.
    """

    name: str
    bandwidth_bytes_s: float
    latency_s: float
    busy: float = 0.0


@dataclass(frozen=True)
class HostFigures:
    """A machine that holds devices.

    name: the name in the catalogue or in the inventory.
    memory_bytes: bytes of its memory.
    memory_bandwidth_bytes_s: bytes/s of its memory.
    link: the link between it and each of its devices.
    """

    name: str
    memory_bytes: float
    memory_bandwidth_bytes_s: float
    link: Link


@dataclass(frozen=True)
class NvmeFigures:
    """The NVMe disks of a host, together.

    bytes: bytes of room for what is offloaded.
    read_bytes_s: bytes/s of reads.
    write_bytes_s: bytes/s of writes.
    """

    bytes: float
    read_bytes_s: float
    write_bytes_s: float


@dataclass(frozen=True)
class SlurmRequest:
    """Options of sbatch by which a job of Slurm gets nodes of one kind.

    partition: name of the partition.
    constraint: features that a node must have, in the form of sbatch.
    gres: generic resources of each node, as `gpu:v100:8`.
    account: the account that is charged.
    qos: quality of service.
    reservation: name of the reservation.
    mem: memory of each node, as `64G`.
    cpus_per_task: number of cores of each rank.

    None leaves an option out.
    """

    partition: str | None = None
    constraint: str | None = None
    gres: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    mem: str | None = None
    cpus_per_task: int | None = None


@dataclass(frozen=True)
class Node:
    """A host of the inventory.

    devices: its devices, in order.
    link: the link that joins them.
    host: the figures of the host itself; None where they are unknown.
    at: the name of the machine that was identified as this node; '' for none.
    nvme: the figures of its NVMe disks; None where they are unknown.
    slurm: the options by which Slurm gives a job this node; None where there are none. Nodes that
        differ by them alone are equal, since a plan does not depend on them.
    """

    devices: tuple[Device, ...]
    link: Link
    host: HostFigures | None = None
    at: str = ""
    nvme: NvmeFigures | None = None
    slurm: SlurmRequest | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Cluster:
    """All nodes of an inventory, and the network that joins them.

    name: the inventory's name.
    nodes: the nodes, in the order of ranks.
    network: the link between nodes.
    processors: the number of processors that the devices share, where they are processes of one
        host.
    shared_memory: the link between the processes of a shard group, and between stages, where they
        are on one host.
    fewer: the cluster of a smaller number of devices, by that number, where each then has another
        number of threads.
    """

    name: str
    nodes: tuple[Node, ...]
    network: Link
    processors: float = inf
    shared_memory: Link | None = None
    fewer: Mapping[int, "Cluster"] = field(default_factory=dict)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the device of each rank."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Return the index of each rank's node."""
        return tuple(i for i, node in enumerate(self.nodes) for _ in node.devices)

    @cached_property
    def on_cpu(self) -> bool:
        """Return True if all devices are CPU processes."""
        return all(device.name == CPU_PROCESS for device in self.devices)

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """Return the number of devices of each kind, by the device's name."""
        return Counter(device.name for device in self.devices)

    def in_tf32(self) -> "Cluster":
        """Return the cluster with the fp32 FLOP/s of TF32, on devices whose tensor cores support
        it.

        The rate is half of bf16's, which came with the same generation (NVIDIA's whitepapers of
        GA100, GA102, AD102, GH100 and RTX Blackwell). A device with a higher fp32 rate, or without
        bf16, keeps its own.
        """

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
        """Return the cluster of the devices that a strategy's `devices:` names.

        None means all devices, a number that many in rank order, and a mapping that many of each
        kind. The cluster must have enough.
        """
        if devices is None:
            return self
        return self.first(devices) if isinstance(devices, int) else self.of_kinds(devices)

    def of_kinds(self, counts: Mapping[str, int]) -> "Cluster":
        """Return the cluster of `counts` devices of each kind; the other devices stay idle.

        Ranks are numbered kind by kind, in the order of `counts`. Nodes with the most devices of a
        kind come first, so that neither the choice nor the order depends on the inventory's order.
        """
        if len(self.kinds) == 1 and self.fewer:  # fewer processes have more threads each
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
        """Return the cluster of the first `count` devices in rank order; the other devices stay
        idle."""
        if count in self.fewer:
            return self.fewer[count]
        nodes, left = [], count
        for node in self.nodes:
            if left > 0:
                nodes.append(replace(node, devices=node.devices[:left]))
                left -= len(node.devices)
        fewer = {number: cluster for number, cluster in self.fewer.items() if number < count}
        return replace(self, nodes=tuple(nodes), fewer=fewer)


def _precedence(node: Node, places: Mapping[str, int]) -> tuple[object, ...]:
    """Return the sort key of a node. Nodes of the first kind in `places` come first, the fullest
    before the others. Ties go to the node with the faster link, then to the one with more
    devices."""
    kinds = Counter(device.name for device in node.devices if device.name in places)
    first = min((places[kind] for kind in kinds), default=len(places))
    full = sorted((places[kind], -number) for kind, number in kinds.items())
    return first, full, -node.link.bandwidth_bytes_s, -len(node.devices)
