"""How slow CPU processes and what joins them are, to stand for devices (`launcher.device_speed`)
and their links (`launcher.link_speed`)."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from whale_train.strategies.cost.collectives import group_link
from whale_train.strategies.cost.roofline import flops_rate
from whale_train.strategies.hardware.cluster import Cluster, Device

# The part of the machine's processors that ranks may fill, so that none has to wait for one.
_FILLED = 0.9


def paces(devices: Sequence[Device], precision: str, processors: float) -> tuple[float, ...]:
    """For each of the devices, the seconds its process takes for a second on a processor.

    In proportion to the devices' peak FLOP/s. The fastest takes a second, unless the ranks would
    together want more than the `processors` there are (of as many threads as a rank has): then
    all are slowed alike.
    """
    rates = [flops_rate(device, precision) for device in devices]
    relative = [rate / max(rates) for rate in rates]
    crowd = max(1.0, sum(relative) / (_FILLED * processors))
    return tuple(crowd / part for part in relative)


def bandwidths_in_use(cluster: Cluster) -> set[float]:
    """Return the bandwidths, in bytes/s, of the links between any two ranks (none of one rank)."""
    ends = list(accumulate(len(node.devices) for node in cluster.nodes))
    inside = [
        (end - 2, end - 1)
        for end, node in zip(ends, cluster.nodes, strict=True)
        if len(node.devices) > 1
    ]
    # Between two nodes it may be the slower one's, so that neighbours by it have all there are.
    by_link = sorted(ends, key=lambda end: group_link(cluster, [end - 1]).bandwidth_bytes_s)
    across = [(first - 1, second - 1) for first, second in pairwise(by_link)]
    return {group_link(cluster, pair).bandwidth_bytes_s for pair in (*inside, *across)}


def relative_bandwidths(cluster: Cluster) -> tuple[tuple[float, ...], ...]:
    """For every two ranks, the bandwidth between them over that of the fastest link in use (1 for a
    rank and itself). The least among a group's ranks is that of the link its collectives wait for.
    """
    ranks, fastest = range(len(cluster.devices)), max(bandwidths_in_use(cluster), default=1.0)
    return tuple(
        tuple(
            1.0 if i == j else group_link(cluster, (i, j)).bandwidth_bytes_s / fastest
            for j in ranks
        )
        for i in ranks
    )
