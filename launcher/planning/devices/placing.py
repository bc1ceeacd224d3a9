"""From a Request and the hosts there are to the devices that its plan is for, as measured.

Which of the hosts is which node of the inventory is `devices_here.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from whale_train.config import AUTO, Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.planning.devices.calibrations import kept
from whale_train.launcher.planning.devices.devices_here import (
    Place,
    joined_cluster,
    processes_joined,
    where,
)
from whale_train.launcher.planning.devices.machine import facts_of, threads_asked
from whale_train.machine.hosts import Host, this_host
from whale_train.machine.nvml import visible_gpus
from whale_train.strategies.hardware.calibration import calibrated, on_cores
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.hardware.inventory import read_inventory


def this_host_of(request: Request) -> tuple[Host, ...]:
    """Return the host that this is; GPUs that nobody asks for are not looked for."""
    looks = request.mode == "train" or "kind" in request.hardware
    return (this_host(visible_gpus() if looks else ()),)


def place_of(request: Request, hosts: Sequence[Host], faults: list[Fault]) -> Place | None:
    """Return where the ranks run, on the devices of the inventory, or of the hosts where that is
    asked for."""
    name = request.names.get("hardware", "hardware")
    machine = facts_of(hosts[0])
    try:
        cluster: Cluster | None
        if request.hardware.get("kind") == "local" and _has_ranks_on_gpus(hosts):
            cluster = joined_cluster(name, hosts)
        else:
            cluster = read_inventory(_with_ranks(request.hardware, hosts), name, faults, machine)
        if cluster is None:
            return None
        if cluster.on_cpu and len(cluster.nodes) == 1:
            cluster = processes_joined(cluster, hosts)
        place = where(request, cluster, hosts)
        return replace(place, cluster=_as_measured(place.cluster, request, hosts))
    except ConfigError as error:
        faults += error.faults
        return None


def _with_ranks(hardware: Mapping[str, Any], hosts: Sequence[Host]) -> Mapping[str, Any]:
    """Return an inventory with as many CPU processes as ranks were started, where it leaves their
    number open: under torchrun it may be another each time they are started."""
    ranks = sum(len(host.ranks) for host in hosts)
    if not ranks or hardware.get("kind") is None or hardware.get("devices", AUTO) != AUTO:
        return hardware
    return {**hardware, "kind": "cpu", "devices": ranks}


def _has_ranks_on_gpus(hosts: Sequence[Host]) -> bool:
    return any(host.ranks for host in hosts) and any(host.cards for host in hosts)


def _as_measured(cluster: Cluster, request: Request, hosts: Sequence[Host]) -> Cluster:
    """`cluster` with the figures that were measured of its devices, and the processors that its
    CPU processes share: of all of them, and of fewer where these have more threads each. Raises
    ConfigError for a calibration that cannot be read."""
    cores = sum(host.cores for host in hosts)
    threads = partial(threads_of, request, cores)
    if cluster.on_cpu:
        processes = on_cores(cluster, kept(), cores, threads)
        one_host = len(cluster.nodes) == 1
        return processes if one_host else replace(processes, shared_memory=None, fewer={})
    return calibrated(cluster, kept(), threads(len(cluster.devices)))


def threads_of(request: Request, cores: int, ranks: int) -> int:
    """Return the threads of each of so many CPU processes: what the request says, or the
    environment for all its programs, or else a share of the cores."""
    return request.launcher.threads or threads_asked() or max(1, cores // ranks)
