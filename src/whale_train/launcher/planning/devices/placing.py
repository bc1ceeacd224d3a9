"""Find the devices of a request's plan, with their measured performance.

`devices_here.py` matches the hosts with the nodes of the inventory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from whale_train.config import AUTO, Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.planning.devices.calibrations import with_kept_calibrations
from whale_train.launcher.planning.devices.devices_here import (
    HostPlacement,
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
    """Return a tuple with this host alone. GPUs are looked for only where the request may use
    them."""
    looks = request.mode == "train" or "kind" in request.hardware
    return (this_host(visible_gpus() if looks else ()),)


def place_of(request: Request, hosts: Sequence[Host], faults: list[Fault]) -> HostPlacement | None:
    """Return the devices that the ranks run on, or None after adding to `faults`.

    The devices are the inventory's, or the hosts' own for `hardware=local`.
    """
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
    """Return the inventory with one CPU process for each started rank, if it leaves the number of
    processes open.

    Under torchrun, the number of ranks may differ from start to start.
    """
    ranks = sum(len(host.ranks) for host in hosts)
    if not ranks or hardware.get("kind") is None or hardware.get("devices", AUTO) != AUTO:
        return hardware
    return {**hardware, "kind": "cpu", "devices": ranks}


def _has_ranks_on_gpus(hosts: Sequence[Host]) -> bool:
    """Return whether another launcher started ranks, and some host has GPUs."""
    return any(host.ranks for host in hosts) and any(host.cards for host in hosts)


def _as_measured(cluster: Cluster, request: Request, hosts: Sequence[Host]) -> Cluster:
    """Return `cluster` with the calibrated performance of its devices.

    For CPU processes on one host, the cluster also gets the number of processes that the cores can
    run at once, and the performance of fewer processes with more threads each. Raises ConfigError
    for a calibration that cannot be read.
    """
    cores = sum(host.cores for host in hosts)
    threads = partial(threads_of, request, cores)
    if cluster.on_cpu:
        processes = on_cores(cluster, with_kept_calibrations(), cores, threads)
        one_host = len(cluster.nodes) == 1
        return processes if one_host else replace(processes, shared_memory=None, fewer={})
    return calibrated(cluster, with_kept_calibrations(), threads(len(cluster.devices)))


def threads_of(request: Request, cores: int, ranks: int) -> int:
    """Return the number of threads of each CPU process, if `ranks` processes share `cores` cores.

    The request gives the number; else the environment (OMP_NUM_THREADS); else each process has an
    equal share of the cores, at least one thread.
    """
    return request.launcher.threads or threads_asked() or max(1, cores // ranks)
