"""How many ranks a job has on each of the hosts that the launcher starts it on."""

from collections.abc import Sequence

from whale_train.config import AUTO, Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.planning.devices.machine import facts_of
from whale_train.machine.hosts import Seen, joined
from whale_train.strategies.hardware.inventory import read_inventory


def ranks_on(request: Request, hosts: Sequence[str], seen: Sequence[Seen]) -> list[int]:
    """Return the ranks of each of the `hosts`, which have what was `seen` there: as many as the
    inventory's node has devices, or the host GPUs, or its share of the CPU processes.

    Raises ConfigError where the inventory has another number of nodes.
    """
    hardware, name = request.hardware, request.names.get("hardware", "hardware")
    if hardware.get("kind") == "local" and any(each.cards for each in seen):
        return [max(1, len(each.cards)) for each in seen]
    faults: list[Fault] = []
    cluster = read_inventory(hardware, name, faults, facts_of(joined(seen[:1])[0]))
    if cluster is None:
        raise ConfigError(faults)
    listed = ", ".join(hosts)
    if "kind" not in hardware:
        if len(cluster.nodes) != len(hosts):
            rule = f"are {len(hosts)}, and hardware={name} has {len(cluster.nodes)} nodes"
            remedy = "name a host for each node, in their order"
            raise ConfigError([Fault("launcher.hosts", listed, rule, remedy)])
        return [len(node.devices) for node in cluster.nodes]
    if hardware.get("devices", AUTO) == AUTO:
        return [each.cores for each in seen]
    share, left = divmod(len(cluster.devices), len(hosts))
    if not share:
        rule = f"are {len(hosts)}, and hardware={name} has {len(cluster.devices)} processes"
        raise ConfigError([Fault("launcher.hosts", listed, rule, "name fewer hosts")])
    return [share + (number < left) for number in range(len(hosts))]
