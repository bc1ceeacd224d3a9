"""Derive the components of a job of Slurm from its request: how many nodes, by which options.

Consecutive nodes of the inventory are one component where they have equally many devices and the
same `slurm` options: by anything else, Slurm could not tell them apart.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby

from whale_train.config import AUTO, Request
from whale_train.errors import Fault
from whale_train.launcher.planning.devices.machine import facts_of
from whale_train.launcher.slurm.sbatch_file import Component, Option
from whale_train.machine.hosts import this_host
from whale_train.strategies.hardware.cluster import Node, SlurmRequest
from whale_train.strategies.hardware.inventory import read_inventory

# Seconds, besides the time for saving, in which Slurm signals a job and queues it again.
AROUND_S = 60
# Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")


def components_of(request: Request, faults: list[Fault]) -> tuple[Component, ...]:
    """Return the components of a request's job, in the order of the inventory.

    faults: receives a fault where the number of ranks is not known, where the time limit is in no
        form of Slurm's, and where one request cannot stand for nodes of unlike options.
    """
    sizes: list[tuple[int, int, SlurmRequest | None]]
    if "kind" in request.hardware:
        sizes = [(*_size_of_kind(request, faults), None)]
    else:
        sizes = _sizes_of_nodes(request, faults)
    minutes(request, faults)
    if faults:
        return ()
    return tuple(component_of(request, *size) for size in sizes)


def component_of(request: Request, nodes: int, ranks: int, slurm: SlurmRequest | None) -> Component:
    """Return a component of a request's job. The options of its nodes replace those of the
    launcher.

    nodes: number of nodes.
    ranks: number of ranks on each node.
    slurm: the options of its nodes in the inventory; None where there are none.
    """
    given = {key.replace("_", "-"): value for key, value in request.launcher.sbatch.items()}
    options: Mapping[str, Option] = {
        "job-name": "whale-train",
        # Before the end of the time limit, Slurm signals the tasks, which save.
        "signal": f"USR2@{int(request.checkpoint.grace_s) + AROUND_S}",
        **given,
        "time": minutes(request, []),
        **_options_of(slurm),
    }
    return Component(nodes, ranks, options)


def minutes(request: Request, faults: list[Fault]) -> int:
    """Return the time limit of a job in minutes, rounded up; 0 after adding a fault for a time that
    is in no form of Slurm's."""
    text = str(request.launcher.sbatch.get("time", 60))
    match = _TIME.fullmatch(text)
    if match is None:
        rule, remedy = "is no time of Slurm's", "give minutes, or as 12:00:00 or 2-00:00:00"
        faults.append(Fault("launcher.sbatch.time", text, rule, remedy))
        return 0
    days = match["d"]
    a, b, c = (int(match[name] or 0) for name in "abc")
    if days is not None:  # days-hours:minutes:seconds
        seconds = ((int(days) * 24 + a) * 60 + b) * 60 + c
    elif match["c"] is not None:  # hours:minutes:seconds
        seconds = (a * 60 + b) * 60 + c
    else:  # minutes:seconds
        seconds = a * 60 + b
    return max(1, -(-seconds // 60))


def _sizes_of_nodes(
    request: Request, faults: list[Fault]
) -> list[tuple[int, int, SlurmRequest | None]]:
    """Return number of nodes, ranks on each, and options of each component of an inventory of
    nodes. `launcher.nodes` and `launcher.ranks_per_node` make one component of all."""
    launcher, name = request.launcher, request.names.get("hardware", "hardware")
    cluster = read_inventory(request.hardware, name, faults, facts_of(this_host(())))
    if cluster is None:
        return []
    runs = [list(alike) for _, alike in groupby(cluster.nodes, key=_kind)]
    if launcher.nodes is None and launcher.ranks_per_node is None:
        return [(len(run), len(run[0].devices), run[0].slurm) for run in runs]
    options = [_options_of(run[0].slurm) for run in runs]
    if any(other != options[0] for other in options):
        key = "launcher.nodes" if launcher.nodes is not None else "launcher.ranks_per_node"
        given = str(launcher.nodes if launcher.nodes is not None else launcher.ranks_per_node)
        rule = f"makes all nodes alike, and those of hardware={name} differ in slurm"
        faults.append(Fault(key, given, rule, "leave it out, or give all nodes the same slurm"))
    first = cluster.nodes[0]
    nodes = launcher.nodes or len(cluster.nodes)
    return [(nodes, launcher.ranks_per_node or len(first.devices), first.slurm)]


def _kind(node: Node) -> tuple[int, dict[str, Option]]:
    """Return the facts of a node by which Slurm tells it from others."""
    return len(node.devices), _options_of(node.slurm)


def _options_of(slurm: SlurmRequest | None) -> dict[str, Option]:
    """Return the options of a node in the inventory, by sbatch's names."""
    given = {} if slurm is None else asdict(slurm)
    return {name.replace("_", "-"): value for name, value in given.items() if value is not None}


def _size_of_kind(request: Request, faults: list[Fault]) -> tuple[int, int]:
    """Return the number of nodes, and of ranks on each, for an inventory that names no nodes."""
    launcher, name = request.launcher, request.names.get("hardware", "hardware")
    nodes = launcher.nodes or 1
    if launcher.ranks_per_node is not None:
        return nodes, launcher.ranks_per_node
    devices = request.hardware.get("devices", AUTO)
    if isinstance(devices, int) and devices % nodes == 0:
        return nodes, devices // nodes
    remedy = "say it, as launcher.ranks_per_node=8"
    rule = f"is not known of hardware={name}, on {nodes} nodes"
    faults.append(Fault("launcher.ranks_per_node", "null", rule, remedy))
    return nodes, 0
