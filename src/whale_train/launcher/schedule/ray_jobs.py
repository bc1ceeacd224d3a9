"""Run jobs of a schedule on a Ray cluster: each is a `whale-train launcher=ray` on the Ray nodes of
its devices.

A job's process on this host holds the job's placement group. It gives the group back when the job
ends, and the schedule starts the job again in another group under its other plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.python.overrides import overrides_of
from whale_train.launcher.ranks.on_ray.bundles import bundles_of
from whale_train.launcher.ranks.on_ray.ray_cluster import connected, living_nodes, placed
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.schedule.job_process import TrainingProcess
from whale_train.launcher.schedule.planned_job import counts_of
from whale_train.strategies.cluster_scheduling.schedulable_job import Allocation

_NUMBERS = ("hardware.nodes", "hardware.devices")


@dataclass(frozen=True)
class RayStarter:
    """Start jobs on a Ray cluster, as a `JobStarter`.

    hardware: arguments that make the inventory, but for its devices, and the ranks' threads.
    entries: the inventory's `nodes`; empty for CPU processes without nodes.
    launcher: the options of `launcher` that jobs have in common.
    ids: the id of the Ray node of each node of the inventory; empty where Ray chooses.
    """

    hardware: tuple[str, ...]
    entries: tuple[Mapping[str, Any], ...]
    launcher: Mapping[str, Any]
    ids: tuple[str, ...]

    def counts(self, devices: int) -> tuple[int, ...]:
        """Return the numbers of devices that plans are made for."""
        return counts_of(devices)

    def may_hold(self, devices: int) -> bool:
        """Return True: a job may have any number of the devices."""
        return True

    def start(
        self,
        request: Request,
        arguments: Sequence[str],
        allocation: Allocation,
        slots: tuple[int, ...],
        run_dir: Path,
    ) -> TrainingProcess:
        """Start a job on the devices `slots`, its output appended to a log beside `run_dir`."""
        on = ["launcher=ray", *self.hardware, *self.devices(slots)]
        return TrainingProcess.start([*arguments, *on], {}, allocation, slots, run_dir)

    def devices(self, slots: Sequence[int]) -> list[str]:
        """Return the overrides of a job on the devices `slots`: an inventory of those, and the Ray
        nodes that have them."""
        launcher = {f"launcher.{key}": value for key, value in self.launcher.items()}
        if not self.entries:
            return [f"hardware.devices={len(slots)}", *overrides_of([launcher], {})]
        nodes, numbers = nodes_with(self.entries, slots)
        if self.ids:
            launcher["launcher.hosts"] = [self.ids[number] for number in numbers]
        return overrides_of([{"hardware.nodes": nodes}, launcher], {})


def nodes_with(
    entries: Sequence[Mapping[str, Any]], slots: Sequence[int]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the entries of an inventory's nodes with the devices `slots` alone, and the number of
    the node that each is part of. Nodes without such a device are left out.

    entries: `nodes` of an inventory without faults.
    """
    parts: list[dict[str, Any]] = []
    numbers: list[int] = []
    number = first = 0
    for entry in entries:
        count, device = int(entry["devices"]), entry["device"]
        kinds = list(device) if isinstance(device, Sequence) and not isinstance(device, str) else []
        for _ in range(int(entry.get("count", 1))):
            held = [slot - first for slot in slots if first <= slot < first + count]
            if held:
                own = [kinds[place % len(kinds)] for place in held] if kinds else device
                parts.append({**entry, "count": 1, "devices": len(held), "device": own})
                numbers.append(number)
            number, first = number + 1, first + count
    return parts, numbers


def ray_starter(request: Request, hardware: Sequence[str], signals: StopSignals) -> RayStarter:
    """Return the starter of a schedule whose jobs run on a Ray cluster.

    Unless the jobs are simulated, the whole inventory is reserved once and given back, so that it
    is known to be there, and on which Ray nodes.

    request: the request of the schedule.
    hardware: command-line arguments that make its inventory, and the ranks' threads.

    Raises ConfigError for an inventory without a number of devices, and where Ray or the inventory
    is not there.
    """
    content = request.hardware
    entries = tuple(content.get("nodes", ()))
    if not entries and not isinstance(content.get("devices"), int):
        rule = "is what this host has, and the jobs of a schedule run on Ray's nodes"
        remedy = "use an inventory of those, or hardware=cpu hardware.devices=8"
        name = request.names.get("hardware", "hardware")
        raise ConfigError([Fault("hardware", name, rule, remedy)])
    options = request.launcher
    launcher: dict[str, Any] = {"placement_s": options.placement_s}
    if options.address is not None:
        launcher["address"] = options.address
    if not entries and options.hosts:
        launcher["hosts"] = list(options.hosts)
    ids: tuple[str, ...] = ()
    if not request.schedule.simulate:
        with connected(options.address):
            nodes = living_nodes()
            asked = bundles_of(request, nodes)
            with placed(asked, nodes, options.placement_s, signals.poll) as group:
                ids = tuple(node.id for node in group.nodes)
    overrides = tuple(x for x in hardware if x.partition("=")[0] not in _NUMBERS)
    return RayStarter(overrides, entries, launcher, ids)
