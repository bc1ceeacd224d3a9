"""Links that groups of ranks communicate over, and the seconds of their collectives.

Links are a hierarchy: shared memory between CPU processes of a host, the node's own link, the
network. Inside a node every device has the link's bandwidth to itself (NVSwitch). A node has one
connection to the network, which all groups that leave the node share.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil, log2

from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.cost.roofline import kernel_of
from whale_train.strategies.hardware.cluster import Cluster, Device, Link

NicContention = Mapping[int, int]  # the number of groups whose transfers leave a node, by node


def nic_contention(cluster: Cluster, groups: Iterable[Sequence[int]]) -> NicContention:
    """Return the number of `groups` of ranks that have members both on a node and outside it, by
    node."""
    groups_leaving: Counter[int] = Counter()
    node_of = cluster.node_of
    crossing = Counter(tuple(dict.fromkeys([node_of[rank] for rank in ranks])) for ranks in groups)
    for nodes, count in crossing.items():
        for node in nodes if len(nodes) > 1 else ():
            groups_leaving[node] += count
    return groups_leaving


def group_link(
    cluster: Cluster,
    ranks: Sequence[int],
    crowd: NicContention | None = None,
    by_memory: bool = False,
) -> Link:
    """Return the bottleneck link of a ring over `ranks`: the slowest of the nodes' own links and,
    where the ring leaves a node, of the network.

    crowd: the number of groups that share each node's network connection, whose bandwidth is
        divided among them. None counts this group alone.
    by_memory: use shared memory where the ranks are on one node that has it. Shard groups and
        pipeline messages do, and so do reductions over replicas without a DeepSpeed engine.
    """
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
    """Return the shared-memory link of `members` ranks. `memory` was measured on a pair.

    More than two ranks form no ring. Each writes its value and adds up those of the group, in 3 n -
    2 passes over the value. A pair takes 4 passes.
    """
    passes, moved = 3 * members - 2, 2 * (members - 1) / members
    slower = moved * 4 / passes
    return replace(memory, bandwidth_bytes_s=memory.bandwidth_bytes_s * slower)


def all_reduce_time_s(num_bytes: float, members: int, link: Link) -> float:
    """Return the seconds of an all-reduce of `num_bytes` over `members` ranks.

    It runs as a ring or, for few bytes, as a pair of trees, whichever is faster (NCCL 2.4: double
    binary trees after Sanders, Speck and Träff, "Two-tree algorithms", Parallel Computing 2009).
    """
    if members == 1:
        return 0.0
    ring = 2 * gather_time_s(num_bytes, members, link)
    tree = 2 * (ceil(log2(members)) * link.latency_s + num_bytes / link.bandwidth_bytes_s)
    return min(ring, tree)


def sum_time_s(
    cluster: Cluster,
    ranks: Sequence[int],
    num_bytes: float,
    crowd: NicContention | None = None,
    by_memory: bool = False,
) -> float:
    """Return the seconds of an all-reduce of `num_bytes` over `ranks`. `crowd` and `by_memory` are
    as in `group_link`.

    Where some nodes have several of the ranks, GPUs reduce inside the nodes while the nodes
    exchange their sums. A node then sends one value over its network connection, instead of taking
    part in a ring of all ranks (NCCL's trees are chains inside of nodes and trees between them;
    github.com/NVIDIA/nccl-tests/issues/22 has 16 GPUs on two nodes reduce 1 GB in half a ring's
    time). Gloo, between CPU processes, runs one ring of all ranks.
    """
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
    """Return the seconds of an all-gather or a reduce-scatter over `members` ranks, run as a ring
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009). `num_bytes` is the
    size of the full, gathered value."""
    if members == 1:
        return 0.0
    moved = num_bytes * (members - 1) / members
    return moved / link.bandwidth_bytes_s + (members - 1) * link.latency_s


def all_to_all_time_s(cluster: Cluster, ranks: Sequence[int], num_bytes: float) -> float:
    """Return the seconds of an all-to-all in which each of `ranks` sends an equal part of its value
    to every other rank. `num_bytes` is the size of the values of all ranks together.

    Bytes that stay in a node use the node's own link, at the same time as those that leave it. The
    members on a node share its network connection.
    """
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


# How often DeepSpeed's ZeRO 1 and 2 read or write a gradient besides sending it (into a bucket,
# averaged, out of the bucket into the partition), and a parameter (into and out of the buffer of
# the all-gather).
_PARTITION_PASSES = 8


def partitioned_sum_time_s(
    elements: float, summed_s: float, devices: Sequence[Device], precision: str
) -> float:
    """Return the seconds to reduce `elements` gradients for a partitioned optimizer (ZeRO 1 and 2).
    `summed_s` is the time of their all-reduce.

    DeepSpeed (0.19) reduces full buckets to all members and, as configured here, does not overlap
    this with computation. The slowest of `devices` counts.
    """
    kinds = {id(device): device for device in devices}.values()
    return summed_s + max(_partition_s(elements, device, precision) for device in kinds)


def _partition_s(elements: float, device: Device, precision: str) -> float:
    """Return the seconds of DeepSpeed's work besides sending: as measured on `device`, else the
    time of its copies."""
    measured = device.measured(precision).get(KernelKind.PARTITION)
    if measured is not None:
        return measured.forward.seconds(0, 4 * elements)
    copy = kernel_of(device, precision, KernelKind.COPY).forward
    return copy.seconds(0, 4 * _PARTITION_PASSES * elements)


def zero3_gather_overhead_s(
    elements: float, modules: int, devices: Sequence[Device], precision: str
) -> tuple[float, float]:
    """Return the seconds that ZeRO 3 adds to a forward and to a backward besides the transfers.

    DeepSpeed stops at each of the `modules` with parameters, of `elements` in all. The result is
    the largest overhead measured on `devices`; 0.0 where nothing was measured.
    """
    kinds = {id(device): device for device in devices}.values()
    kernels = [device.measured(precision).get(KernelKind.GATHER) for device in kinds]
    stops = [
        [
            modules * roofline.overhead_s + 4 * elements / roofline.bytes_s
            for roofline in (kernel.forward, kernel.backward)
        ]
        for kernel in kernels
        if kernel is not None
    ]
    forward, backward = (max((stop[part] for stop in stops), default=0.0) for part in range(2))
    return forward, backward


def modules_of(parameters: Iterable[str]) -> set[str]:
    """Return the paths of the modules that own `parameters` (paths)."""
    return {path.rpartition(".")[0] for path in parameters}


def send_time_s(num_bytes: float, link: Link) -> float:
    """Return the seconds of one message of `num_bytes` over `link`."""
    return link.latency_s + num_bytes / link.bandwidth_bytes_s
