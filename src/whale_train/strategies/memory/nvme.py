"""State in files of the hosts' disks: its bytes, its host buffers, and the seconds to move it.

DeepSpeed 0.19.8 keeps each sub-group's optimizer state in files (`runtime/swap_tensor`). Everything
under 1 MB stays in the host's memory, which is counted as if it were in files.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf

from whale_train.errors import Fault, PlanError
from whale_train.quantities import in_bytes
from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.hardware.cluster import Cluster, NvmeFigures
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.plan.training import BUCKET_ELEMENTS, Training

# Nominal, for a host whose disks the inventory does not describe: the ceiling of PCI Express 3.0
# with 4 lanes, the link of one NVMe disk (8 GT/s x 4 lanes x 128/130 / 8 bits).
_NOMINAL = NvmeFigures(inf, 3.94e9, 3.94e9)
_UPDATE_BUFFERS = 4  # `buffer_count` of `offload_optimizer`, by default


def in_files(node: Replicate) -> Sequence[str]:
    """Return the names of the state that `node` keeps in files: `optimizer`, `parameters`, both or
    none."""
    return [w for w in ("optimizer", "parameters") if getattr(node, f"offload_{w}") == "nvme"]


def file_bytes(states: Collection[str], training: Training) -> float:
    """Return the bytes in files for one element of a parameter, where `states` are in files.

    The optimizer has an fp32 value, its states and the gradient. Parameters are fp32.
    """
    optimizer = 4 * (2 + training.optimizer_states) if "optimizer" in states else 0
    return optimizer + (4 if "parameters" in states else 0)


def buffer_bytes(states: Collection[str], parts: Iterable[tuple[str, float]]) -> float:
    """Return the bytes of a rank's host buffers for state in files.

    parts: path and elements of the rank's part of each parameter.

    An update has four buffers of the largest sub-group, which a parameter fills beyond one bucket
    at most. Weights have two for each weight that a module gathers, of the largest part.
    """
    parts = list(parts)
    largest = max((count for _, count in parts), default=0.0)
    num_bytes = 0.0
    if "optimizer" in states:
        group = min(sum(count for _, count in parts), BUCKET_ELEMENTS + largest)
        num_bytes += _UPDATE_BUFFERS * 4 * group
    if "parameters" in states:
        together: dict[str, int] = {}
        for path, _ in parts:
            module = path.rpartition(".")[0]
            together[module] = together.get(module, 0) + 1
        num_bytes += 2 * max(together.values(), default=0) * 4 * largest
    return num_bytes


def read_time_s(num_bytes: float, ranks: Iterable[int], cluster: Cluster) -> float:
    """Return the seconds in which each of `ranks` reads `num_bytes` from its host's disks, which
    all devices of the host share."""
    return max(num_bytes * _sharers(cluster, r) / _disks(cluster, r).read_bytes_s for r in ranks)


def swap_time_s(
    elements: float, states: Collection[str], training: Training, rank: int, cluster: Cluster
) -> float:
    """Return the seconds of a rank's reads and writes at an update of `elements` elements of which
    `states` are in files.

    The gradient is written. The optimizer's files are read, and all but the gradient written again;
    weights are written.
    """
    disks, own = _disks(cluster, rank), elements * _sharers(cluster, rank)
    read_bytes = written_bytes = 0.0
    if "optimizer" in states:
        read_bytes = file_bytes(("optimizer",), training)
        written_bytes = read_bytes
    written_bytes += file_bytes(("parameters",), training) if "parameters" in states else 0.0
    return own * (read_bytes / disks.read_bytes_s + written_bytes / disks.write_bytes_s)


def kept_in_files(
    node: Replicate | None, of_ranks: Callable[[], Sequence[float]], cluster: Cluster
) -> Iterator[Decision]:
    """Yield the note of the bytes in files of every host, where `node` keeps state in files.

    of_ranks: returns the bytes in files of every rank.

    Raises PlanError where a host's disks have less room.
    """
    if node is None or not (states := in_files(node)):
        return
    loads = [0.0] * len(cluster.nodes)
    for number, num_bytes in zip(cluster.node_of, of_ranks(), strict=True):
        loads[number] += num_bytes
    path = f"{node.path}.offload"
    for number, (load, host) in enumerate(zip(loads, cluster.nodes, strict=True)):
        if host.nvme is not None and load > host.nvme.bytes:
            rule = f"keeps {in_bytes(load)} in files of host {number} of hardware={cluster.name}, "
            rule += f"{in_bytes(load - host.nvme.bytes)} more than the room of its disks"
            remedy = f"use {path}.optimizer=cpu, or more hosts"
            raise PlanError([Fault(path, "nvme", rule, remedy)])
    reason = f"{' and '.join(states)} in files: {in_bytes(sum(loads))} in all"
    if len(loads) > 1:
        reason += f", at most {in_bytes(max(loads))} on each of {len(loads)} hosts"
    if any(host.nvme is None for host in cluster.nodes):
        reason += f"; hardware={cluster.name} says nothing of disks, and one at "
        reason += f"{in_bytes(_NOMINAL.read_bytes_s)}/s is taken"
    yield Decision(path, "nvme", "", reason)


def _disks(cluster: Cluster, rank: int) -> NvmeFigures:
    """Return the figures of the disks of the host of `rank`."""
    return cluster.nodes[cluster.node_of[rank]].nvme or _NOMINAL


def _sharers(cluster: Cluster, rank: int) -> int:
    """Return the number of devices on the host of `rank`."""
    return len(cluster.nodes[cluster.node_of[rank]].devices)
