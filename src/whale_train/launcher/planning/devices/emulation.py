"""Compute the slowdowns of CPU processes and of their links, which emulate devices.

`launcher.device_speed` asks for slowed processes, `launcher.link_speed` for slowed links.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from whale_train.strategies.cost.collectives import group_link
from whale_train.strategies.cost.roofline import flops_rate
from whale_train.strategies.hardware.cluster import Cluster, Device

# The fraction of the processors that ranks may keep busy, so that no rank waits for a processor.
_FILLED = 0.9


def paces(devices: Sequence[Device], precision: str, processors: float) -> tuple[float, ...]:
    """Return the slowdown of the process of each device: the seconds that the process takes for one
    second of computing, at least 1.

    Slowdowns are inversely proportional to the devices' peak FLOP/s in `precision`. The fastest
    device has slowdown 1, unless all ranks together would keep too many processors busy. In that
    case all slowdowns are raised by the same factor.

    processors: number of ranks that the host's cores can run at once, with a rank's number of
        threads each.
    """
    rates = [flops_rate(device, precision) for device in devices]
    relative = [rate / max(rates) for rate in rates]
    crowd = max(1.0, sum(relative) / (_FILLED * processors))
    return tuple(crowd / part for part in relative)


def bandwidths_in_use(cluster: Cluster) -> set[float]:
    """Return the set of bandwidths, in bytes/s, of the links between any two ranks; empty for one
    rank."""
    ends = list(accumulate(len(node.devices) for node in cluster.nodes))
    inside = [
        (end - 2, end - 1)
        for end, node in zip(ends, cluster.nodes, strict=True)
        if len(node.devices) > 1
    ]
    # The link of the slower of two nodes may limit the bandwidth between them. If nodes are sorted
    # by the bandwidth of their links, neighbours show every bandwidth between two nodes.
    by_link = sorted(ends, key=lambda end: group_link(cluster, [end - 1]).bandwidth_bytes_s)
    across = [(first - 1, second - 1) for first, second in pairwise(by_link)]
    return {group_link(cluster, pair).bandwidth_bytes_s for pair in (*inside, *across)}


def relative_bandwidths(cluster: Cluster) -> tuple[tuple[float, ...], ...]:
    """Return the matrix `[ranks, ranks]` of bandwidths between ranks, relative to the fastest link
    in use.

    The diagonal is 1. In a group of ranks, the smallest element is the link that limits the group's
    collectives.
    """
    ranks, fastest = range(len(cluster.devices)), max(bandwidths_in_use(cluster), default=1.0)
    return tuple(
        tuple(
            1.0 if i == j else group_link(cluster, (i, j)).bandwidth_bytes_s / fastest
            for j in ranks
        )
        for i in ranks
    )
