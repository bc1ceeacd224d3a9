"""Compute how slow CPU processes and their links have to be to stand for devices.

`launcher.device_speed` asks for the one, `launcher.link_speed` for the other.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from whale_train.strategies.cost.collectives import group_link
from whale_train.strategies.cost.roofline import flops_rate
from whale_train.strategies.hardware.cluster import Cluster, Device

# The part of the processors that ranks may keep busy, so that no rank waits for a processor.
_FILLED = 0.9


def paces(devices: Sequence[Device], precision: str, processors: float) -> tuple[float, ...]:
    """Return, for each device, the seconds that its process takes for a second of computing.

    They are inversely proportional to the devices' peak FLOP/s in `precision`. The fastest device
    takes a second, unless the ranks together would want more than the `processors` there are, each
    with as many threads as a rank has. In that case all are slowed by the same factor.
    """
    rates = [flops_rate(device, precision) for device in devices]
    relative = [rate / max(rates) for rate in rates]
    crowd = max(1.0, sum(relative) / (_FILLED * processors))
    return tuple(crowd / part for part in relative)


def bandwidths_in_use(cluster: Cluster) -> set[float]:
    """Return the bandwidths, in bytes/s, of the links between any two ranks. The set is empty for
    one rank."""
    ends = list(accumulate(len(node.devices) for node in cluster.nodes))
    inside = [
        (end - 2, end - 1)
        for end, node in zip(ends, cluster.nodes, strict=True)
        if len(node.devices) > 1
    ]
    # The bandwidth between two nodes may be that of the slower node's link. Sorted by these links,
    # neighbours have all bandwidths that any two nodes have.
    by_link = sorted(ends, key=lambda end: group_link(cluster, [end - 1]).bandwidth_bytes_s)
    across = [(first - 1, second - 1) for first, second in pairwise(by_link)]
    return {group_link(cluster, pair).bandwidth_bytes_s for pair in (*inside, *across)}


def relative_bandwidths(cluster: Cluster) -> tuple[tuple[float, ...], ...]:
    """Return the bandwidth between every two ranks, relative to the fastest link in use.

    It is 1 for a rank and itself. The smallest among the ranks of a group belongs to the link that
    the group's collectives wait for.
    """
    ranks, fastest = range(len(cluster.devices)), max(bandwidths_in_use(cluster), default=1.0)
    return tuple(
        tuple(
            1.0 if i == j else group_link(cluster, (i, j)).bandwidth_bytes_s / fastest
            for j in ranks
        )
        for i in ranks
    )
