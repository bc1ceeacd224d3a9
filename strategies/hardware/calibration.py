"""What was measured of a machine's devices and links, and a cluster with these figures in it.

Owns the figures and their file's form; measuring is `runtime/calibrate/calibrate.py`'s, keeping the
files `launcher/planning/calibrations.py`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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

Kernels = Mapping[str, Mapping[str, Kernel]]  # by precision and kind


@dataclass(frozen=True)
class Calibration:
    """`device` is the catalogue's name; `threads` those of a process that is one (0: a GPU),
    `ranks` how many measured at once. `link` joins them, `shared_memory` those of a shard
    group, and stages; None where one rank alone measured."""

    device: str
    threads: int
    ranks: int
    kernels: Kernels
    link: Link | None = None
    shared_memory: Link | None = None

    @property
    def name(self) -> str:
        """What its file is called."""
        return f"{self.device}-{self.threads}-threads" if self.threads else self.device

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Calibration":
        """Return what `to_mapping` gave. Raises KeyError, TypeError, ValueError or AttributeError
        for anything else."""
        kernels = {
            str(precision): {
                str(kind): Kernel(Roofline(**each["forward"]), Roofline(**each["backward"]))
                for kind, each in kinds.items()
            }
            for precision, kinds in mapping["kernels"].items()
        }
        link, memory = (
            Link(**mapping[key]) if mapping[key] is not None else None
            for key in ("link", "shared_memory")
        )
        return cls(
            str(mapping["device"]), int(mapping["threads"]), int(mapping["ranks"]),
            kernels, link, memory,
        )  # fmt: skip


def is_measured(cluster: Cluster, precision: str) -> bool:
    """Return whether all devices of a cluster have figures that were measured at `precision`."""
    return all(precision in device.kernels for device in cluster.devices)


def calibrated(cluster: Cluster, known: Sequence[Calibration], threads: int) -> Cluster:
    """`cluster` with what is `known` of its devices; its CPU processes have `threads` each."""
    found = {x.device: x for x in known if x.threads == (threads if x.threads else 0)}
    devices: dict[int, Device] = {}
    for number, device in {id(device): device for device in cluster.devices}.items():
        there = found.get(device.name)
        devices[number] = replace(device, kernels=there.kernels if there else device.kernels)
    of_cpu = found.get(CPU_PROCESS) if cluster.on_cpu else None
    nodes = []
    for node in cluster.nodes:
        there = found.get(node.devices[0].name)
        link = there.link if there and there.link else node.link
        listed = tuple(devices[id(device)] for device in node.devices)
        nodes.append(replace(node, devices=listed, link=link))
    memory = of_cpu.shared_memory if of_cpu else cluster.shared_memory
    return replace(cluster, nodes=tuple(nodes), shared_memory=memory)


def on_cores(
    cluster: Cluster, known: Sequence[Calibration], cores: int, threads_of: Callable[[int], int]
) -> Cluster:
    """Return the CPU processes of `cluster` with what is `known` of them and the processors they
    share, which are `cores` by the threads that each has of so many; and so fewer of them, where
    these have other threads."""

    def of(count: int) -> Cluster:
        threads = threads_of(count)
        used = replace(cluster.first(count), processors=cores / threads)
        return calibrated(used, known, threads)

    there = len(cluster.devices)
    unlike = [n for n in range(1, there) if threads_of(n) != threads_of(there)]
    return replace(of(there), fewer={count: of(count) for count in unlike})


def stand_ins(
    cluster: Cluster, measured: Calibration, paces: Sequence[float] | None, processors: float
) -> Cluster:
    """Return the CPU processes that stand for the devices of `cluster`, as `measured`: each takes
    `paces` seconds for a second of computing (None: as fast as it can, `processors` of them at
    once). All are on one host, whatever nodes they stand for; those that keep a pace share no
    memory."""
    first = Device(CPU_PROCESS, {}, 0.0, 1.0, measured.kernels)
    slowed = {pace: _slowed(first, pace) for pace in set(paces or (1.0,))}
    devices = tuple(slowed[pace] for pace in paces or (1.0,) * len(cluster.devices))
    link = measured.link or cluster.network
    return Cluster(
        cluster.name, (Node(devices, link),), link,
        *((processors, measured.shared_memory) if paces is None else (float("inf"), None)),
    )  # fmt: skip


def _slowed(device: Device, pace: float) -> Device:
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
