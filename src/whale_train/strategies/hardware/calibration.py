"""Measured figures of a machine's devices and links, and a cluster with these figures.

Owns the figures and the format of their file. `runtime/calibrate/calibrate.py` measures;
`launcher/planning/devices/calibrations.py` keeps the files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from whale_train.strategies.hardware.cluster import (
    CPU_PROCESS,
    Cluster,
    Device,
    Kernel,
    Link,
    Node,
    Roofline,
)

CHECKSUM = "checksum"
PRECISIONS = ("fp32", "bf16", "fp16")
_REQUIRED = ("device", "threads", "ranks", "kernels", "link", "shared_memory")
_PASSES = ("forward", "backward")
_ROOFLINE = ("overhead_s", "flops_s", "bytes_s")
_LINK = ("name", "bandwidth_bytes_s", "latency_s")
_UNSAID = "unsaid"  # stands for the missing checksum of an edited file
_SMALLEST = 1e-6  # the lowest rate of a device
_UNBOUND = 1e30  # the rate that a fit writes where no measurement reached its limit
_NONE: Mapping[str, Any] = MappingProxyType({})

Kernels = Mapping[str, Mapping[str, Kernel]]  # by precision and kind


@dataclass(frozen=True)
class Calibration:
    """Measured figures of one kind of device.

    device: the name in the catalogue.
    threads: the threads of a CPU process; 0 for a GPU.
    ranks: the number of ranks that measured at the same time.
    kernels: the rooflines, by precision and kind of operation.
    link: the link between the ranks; None where a single rank measured.
    shared_memory: the link between the ranks of a shard group, and between stages; None where a
        single rank measured.
    """

    device: str
    threads: int
    ranks: int
    kernels: Kernels
    link: Link | None = None
    shared_memory: Link | None = None

    @property
    def name(self) -> str:
        """Return the name of the calibration's file."""
        return f"{self.device}-{self.threads}-threads" if self.threads else self.device

    def to_mapping(self) -> dict[str, Any]:
        """Return the content of the calibration's file, with the checksum of the figures."""
        mapping = asdict(self)
        return {**mapping, CHECKSUM: calibration_checksum(mapping)}

    @classmethod
    def from_mapping(cls, mapping: Any) -> "Calibration":
        """Return the calibration in `mapping`, the content of a file.

        A file that was edited by hand has no checksum. Raises ValueError for a mapping that
        `to_mapping` does not give, for figures out of range, and for a checksum that does not match
        the figures.
        """
        fields = _fields(mapping, "the file", _REQUIRED, {CHECKSUM: _UNSAID})
        checksum = fields.pop(CHECKSUM)
        kernels = {
            precision: {
                kind: Kernel(*(_roofline(both[x], f"{kind}.{x}") for x in _PASSES))
                for kind, both in (
                    (kind, _fields(given, kind, _PASSES))
                    for kind, given in _mapping(kinds, f"kernels.{precision}").items()
                )
            }
            for precision, kinds in _mapping(fields["kernels"], "kernels").items()
        }
        unknown = [x for x in kernels if x not in PRECISIONS]
        if unknown:
            raise ValueError(f"kernels has {unknown[0]}, which is no precision")
        calibration = cls(
            _name(fields["device"], "device"), _count(fields["threads"], "threads", 0),
            _count(fields["ranks"], "ranks", 1), kernels,
            *(_link(fields[x], x) for x in ("link", "shared_memory")),
        )  # fmt: skip
        if checksum != _UNSAID and checksum != calibration_checksum(fields):
            rule = f"its {CHECKSUM} is not that of its figures"
            raise ValueError(f"{rule}: damaged, or edited, and then without that line")
        return calibration


def calibration_checksum(mapping: Mapping[str, Any]) -> str:
    """Return the checksum of a calibration's figures, which is independent of the order of the
    keys."""
    content = {key: value for key, value in mapping.items() if key != CHECKSUM}
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fields(
    value: Any, label: str, required: Sequence[str], optional: Mapping[str, Any] = _NONE
) -> dict[str, Any]:
    fields = _mapping(value, label)
    for key in required:
        if key not in fields:
            raise ValueError(f"{label} has no {key}")
    for key in fields:
        if key not in required and key not in optional:
            raise ValueError(f"{label} has {key}, which is none of its keys")
    return {**optional, **fields}


def _mapping(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{label} is not a mapping")
    return value


def _roofline(value: Any, label: str) -> Roofline:
    fields = _fields(value, label, _ROOFLINE)
    rates = (_figure(fields[x], f"{label}.{x}", _SMALLEST, _UNBOUND) for x in _ROOFLINE[1:])
    return Roofline(_figure(fields["overhead_s"], f"{label}.overhead_s", 0), *rates)


def _link(value: Any, label: str) -> Link | None:
    if value is None:
        return None
    fields = _fields(value, label, _LINK, {"busy": 0.0})
    return Link(
        _name(fields["name"], f"{label}.name"),
        _figure(fields["bandwidth_bytes_s"], f"{label}.bandwidth_bytes_s", _SMALLEST),
        _figure(fields["latency_s"], f"{label}.latency_s", 0),
        _figure(fields["busy"], f"{label}.busy", 0, 1),
    )


def _figure(value: Any, label: str, smallest: float, largest: float = 1e24) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not smallest <= value <= largest:
        raise ValueError(f"{label} is no number from {smallest:g} to {largest:g}")
    return float(value)


def _count(value: Any, label: str, smallest: int) -> int:
    if type(value) is not int or not smallest <= value <= 100_000:
        raise ValueError(f"{label} is no whole number from {smallest} to 100000")
    return value


def _name(value: Any, label: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{label} is no name")
    return value


def is_measured(cluster: Cluster, precision: str) -> bool:
    """Return True if all devices of a cluster have figures measured at `precision`."""
    return all(device.measured(precision) for device in cluster.devices)


def calibrated(cluster: Cluster, known: Sequence[Calibration], threads: int) -> Cluster:
    """Return `cluster` with the figures of the calibrations `known`. Each of its CPU processes has
    `threads` threads."""
    calibrations = {x.device: x for x in known if x.threads == (threads if x.threads else 0)}
    devices: dict[int, Device] = {}
    for number, device in {id(device): device for device in cluster.devices}.items():
        calibration = calibrations.get(device.name)
        devices[number] = replace(
            device, kernels=calibration.kernels if calibration else device.kernels
        )
    of_cpu = calibrations.get(CPU_PROCESS) if cluster.on_cpu else None
    nodes = []
    for node in cluster.nodes:
        calibration = calibrations.get(node.devices[0].name)
        link = calibration.link if calibration and calibration.link else node.link
        node_devices = tuple(devices[id(device)] for device in node.devices)
        nodes.append(replace(node, devices=node_devices, link=link))
    memory = of_cpu.shared_memory if of_cpu else cluster.shared_memory
    return replace(cluster, nodes=tuple(nodes), shared_memory=memory)


def on_cores(
    cluster: Cluster, known: Sequence[Calibration], cores: int, threads_of: Callable[[int], int]
) -> Cluster:
    """Return the CPU processes of `cluster` on `cores` cores, with the figures of the calibrations
    `known`.

    `threads_of` returns the threads of each process, given the number of processes. The processes
    share `cores` / threads processors. Each smaller number of processes with another number of
    threads is a cluster of its own in `fewer`.
    """

    def of(count: int) -> Cluster:
        threads = threads_of(count)
        used = replace(cluster.first(count), processors=cores / threads)
        return calibrated(used, known, threads)

    num_devices = len(cluster.devices)
    unlike = [n for n in range(1, num_devices) if threads_of(n) != threads_of(num_devices)]
    return replace(of(num_devices), fewer={count: of(count) for count in unlike})


def stand_ins(
    cluster: Cluster, measured: Calibration, paces: Sequence[float] | None, processors: float
) -> Cluster:
    """Return the CPU processes that stand for the devices of `cluster`, with the figures
    `measured`.

    paces: the seconds that each process takes for a second of computation. None: each runs at full
        speed, with `processors` of them computing at the same time.

    All processes are on one host, whatever nodes they stand for. Processes with a pace share no
    memory.
    """
    first = Device(CPU_PROCESS, {}, 0.0, 1.0, measured.kernels)
    slowed = {pace: _slowed(first, pace) for pace in set(paces or (1.0,))}
    devices = tuple(slowed[pace] for pace in paces or (1.0,) * len(cluster.devices))
    link = measured.link or cluster.network
    return Cluster(
        cluster.name, (Node(devices, link),), link,
        *((processors, measured.shared_memory) if paces is None else (float("inf"), None)),
    )  # fmt: skip


def _slowed(device: Device, pace: float) -> Device:
    """Return `device` with all measured rooflines slowed down by a factor of `pace`."""

    def slower(roofline: Roofline) -> Roofline:
        return Roofline(
            pace * roofline.overhead_s, roofline.flops_s / pace, roofline.bytes_s / pace
        )

    kernels = {
        precision: {
            kind: Kernel(slower(kernel.forward), slower(kernel.backward))
            for kind, kernel in kinds.items()
        }
        for precision, kinds in device.kernels.items()
    }
    return replace(device, kernels=kernels)
