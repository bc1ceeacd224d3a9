"""Which link a group's transfers wait for, with whom they share it, and how long they take.

Links are a hierarchy: shared memory where CPU processes of a host have it, the node's own link, the
network. Inside a node every device has the link's bandwidth to itself (NVSwitch); a node's way to
the network is one, which all groups that leave the node share.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, log2

from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.cost.roofline import kernel_of
from whale_train.strategies.hardware.cluster import Cluster, Device, Link

Crowd = Mapping[int, int]  # of each node, the groups whose transfers leave it


def crowd_of(cluster: Cluster, groups: Iterable[Sequence[int]]) -> Crowd:
    """Return how many of `groups` leave each node."""
    found: Counter[int] = Counter()
    node_of = cluster.node_of
    crossing = Counter(tuple(dict.fromkeys([node_of[rank] for rank in ranks])) for ranks in groups)
    for nodes, count in crossing.items():
        for node in nodes if len(nodes) > 1 else ():
            found[node] += count
    return found


def group_link(
    cluster: Cluster, ranks: Sequence[int], crowd: Crowd | None = None, by_memory: bool = False
) -> Link:
    """Return the link that a ring over `ranks` waits for: the network where it leaves a node, else
    the node's own link. `by_memory`: through shared memory where that can be, as shard groups go,
    messages of a pipeline, and sums over copies that are no engine's of DeepSpeed's."""
    nodes = {cluster.node_of[rank] for rank in ranks}
    if len(nodes) == 1 and by_memory and cluster.shared_memory is not None:
        return _among(cluster.shared_memory, len(ranks))
    links = [cluster.nodes[node].link for node in nodes]
    if len(nodes) > 1:
        crossing = max((crowd or {}).get(node, 1) for node in nodes)
        network = cluster.network
        bandwidth = network.bandwidth_bytes_s / max(1, crossing)
        links.append(replace(network, bandwidth_bytes_s=bandwidth))
    return min(links, key=lambda link: link.bandwidth_bytes_s)


def _among(memory: Link, members: int) -> Link:
    """Return the link that `memory`, measured of a pair, is for more members: none of them go in a
    ring. Each writes its value and adds up all of theirs, in 3 n - 2 passes over it, of which a
    pair has 4."""
    passes, moved = 3 * members - 2, 2 * (members - 1) / members
    slower = moved * 4 / passes
    return replace(memory, bandwidth_bytes_s=memory.bandwidth_bytes_s * slower)


def all_reduce_time_s(num_bytes: float, members: int, link: Link) -> float:
    """Return the seconds of a ring, or for few bytes of a pair of trees, whichever is done first
    (NCCL 2.4: double binary trees after Sanders, Speck and Träff, "Two-tree algorithms", Parallel
    Computing 2009)."""
    if members == 1:
        return 0.0
    ring = 2 * gather_time_s(num_bytes, members, link)
    tree = 2 * (ceil(log2(members)) * link.latency_s + num_bytes / link.bandwidth_bytes_s)
    return min(ring, tree)


def sum_time_s(
    cluster: Cluster,
    ranks: Sequence[int],
    num_bytes: float,
    crowd: Crowd | None = None,
    by_memory: bool = False,
) -> float:
    """Return the seconds of an all-reduce over `ranks`, `by_memory` as in `group_link`. Where these
    are several on each of some nodes, GPUs sum inside of the nodes while the nodes exchange their
    sums, so that a node's way out is taken by one value and not by a ring of all ranks (NCCL's
    trees are chains inside of nodes and trees between them; github.com/NVIDIA/nccl-tests/issues/22
    has 16 GPUs on two nodes sum 1 GB in half a ring's time). Gloo, between CPU processes, goes in a
    ring of all."""
    link = group_link(cluster, ranks, crowd, by_memory)
    flat = all_reduce_time_s(num_bytes, len(ranks), link)
    of_node = Counter(cluster.node_of[rank] for rank in ranks)
    if len(of_node) == 1 or cluster.on_cpu:
        return flat
    inside = max(
        all_reduce_time_s(num_bytes, members, cluster.nodes[node].link)
        for node, members in of_node.items()
    )
    return min(flat, max(inside, all_reduce_time_s(num_bytes, len(of_node), link)))


def gather_time_s(num_bytes: float, members: int, link: Link) -> float:
    """Return all-gather or reduce-scatter, as a ring (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms", JPDC 2009), whose whole (gathered) value has `num_bytes`."""
    if members == 1:
        return 0.0
    moved = num_bytes * (members - 1) / members
    return moved / link.bandwidth_bytes_s + (members - 1) * link.latency_s


def all_to_all_time_s(cluster: Cluster, ranks: Sequence[int], num_bytes: float) -> float:
    """Return the seconds in which every one of `ranks` sends each other one its part of what it
    has, `num_bytes` among all of them: what stays in a node goes over its own link beside what
    leaves it, for which the members there share the node's way out."""
    members = len(ranks)
    if members == 1:
        return 0.0
    link, own = group_link(cluster, ranks, by_memory=True), num_bytes / members
    of_node = Counter(cluster.node_of[rank] for rank in ranks)
    if len(of_node) == 1:
        moved = own * (members - 1) / members / link.bandwidth_bytes_s
    else:
        moved = max(
            max(
                own * (here - 1) / members / cluster.nodes[node].link.bandwidth_bytes_s,
                here * own * (members - here) / members / cluster.network.bandwidth_bytes_s,
            )
            for node, here in of_node.items()
        )
    return moved + (members - 1) * link.latency_s


# How often DeepSpeed's ZeRO 1 and 2 read or write a gradient beside sending it (into a bucket,
# averaged, out of it into the partition), and parameters (into and out of the buffer they are
# gathered in).
_PARTITION_PASSES = 8


def partitioned_sum_time_s(
    elements: float, summed_s: float, devices: Sequence[Device], precision: str
) -> float:
    """Gradients summed for an optimizer that is partitioned (ZeRO 1 and 2); `summed_s` is what
    their all-reduce takes.

    DeepSpeed (0.19) sums whole buckets, each for all members, and none while it computes, as we
    ask it to.
    """
    kinds = {id(device): device for device in devices}.values()
    return summed_s + max(_partition_s(elements, device, precision) for device in kinds)


def _partition_s(elements: float, device: Device, precision: str) -> float:
    """Return the seconds of what DeepSpeed does beside sending: measured, or those of its
    copies."""
    measured = device.kernels.get(precision, {}).get(KernelKind.PARTITION)
    if measured is not None:
        return measured.forward.seconds(0, 4 * elements)
    copy = kernel_of(device, precision, KernelKind.COPY).forward
    return copy.seconds(0, 4 * _PARTITION_PASSES * elements)


def gather_stops_s(
    elements: float, modules: int, devices: Sequence[Device], precision: str
) -> tuple[float, float]:
    """Return what a forward and a backward take longer under ZeRO 3, beside what is sent, where
    DeepSpeed stops at each of `modules` that have parameters: as measured, else nothing."""
    kinds = {id(device): device for device in devices}.values()
    found = [device.kernels.get(precision, {}).get(KernelKind.GATHER) for device in kinds]
    stops = [
        [
            modules * roofline.overhead_s + 4 * elements / roofline.bytes_s
            for roofline in (kernel.forward, kernel.backward)
        ]
        for kernel in found
        if kernel is not None
    ]
    forward, backward = (max((each[part] for each in stops), default=0.0) for part in range(2))
    return forward, backward


def modules_of(parameters: Iterable[str]) -> set[str]:
    """Return the paths of the modules that have these parameters."""
    return {path.rpartition(".")[0] for path in parameters}


def send_time_s(num_bytes: float, link: Link) -> float:
    return link.latency_s + num_bytes / link.bandwidth_bytes_s
