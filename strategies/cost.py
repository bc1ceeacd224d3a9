"""How long a step takes: a first cost model, from FLOPs, bytes and alpha-beta links.

Rates are the catalogue's peaks, so a prediction is the floor of what the devices allow, the same
for every strategy compared; nothing overlaps. Collectives are rings: an all-reduce moves
2(n-1)/n of its bytes through every member's slowest link, a gather or scatter (n-1)/n
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009).
"""

from collections.abc import Sequence

from whale_train.strategies.cluster import Cluster, Device, Link

# Backward computes the gradient of each product's two inputs: twice the forward's work.
BACKWARD_OVER_FORWARD = 2


def flops_rate(device: Device, precision: str) -> float:
    """Peak FLOP/s of `device` at `precision`; KeyError where it has no unit for it."""
    return device.flops[precision]


def compute_time_s(flops: float, device: Device, precision: str) -> float:
    """Forward and backward of work whose forward takes `flops`."""
    return (1 + BACKWARD_OVER_FORWARD) * flops / flops_rate(device, precision)


def slowest_link(cluster: Cluster, ranks: Sequence[int]) -> Link:
    """What a ring over `ranks` waits for: the network where it leaves a node, else the node's."""
    nodes = {cluster.node_of[rank] for rank in ranks}
    links = [cluster.nodes[node].link for node in nodes]
    if len(nodes) > 1:
        links.append(cluster.network)
    return min(links, key=lambda link: link.bandwidth_bytes_s)


def all_reduce_time_s(num_bytes: float, members: int, link: Link) -> float:
    return 2 * gather_time_s(num_bytes, members, link)


def gather_time_s(num_bytes: float, members: int, link: Link) -> float:
    """All-gather or reduce-scatter whose whole (gathered) value has `num_bytes`."""
    if members == 1:
        return 0.0
    moved = num_bytes * (members - 1) / members
    return moved / link.bandwidth_bytes_s + (members - 1) * link.latency_s


def gradient_sync_time_s(num_bytes: float, members: int, link: Link, zero: int) -> float:
    """Gradients reduced and parameters restored: an all-reduce in two halves, and under ZeRO 3
    one more gather, for the backward (ZeRO paper, section 7)."""
    factor = 3 if zero == 3 else 2
    return factor * gather_time_s(num_bytes, members, link)


def optimizer_time_s(elements: float, states: int, device: Device) -> float:
    """Reading and writing every fp32 state, weight and gradient once, at memory bandwidth."""
    return 4 * elements * (2 * states + 3) / device.memory_bandwidth_bytes_s
