"""The inventory that a user would write for a given cluster."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from whale_train.strategies.hardware.catalogue import DEVICES, LINKS
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node


def inventory_of(cluster: Cluster) -> dict[str, Any]:
    """Return the mapping from which `read_inventory` makes `cluster`."""
    nodes = [
        ({"count": len(list(equal))} | entry) for entry, equal in groupby(map(_node, cluster.nodes))
    ]
    return {"nodes": nodes, "network": _link(cluster.network)}


def _node(node: Node) -> dict[str, Any]:
    first, *others = devices = [_device(device) for device in node.devices]
    kinds = first if all(other == first for other in others) else devices
    return {"devices": len(devices), "device": kinds, "link": _link(node.link)}


def _device(device: Device) -> str | Mapping[str, Any]:
    if device.name in DEVICES:
        return device.name
    figures = {
        "name": device.name,
        "flops": {precision: float(flops) for precision, flops in device.flops.items()},
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_s": device.memory_bandwidth_bytes_s,
    }
    if device.reserved_bytes:
        figures["reserved_bytes"] = device.reserved_bytes
    return figures


def _link(link: Link) -> str | Mapping[str, Any]:
    if LINKS.get(link.name) == link:
        return link.name
    return {
        "name": link.name,
        "bandwidth_bytes_s": link.bandwidth_bytes_s,
        "latency_s": link.latency_s,
    }
