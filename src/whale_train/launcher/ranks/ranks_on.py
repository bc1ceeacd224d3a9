"""Divide the ranks of a job among the hosts on which the launcher starts ranks."""

from collections.abc import Sequence

from whale_train.config import AUTO, Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.planning.devices.machine import facts_of
from whale_train.machine.hosts import Seen, joined
from whale_train.strategies.hardware.inventory import read_inventory


def ranks_on(request: Request, hosts: Sequence[str], seen: Sequence[Seen]) -> list[int]:
    """Return the number of ranks on each host.

    For an inventory of nodes, it is the number of devices of the host's node. For
    `hardware=local` with GPUs, it is the number of the host's GPUs. For CPU processes, it is the
    host's share of the processes, or the number of cores if the inventory gives no number.

    hosts: the names of the hosts.
    seen: the cores, memory and GPUs of each host.

    Raises ConfigError where the number of nodes is not the number of hosts, and for fewer processes
    than hosts.
    """
    hardware, name = request.hardware, request.names.get("hardware", "hardware")
    if hardware.get("kind") == "local" and any(host.cards for host in seen):
        return [max(1, len(host.cards)) for host in seen]
    faults: list[Fault] = []
    cluster = read_inventory(hardware, name, faults, facts_of(joined(seen[:1])[0]))
    if cluster is None:
        raise ConfigError(faults)
    host_names = ", ".join(hosts)
    if "kind" not in hardware:
        if len(cluster.nodes) != len(hosts):
            rule = f"are {len(hosts)}, and hardware={name} has {len(cluster.nodes)} nodes"
            remedy = "name a host for each node, in their order"
            raise ConfigError([Fault("launcher.hosts", host_names, rule, remedy)])
        return [len(node.devices) for node in cluster.nodes]
    if hardware.get("devices", AUTO) == AUTO:
        return [host.cores for host in seen]
    share, left = divmod(len(cluster.devices), len(hosts))
    if not share:
        rule = f"are {len(hosts)}, and hardware={name} has {len(cluster.devices)} processes"
        raise ConfigError([Fault("launcher.hosts", host_names, rule, "name fewer hosts")])
    return [share + (number < left) for number in range(len(hosts))]
