"""Match the devices of an inventory with the hosts: a host for each node, and a card for each
rank."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.machine.hosts import Host
from whale_train.quantities import in_bytes
from whale_train.strategies.hardware.catalogue import DEVICES, LINKS
from whale_train.strategies.hardware.cluster import Cluster, Device, Node
from whale_train.strategies.hardware.gpu_facts import GpuFacts, device_of, is_catalogued, link_of
from whale_train.strategies.plan.plan import Decision, Plan

_REMEDY = "use launcher=emulate, or hardware=local"
# The network of hosts if none is given: the slowest that clusters of GPUs are sold with.
_UNKNOWN_NETWORK = LINKS["ethernet_10g"]


@dataclass(frozen=True)
class HostPlacement:
    """The devices that a plan's ranks run on.

    cluster: the devices of the plan, with the nodes in the order of the hosts.
    device: the kind of device that the ranks run on.
    emulated: whether CPU processes emulate the devices of `cluster`.
    """

    cluster: Cluster
    device: Literal["cpu", "cuda"]
    emulated: bool


def joined_cluster(name: str, hosts: Sequence[Host]) -> Cluster:
    """Return the cluster of the hosts' GPUs, one for each rank. Raises ConfigError where a host has
    fewer GPUs than ranks."""
    faults, nodes = [], []
    for host in hosts:
        cards = host.cards[: len(host.ranks)]
        if len(cards) < len(host.ranks):
            rule = f"has {_has(host)} on {host.name}: every rank wants a GPU of its own"
            remedy = "start as many ranks on a host as it has GPUs"
            faults.append(Fault("hardware", "local", rule, remedy))
        else:
            nodes.append(Node(tuple(map(device_of, cards)), link_of(cards), at=host.node))
    if faults:
        raise ConfigError(faults)
    network = nodes[0].link if len(nodes) == 1 else _UNKNOWN_NETWORK
    return Cluster(name, tuple(nodes), network)


def processes_joined(cluster: Cluster, hosts: Sequence[Host]) -> Cluster:
    """Return `cluster`, one node of CPU processes, with the processes placed on the hosts of their
    ranks.

    Each process has an equal share of its host's memory. The cluster is returned unchanged for a
    single host, and where the number of ranks is not the number of processes.
    """
    (node,) = cluster.nodes
    if len(hosts) < 2 or len(node.devices) != sum(len(host.ranks) for host in hosts):
        return cluster
    nodes = []
    for host in hosts:
        share = host.memory_bytes / len(host.ranks)
        process = replace(node.devices[0], memory_bytes=share)
        nodes.append(replace(node, devices=(process,) * len(host.ranks), at=host.node))
    return replace(cluster, nodes=tuple(nodes), network=_UNKNOWN_NETWORK)


def where(request: Request, cluster: Cluster, hosts: Sequence[Host]) -> HostPlacement:
    """Return the devices that the ranks run on.

    request: the request, whose launcher may ask for emulation.
    cluster: the devices of the inventory.
    hosts: the hosts that ranks run on.

    Raises ConfigError in `mode=train` where the launcher is `local` and the hosts have no GPU, and
    where the hosts have other GPUs than the inventory: emulation on CPUs must then be asked for.
    """
    kind, in_earnest = request.launcher.kind, request.mode == "train"
    if cluster.on_cpu:
        return HostPlacement(cluster, "cpu", False)
    has_gpus = any(host.cards for host in hosts)
    if kind == "emulate" or (kind != "local" and not has_gpus):
        return HostPlacement(_on_hosts_emulated(cluster, hosts), "cpu", True)
    if not has_gpus:
        rule = f"needs the devices of hardware={cluster.name}, and this machine has no GPU"
        cluster_or_faults: Cluster | list[Fault] = [Fault("launcher", "local", rule, _REMEDY)]
    else:
        cluster_or_faults = _on_hosts(cluster, hosts)
    if isinstance(cluster_or_faults, Cluster):
        return HostPlacement(cluster_or_faults, "cuda", False)
    if in_earnest:
        raise ConfigError(cluster_or_faults)
    return HostPlacement(cluster, "cpu", True)


def assign_devices(plan: Plan, used: Cluster, hosts: Sequence[Host]) -> Plan:
    """Return the plan with the UUID of each rank's card.

    used: the devices of the plan, each of which must be on the hosts.
    """
    cards = cards_of(used, hosts)
    ranks = (replace(rank, uuid=card.uuid) for rank, card in zip(plan.ranks, cards, strict=True))
    return replace(plan, ranks=tuple(ranks))


def cards_of(used: Cluster, hosts: Sequence[Host]) -> list[GpuFacts]:
    """Return the card of each rank, in the order of ranks.

    used: the devices of the plan, each of which must be on the hosts.
    """
    by_node = {host.node: host for host in hosts}
    cards = []
    for node in used.nodes:
        host = by_node[node.at]
        numbers = _numbers_of(node.devices, host)
        cards += [host.cards[number] for number in numbers if number is not None]
    return cards


def refuse_other_order(used: Cluster, hosts: Sequence[Host], faults: list[Fault]) -> None:
    """Add a fault where the plan places a rank on another host than the one where it was
    started."""
    if not any(node.at for node in used.nodes):
        return
    planned = [node.at for node in used.nodes for _ in node.devices]
    started = {rank: host.node for host in hosts for rank in host.ranks}
    if started and planned != [started.get(rank) for rank in range(len(planned))]:
        value = ", ".join(f"{kind}: {count}" for kind, count in used.kinds.items())
        rule = "numbers the ranks otherwise than they were started on the hosts"
        faults.append(Fault("strategy.devices", value, rule, "use a number of devices, or null"))


def explain_device_figures(used: Cluster) -> list[Decision]:
    """Return a note for the plan on each kind of card whose performance is derived from the card's
    properties, since neither the catalogue nor a calibration has it."""
    unknown = {device.name for device in used.devices if not device.kernels} - DEVICES.keys()
    return [
        Decision(
            "hardware",
            f"{name} by its properties",
            "",
            "the catalogue does not have it; mode=calibrate measures it",
        )
        for name in sorted(unknown)
    ]


def _on_hosts(cluster: Cluster, hosts: Sequence[Host]) -> Cluster | list[Fault]:
    """Return the inventory, with the nodes in the order of the hosts that have their devices.

    If a host matches no node, or a node no host, faults are returned instead. They name the
    unmatched nodes and the devices of the unmatched hosts.
    """
    left = list(cluster.nodes)
    nodes: list[Node] = []
    strangers = []
    for host in hosts:
        node = next((node for node in left if _is_on(node, host, len(hosts))), None)
        if node is None:
            strangers.append(host)
        else:
            left.remove(node)
            nodes.append(replace(node, at=host.node))
    if not left and not strangers:
        return replace(cluster, nodes=tuple(nodes), fewer={})
    if len(cluster.nodes) == len(hosts) == 1:
        return [_not_here(cluster, hosts[0])]
    has = "; ".join(f"{host.name} has {_has(host)}" for host in strangers) or "no host is left"
    if not left:
        rule = f"has {len(cluster.nodes)} hosts, and ranks are on {len(hosts)}: {has}"
        return [Fault("hardware", cluster.name, rule, "start ranks on its hosts alone")]
    return [
        Fault(
            f"hardware.nodes[{_number(cluster, node)}]",
            _listed(node.devices),
            f"is none of the hosts: {has}",
            _REMEDY,
        )
        for node in left
    ]


def _on_hosts_emulated(cluster: Cluster, hosts: Sequence[Host]) -> Cluster:
    """Return the inventory, with the nodes in the order of the hosts that emulate them.

    A host emulates a node with as many devices as the host has ranks. A single host emulates all
    nodes. Raises ConfigError where the hosts and the nodes do not match.
    """
    if len(hosts) < 2:
        return cluster
    left, nodes = list(cluster.nodes), []
    for host in hosts:
        node = next((node for node in left if len(node.devices) == len(host.ranks)), None)
        if node is None:
            break
        left.remove(node)
        nodes.append(replace(node, at=host.node))
    if left or len(nodes) < len(hosts):
        rule = f"has nodes of {_counts(len(node.devices) for node in cluster.nodes)} devices, and "
        rule += f"the hosts {_counts(len(host.ranks) for host in hosts)} ranks"
        said = ", ".join(f"{host.name}: {len(host.ranks)}" for host in hosts)
        remedy = f"start as many ranks on each host as a node has devices ({said})"
        raise ConfigError([Fault("hardware", cluster.name, rule, remedy)])
    return replace(cluster, nodes=tuple(nodes), fewer={})


def _counts(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as `8, 8 and 4`."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _number(cluster: Cluster, node: Node) -> int:
    """Return the index of a node in the inventory."""
    return next(number for number, other in enumerate(cluster.nodes) if other is node)


def _is_on(node: Node, host: Host, hosts: int) -> bool:
    """Return whether a host has the devices of a node and, if the number of `hosts` is more than 1,
    as many ranks."""
    fits = None not in _numbers_of(node.devices, host)
    return fits and (hosts == 1 or len(node.devices) == len(host.ranks))


def _numbers_of(wanted: Sequence[Device], host: Host) -> list[int | None]:
    """Return the index of a card of the host for each wanted device, each card at most once.

    An index is None where no card is left. If each rank of the host sees certain cards alone, a
    rank's card is one that the rank sees.
    """
    have = list(enumerate(map(device_of, host.cards)))
    visible = host.visible if len(host.visible) == len(wanted) else ()
    numbers: list[int | None] = []
    for place, device in enumerate(wanted):
        seen = visible[place] if visible else {card.uuid for card in host.cards}
        card = next(
            (
                (number, candidate)
                for number, candidate in have
                if _is(device, candidate) and host.cards[number].uuid in seen
            ),
            None,
        )
        numbers.append(None if card is None else card[0])
        if card is not None:
            have.remove(card)
    return numbers


def _is(wanted: Device, have: Device) -> bool:
    """Return whether a card fits the wanted device.

    A card fits a device of the same name. If the catalogue has neither, a card with at least the
    wanted memory fits as well.
    """
    if wanted.name == have.name:
        return True
    is_own = wanted.name not in DEVICES and not is_catalogued(have)
    return is_own and have.memory_bytes >= wanted.memory_bytes


def _not_here(cluster: Cluster, host: Host) -> Fault:
    """Return the fault of a single host that lacks a device of the inventory's single node."""
    (node,) = cluster.nodes
    numbers = _numbers_of(node.devices, host)
    missing = next(x for x, number in zip(node.devices, numbers, strict=True) if number is None)
    rule = f"is {_listed(node.devices)}, and this host has {_has(host)}"
    own = (device_of(card) for card in host.cards) if missing.name not in DEVICES else ()
    small = next((device for device in own if not is_catalogued(device)), None)
    if small is not None:
        need, memory = in_bytes(missing.memory_bytes), in_bytes(small.memory_bytes)
        rule = f"has {missing.name} of {need}, and this host's {small.name} has {memory}"
    return Fault("hardware", cluster.name, rule, _REMEDY)


def _has(host: Host) -> str:
    """Return the devices of a host as text, such as `8 x t4_16gb`, with the number of ranks if it
    is more than 1."""
    ranks = f" and {len(host.ranks)} ranks" if len(host.ranks) > 1 else ""
    return f"{_listed(map(device_of, host.cards)) or 'no GPU'}{ranks}"


def _listed(devices: Iterable[Device]) -> str:
    """Return devices as text, such as `8 x v100_sxm2_32gb and 2 x t4_16gb`."""
    return " and ".join(
        f"{count} x {name}" for name, count in Counter(device.name for device in devices).items()
    )
