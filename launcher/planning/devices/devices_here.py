"""Whether the devices of an inventory are here, on which host each of its nodes is, and which card
each rank is to open."""

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
# What joins hosts of which nobody says what does: the slowest that clusters of GPUs are sold with.
_UNKNOWN_NETWORK = LINKS["ethernet_10g"]


@dataclass(frozen=True)
class Place:
    """Where a plan's ranks are to run: on the devices of `cluster`, whose nodes are in the order of
    the hosts. `device` is what they run on, which stands for another where they are `emulated`."""

    cluster: Cluster
    device: Literal["cpu", "cuda"]
    emulated: bool


def joined_cluster(name: str, hosts: Sequence[Host]) -> Cluster:
    """Return the GPUs of the hosts, as many of each as it has ranks. Raises ConfigError where a
    host has fewer."""
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
    """Return the CPU processes of `cluster` on the hosts whose ranks they are, each with its share
    of its host's memory, where there are as many."""
    (node,) = cluster.nodes
    if len(hosts) < 2 or len(node.devices) != sum(len(host.ranks) for host in hosts):
        return cluster
    nodes = []
    for host in hosts:
        share = host.memory_bytes / len(host.ranks)
        process = replace(node.devices[0], memory_bytes=share)
        nodes.append(replace(node, devices=(process,) * len(host.ranks), at=host.node))
    return replace(cluster, nodes=tuple(nodes), network=_UNKNOWN_NETWORK)


def where(request: Request, cluster: Cluster, hosts: Sequence[Host]) -> Place:
    """Return where the ranks run.

    Raises ConfigError where devices are wanted that are not on the hosts, or GPUs are there and are
    not the inventory's: to train on CPUs beside them has to be asked for.
    """
    kind, in_earnest = request.launcher.kind, request.mode == "train"
    if cluster.on_cpu:
        return Place(cluster, "cpu", False)
    has_gpus = any(host.cards for host in hosts)
    if kind == "emulate" or (kind != "local" and not has_gpus):
        return Place(_on_hosts_emulated(cluster, hosts), "cpu", True)
    if not has_gpus:
        rule = f"needs the devices of hardware={cluster.name}, and this machine has no GPU"
        found: Cluster | list[Fault] = [Fault("launcher", "local", rule, _REMEDY)]
    else:
        found = _on_hosts(cluster, hosts)
    if isinstance(found, Cluster):
        return Place(found, "cuda", False)
    if in_earnest:
        raise ConfigError(found)
    return Place(cluster, "cpu", True)


def seated(plan: Plan, used: Cluster, hosts: Sequence[Host]) -> Plan:
    """Return the plan with the card that each rank opens, for devices `used` that are here."""
    cards = cards_of(used, hosts)
    ranks = (replace(rank, uuid=card.uuid) for rank, card in zip(plan.ranks, cards, strict=True))
    return replace(plan, ranks=tuple(ranks))


def cards_of(used: Cluster, hosts: Sequence[Host]) -> list[GpuFacts]:
    """Return the cards that the devices `used`, which are on the hosts, are."""
    by_node = {host.node: host for host in hosts}
    found = []
    for node in used.nodes:
        host = by_node[node.at]
        numbers = _numbers_of(node.devices, host)
        found += [host.cards[number] for number in numbers if number is not None]
    return found


def refuse_other_order(used: Cluster, hosts: Sequence[Host], faults: list[Fault]) -> None:
    """Refuse devices whose ranks are not in the order in which ranks were started on the hosts."""
    if not any(node.at for node in used.nodes):
        return
    planned = [node.at for node in used.nodes for _ in node.devices]
    started = {rank: host.node for host in hosts for rank in host.ranks}
    if started and planned != [started.get(rank) for rank in range(len(planned))]:
        value = ", ".join(f"{kind}: {count}" for kind, count in used.kinds.items())
        rule = "numbers the ranks otherwise than they were started on the hosts"
        faults.append(Fault("strategy.devices", value, rule, "use a number of devices, or null"))


def said_of_figures(used: Cluster) -> list[Decision]:
    """Return what the plan says of cards whose figures are those of their properties."""
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
    """Return the inventory with its nodes in the order of the hosts that they are; or, for each
    node that none of the hosts is, and each host that is none, what it is."""
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
    """Return the inventory with its nodes in the order of the hosts whose ranks stand for their
    devices, as many as these are; one host stands for all. Raises ConfigError where some do not
    fit."""
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
    """Return `8, 8 and 4`."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _number(cluster: Cluster, node: Node) -> int:
    return next(number for number, each in enumerate(cluster.nodes) if each is node)


def _is_on(node: Node, host: Host, hosts: int) -> bool:
    """Return whether a host has the devices of a node, and, of several, as many ranks."""
    fits = None not in _numbers_of(node.devices, host)
    return fits and (hosts == 1 or len(node.devices) == len(host.ranks))


def _numbers_of(wanted: Sequence[Device], host: Host) -> list[int | None]:
    """Return, for each device wanted, the number of a card of the host that is one, each card once;
    None where there is none left. Of a host whose ranks see one card each, a rank's is its own."""
    have = list(enumerate(map(device_of, host.cards)))
    visible = host.visible if len(host.visible) == len(wanted) else ()
    found: list[int | None] = []
    for place, device in enumerate(wanted):
        seen = visible[place] if visible else {card.uuid for card in host.cards}
        card = next(
            (
                (number, each)
                for number, each in have
                if _is(device, each) and host.cards[number].uuid in seen
            ),
            None,
        )
        found.append(None if card is None else card[0])
        if card is not None:
            have.remove(card)
    return found


def _is(wanted: Device, have: Device) -> bool:
    """Return whether a card is the device wanted: of its name, or of figures that an inventory
    gives a card which the catalogue does not have, if it has as much memory."""
    if wanted.name == have.name:
        return True
    is_own = wanted.name not in DEVICES and not is_catalogued(have)
    return is_own and have.memory_bytes >= wanted.memory_bytes


def _not_here(cluster: Cluster, host: Host) -> Fault:
    """Return what this host, the only one, has instead of the inventory's only node."""
    (node,) = cluster.nodes
    numbers = _numbers_of(node.devices, host)
    missing = next(x for x, number in zip(node.devices, numbers, strict=True) if number is None)
    rule = f"is {_listed(node.devices)}, and this host has {_has(host)}"
    own = (device_of(card) for card in host.cards) if missing.name not in DEVICES else ()
    small = next((device for device in own if not is_catalogued(device)), None)
    if small is not None:
        need, there = in_bytes(missing.memory_bytes), in_bytes(small.memory_bytes)
        rule = f"has {missing.name} of {need}, and this host's {small.name} has {there}"
    return Fault("hardware", cluster.name, rule, _REMEDY)


def _has(host: Host) -> str:
    """Return `8 x t4_16gb`, and how many ranks are there."""
    ranks = f" and {len(host.ranks)} ranks" if len(host.ranks) > 1 else ""
    return f"{_listed(map(device_of, host.cards)) or 'no GPU'}{ranks}"


def _listed(devices: Iterable[Device]) -> str:
    """Return `8 x v100_sxm2_32gb and 2 x t4_16gb`."""
    return " and ".join(
        f"{count} x {name}" for name, count in Counter(device.name for device in devices).items()
    )
