"""The hardware of a cluster in the form that a plan has."""

from itertools import groupby

from whale_train.strategies.hardware.cluster import Cluster, Link, Node
from whale_train.strategies.plan.inventory import (
    PlannedDevice,
    PlannedInventory,
    PlannedLink,
    PlannedNodes,
)


def planned_inventory(cluster: Cluster) -> PlannedInventory:
    """Return the inventory of `cluster` for a plan. Consecutive equal nodes are one entry with a
    count."""
    runs = [list(alike) for _, alike in groupby(map(_node, cluster.nodes))]
    kinds = {device.name: device for device in cluster.devices}
    return PlannedInventory(
        tuple(PlannedNodes(len(run), *run[0]) for run in runs),
        {
            name: PlannedDevice(
                dict(device.flops),
                device.memory_bytes,
                device.memory_bandwidth_bytes_s,
                bool(device.kernels),
                device.reserved_bytes,
            )
            for name, device in kinds.items()
        },
        _link(cluster.network),
    )


def _node(node: Node) -> tuple[tuple[str, ...], PlannedLink, float | None]:
    memory = node.host.memory_bytes if node.host else None
    return tuple(device.name for device in node.devices), _link(node.link), memory


def _link(link: Link) -> PlannedLink:
    return PlannedLink(link.name, link.bandwidth_bytes_s, link.latency_s)
