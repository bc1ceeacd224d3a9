"""Decide what a job asks of a Ray cluster: the bundles of its placement group, and their ranks.

Nothing here imports Ray: the nodes of its cluster are passed in.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale_train.config import AUTO, Request
from whale_train.errors import ConfigError, Fault, listed
from whale_train.launcher.planning.devices.machine import facts_of, threads_asked
from whale_train.machine.hosts import this_host
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.hardware.inventory import read_inventory

GPU, CPU = "GPU", "CPU"
# Ray gives a node with GPUs one of this resource, followed by the GPUs' kind, as in
# `accelerator_type:V100`. A small share of it places a bundle there.
KIND_OF_RAY, _SHARE = "accelerator_type:", 0.001
# The label of a node's id in Ray. Its values choose nodes for a bundle.
_NODE_ID = "ray.io/node-id"
_HOSTS = "launcher.hosts"


@dataclass(frozen=True)
class RayNode:
    """A living node of a Ray cluster.

    id: its id in Ray.
    address: its IP address.
    name: its host name.
    resources: all resources that it offers, used or not.
    """

    id: str
    address: str
    name: str
    resources: Mapping[str, float]

    @property
    def shown(self) -> str:
        """Return the node's address and what it offers, as text."""
        return f"{self.address} has {resources_text(self.resources)}"


@dataclass(frozen=True)
class Bundles:
    """What a placement group asks for.

    resources: the resources of each bundle.
    ranks: number of ranks of each bundle.
    strategy: how Ray places the bundles on nodes.
    threads: number of threads of each rank, which a bundle asks as many CPUs for.
    labels: the labels that each bundle's node must have; empty where any node will do.
    """

    resources: tuple[Mapping[str, float], ...]
    ranks: tuple[int, ...]
    strategy: str
    threads: int
    labels: tuple[Mapping[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """Return the bundles as text."""
        alike = Counter(resources_text(bundle) for bundle in self.resources)
        texts = (f"{count} x " * (count > 1) + text for text, count in alike.items())
        return " and ".join(texts)


def bundles_of(request: Request, nodes: Sequence[RayNode]) -> Bundles:
    """Return the bundles that a job asks for.

    Each node of an inventory is one bundle, on a Ray node of its own: what Ray packs by itself may
    lie otherwise on its nodes than the plan's ranks on theirs. A number of devices without nodes is
    as many bundles, on as few nodes as possible. Without a number, all GPUs, or all cores, of each
    Ray node are one bundle.

    nodes: the living nodes of the cluster.

    Raises ConfigError for an inventory with faults, and for `launcher.hosts` that do not fit.
    """
    hardware, name = request.hardware, request.names.get("hardware", "hardware")
    chosen = _chosen(request.launcher.hosts, nodes)
    offered = chosen or nodes
    threads = threads_of_a_rank(request)
    if "kind" not in hardware:
        faults: list[Fault] = []
        cluster = read_inventory(hardware, name, faults, facts_of(this_host(())))
        if cluster is None:
            raise ConfigError(faults)
        return _of_inventory(cluster, threads, chosen, nodes)
    has_gpus = hardware["kind"] == "local" and any(node.resources.get(GPU) for node in offered)
    unit = GPU if has_gpus else CPU
    of_a_rank = 1 if has_gpus else threads
    if hardware.get("devices", AUTO) != AUTO:
        count = int(hardware["devices"])
        bundle = {unit: float(of_a_rank)}
        labels = _labels([chosen] * count) if chosen else ()
        return Bundles((bundle,) * count, (1,) * count, "PACK", threads, labels)
    used = [node for node in offered if node.resources.get(unit, 0) >= of_a_rank]
    counts = tuple(int(node.resources[unit]) // of_a_rank for node in used)
    if not counts:
        rule = f"finds no {unit} in the Ray cluster: {listed([node.shown for node in offered], 4)}"
        raise ConfigError([Fault("hardware", name, rule, "add a node that has some")])
    resources = tuple({unit: float(count * of_a_rank)} for count in counts)
    labels = _labels([[node] for node in used])
    return Bundles(resources, counts, "STRICT_SPREAD", threads, labels)


def threads_of_a_rank(request: Request) -> int:
    """Return the number of threads of each rank, which has as many CPUs."""
    return request.launcher.threads or threads_asked() or 1


def _of_inventory(
    cluster: Cluster, threads: int, chosen: Sequence[RayNode], nodes: Sequence[RayNode]
) -> Bundles:
    """Return a bundle for each node of an inventory.

    A device is one GPU, or the cores of a CPU process where the cluster has no GPU. Its kind is
    asked for too, where the cluster has a resource of that name, or GPUs of that kind by Ray's own
    name.

    cluster: the inventory.
    threads: number of threads of a rank.
    chosen: the Ray node of each node of the inventory; empty where Ray chooses.
    nodes: the living nodes of the Ray cluster.
    """
    name, wanted = cluster.name, cluster.nodes
    if chosen and len(chosen) != len(wanted):
        rule = f"are {len(chosen)}, and hardware={name} has {len(wanted)} nodes"
        given = ", ".join(node.address for node in chosen)
        remedy = "name a Ray node for each node, in their order"
        raise ConfigError([Fault(_HOSTS, given, rule, remedy)])
    offered = {resource for node in nodes for resource in node.resources}
    on_gpus = GPU in offered and not cluster.on_cpu
    resources = []
    for node in wanted:
        count = len(node.devices)
        bundle = {CPU: float(threads * count)}
        if on_gpus:
            bundle[GPU] = float(count)
        for kind, number in Counter(device.name for device in node.devices).items():
            of_ray = KIND_OF_RAY + kind.partition("_")[0].upper()
            if kind in offered:
                bundle[kind] = float(number)
            elif on_gpus and of_ray in offered:
                bundle[of_ray] = _SHARE
        resources.append(bundle)
    ranks = tuple(len(node.devices) for node in wanted)
    # One host may emulate all nodes, and several hosts one each.
    strategy = "STRICT_PACK" if not on_gpus and len(nodes) == 1 else "STRICT_SPREAD"
    labels = _labels([[node] for node in chosen])
    return Bundles(tuple(resources), ranks, strategy, threads, labels)


def _chosen(hosts: Sequence[str], nodes: Sequence[RayNode]) -> list[RayNode]:
    """Return the living Ray node that each of `launcher.hosts` names by its id, its address or its
    host name. Raises ConfigError for a name of no node, and of several."""
    faults: list[Fault] = []
    chosen = []
    for number, host in enumerate(hosts):
        named = [node for node in nodes if host in (node.id, node.address, node.name)]
        if len(named) != 1:
            rule = "names no living node of the Ray cluster"
            if named:
                rule = f"names {len(named)} nodes of the Ray cluster"
            remedy = "use an id: " + listed([f"{node.id} ({node.address})" for node in nodes], 8)
            faults.append(Fault(f"{_HOSTS}[{number}]", host, rule, remedy))
        chosen += named[:1]
    if faults:
        raise ConfigError(faults)
    return chosen


def _labels(nodes: Sequence[Sequence[RayNode]]) -> tuple[Mapping[str, str], ...]:
    """Return the labels by which each bundle is placed on one of its nodes."""
    return tuple({_NODE_ID: f"in({','.join(node.id for node in among)})"} for among in nodes)


def resources_text(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as `{CPU: 8, GPU: 8}`, without those that Ray keeps for
    itself."""
    own = ("memory", "object_store_memory")
    shown = [
        f"{name}: {amount:g}"
        for name, amount in sorted(resources.items())
        if name not in own and not name.startswith("node:")
    ]
    return f"{{{', '.join(shown)}}}" if shown else "nothing"
