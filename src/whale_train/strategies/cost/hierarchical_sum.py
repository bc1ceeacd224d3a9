"""All-reduces in two levels: a reduce-scatter inside each host, an all-reduce of each part across
hosts, an all-gather inside each host (Jia et al. 2018, arXiv 1807.11205, section 3.2).

Owns which ranks take part in which level, and the seconds. `stages/gradient_sync.py` owns the
choice between this and one ring of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale_train.strategies.cost.collectives import (
    NicContention,
    all_reduce_time_s,
    gather_time_s,
)
from whale_train.strategies.hardware.cluster import Cluster

_Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TwoLevels:
    """The groups of all-reduces in two levels.

    inside: the ranks that share a host, for each host of each group.
    across: the ranks that hold the same part, one of every host, for each part of each group.
    """

    inside: _Groups
    across: _Groups


def two_levels(cluster: Cluster, groups: Sequence[Sequence[int]]) -> TwoLevels | None:
    """Return the two levels in which `groups` of ranks can all-reduce; None where they cannot.

    Every group must have members on several hosts, equally many on each, and more than one.
    """
    inside: list[tuple[int, ...]] = []
    across: list[tuple[int, ...]] = []
    for ranks in groups:
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(cluster.node_of[rank], []).append(rank)
        hosts = list(by_node.values())
        sizes = {len(members) for members in hosts}
        if len(hosts) < 2 or len(sizes) > 1 or sizes == {1}:
            return None
        inside += map(tuple, hosts)
        across += zip(*hosts, strict=True)
    return TwoLevels(tuple(inside), tuple(across)) if groups else None


def hierarchical_sum_time_s(
    cluster: Cluster,
    ranks: Sequence[int],
    num_bytes: float,
    crowd: NicContention | None = None,
) -> float:
    """Return the seconds of an all-reduce of `num_bytes` over `ranks` in two levels.

    The ranks must have two levels. `crowd` is the number of groups that leave each node (None: this
    one alone). Each of them leaves a node once for each of its members there, and all share the
    node's connection.
    """
    nodes = sorted({cluster.node_of[rank] for rank in ranks})
    members = len(ranks) // len(nodes)
    own = min((cluster.nodes[node].link for node in nodes), key=lambda x: x.bandwidth_bytes_s)
    leaving = members * max((crowd or {}).get(node, 1) for node in nodes)
    network = replace(
        cluster.network, bandwidth_bytes_s=cluster.network.bandwidth_bytes_s / leaving
    )
    inside = gather_time_s(num_bytes, members, own)
    return 2 * inside + all_reduce_time_s(num_bytes / members, len(nodes), network)
