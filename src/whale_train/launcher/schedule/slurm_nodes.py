"""Divide an inventory of equal nodes among jobs of Slurm, which get part of a node or whole nodes.

Slurm chooses the nodes themselves; a job is told what it has, as an inventory of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale_train.config import LauncherOptions, Request
from whale_train.errors import Fault
from whale_train.launcher.planning.devices.machine import facts_of
from whale_train.launcher.python.overrides import overrides_of
from whale_train.launcher.schedule.planned_job import counts_of
from whale_train.machine.hosts import this_host
from whale_train.strategies.hardware.cluster import SlurmRequest
from whale_train.strategies.hardware.inventory import read_inventory

# Options of sbatch for a job's size, which the schedule decides.
_SIZES = (
    *("nodes", "ntasks", "ntasks-per-node", "array", "exclusive"),
    *("gpus", "gpus-per-node", "gpus-per-socket", "gres"),
)
_NUMBERS = ("hardware.nodes", "hardware.devices")
_GPUS_PER_TASK = "gpus-per-task"  # the one option for GPUs that is the same for jobs of any size
_KIND_OF_GPU = f"launcher.sbatch.{_GPUS_PER_TASK}=KIND:1"


@dataclass(frozen=True)
class SlurmNodes:
    """Equal nodes, which all have devices of one kind.

    name: the inventory's name.
    nodes: number of nodes.
    per_node: number of devices of each.
    has_gpus: whether devices are GPUs, which jobs ask Slurm for.
    entry: the entry of a node in the inventory; None for one node of CPU processes.
    overrides: arguments that make the inventory, but for the number of its devices.
    slurm: the options by which Slurm gives a job any of them; None where there are none.
    """

    name: str
    nodes: int
    per_node: int
    has_gpus: bool
    entry: Mapping[str, Any] | None
    overrides: tuple[str, ...]
    slurm: SlurmRequest | None = None

    @classmethod
    def of(
        cls, request: Request, hardware: Sequence[str], faults: list[Fault]
    ) -> "SlurmNodes | None":
        """Return the nodes of the request's inventory, or None after adding faults where they are
        not alike, and where options of sbatch say what the schedule decides.

        hardware: command-line arguments that make the inventory.
        """
        name, content = request.names.get("hardware", "hardware"), request.hardware
        new = _faults_of_options(request.launcher)
        kind = content.get("kind")
        if kind is not None and not isinstance(content.get("devices"), int):
            rule = "is what this host has, and the jobs of a schedule run on Slurm's nodes"
            remedy = "use an inventory of those, or hardware=cpu hardware.devices=8"
            new.append(Fault("hardware", name, rule, remedy))
        cluster = read_inventory(content, name, new, facts_of(this_host(())))
        if cluster is not None:
            first = cluster.nodes[0]
            if any((x, x.slurm) != (first, first.slurm) for x in cluster.nodes) or (
                len(cluster.kinds) > 1
            ):
                rule = (
                    "has nodes or devices that differ, and a schedule does not choose Slurm's nodes"
                )
                remedy = "use an inventory of equal nodes, and a schedule for each kind"
                new.append(Fault("hardware", name, rule, remedy))
            if first.slurm is not None and first.slurm.gres is not None:
                remedy = f"leave it out; for a kind of GPU, use {_KIND_OF_GPU}"
                rule = "is decided for each job"
                new.append(Fault("hardware.nodes[].slurm.gres", first.slurm.gres, rule, remedy))
        faults += new
        if new or cluster is None:
            return None
        entry = None if kind is not None else content["nodes"][0]
        overrides = [x for x in hardware if x.partition("=")[0] not in _NUMBERS]
        per_node = len(cluster.nodes[0].devices)
        is_gpu = not cluster.on_cpu
        slurm = cluster.nodes[0].slurm
        return cls(name, len(cluster.nodes), per_node, is_gpu, entry, tuple(overrides), slurm)

    def may_hold(self, devices: int) -> bool:
        """Return whether a job can have so many devices: part of a node, or whole nodes."""
        return devices <= self.per_node or devices % self.per_node == 0

    def counts(self) -> tuple[int, ...]:
        """Return the numbers of devices that plans are made for."""
        of_one = {*counts_of(self.per_node), self.per_node}
        of_several = {nodes * self.per_node for nodes in counts_of(self.nodes)}
        return tuple(sorted(of_one | of_several))

    def size(self, devices: int) -> tuple[int, int]:
        """Return the number of nodes and the ranks per node of a job with so many devices."""
        return max(1, devices // self.per_node), min(devices, self.per_node)

    def hardware(self, devices: int) -> list[str]:
        """Return the overrides of a job for so many devices: an inventory of what it has."""
        if self.entry is None:
            return [*self.overrides, f"hardware.devices={devices}"]
        nodes, ranks = self.size(devices)
        device = self.entry["device"]
        if isinstance(device, list):  # of one kind
            device = device[0]
        entry = {**self.entry, "count": nodes, "devices": ranks, "device": device}
        return [*self.overrides, *overrides_of([{"hardware.nodes": [entry]}], {})]

    def launcher(self, options: LauncherOptions, devices: int) -> LauncherOptions:
        """Return the options of a job's submission: the schedule's, and the job's GPUs."""
        if not self.has_gpus or _GPUS_PER_TASK in map(_written, options.sbatch):
            return options
        sbatch = {**options.sbatch, "gpus-per-node": self.size(devices)[1]}
        return options.model_copy(update={"sbatch": sbatch})


def _written(key: str) -> str:
    """Return the name of an option as sbatch writes it."""
    return key.replace("_", "-")


def _faults_of_options(options: LauncherOptions) -> list[Fault]:
    """Return a fault for each option of sbatch that says what the schedule decides."""
    remedy = f"leave it out; for a kind of GPU, use {_KIND_OF_GPU}"
    return [
        Fault(f"launcher.sbatch.{key}", str(value), "is decided for each job", remedy)
        for key, value in options.sbatch.items()
        if _written(key) in _SIZES
    ]
