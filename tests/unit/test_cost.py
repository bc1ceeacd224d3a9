"""The cost model against sums done by hand on round figures."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.strategies.cost.collectives import (
    all_reduce_time_s,
    gather_time_s,
    group_link,
    nic_contention,
    send_time_s,
    sum_time_s,
)
from whale_train.strategies.cost.hierarchical_sum import (
    TwoLevels,
    hierarchical_sum_time_s,
    two_levels,
)
from whale_train.strategies.cost.op_work import KernelKind, Traffic, Work
from whale_train.strategies.cost.roofline import (
    Times,
    accumulation_time_s,
    fetch_time_s,
    flops_rate,
    kernel_of,
    offloaded_update_time_s,
    update_time_s,
    whole_times,
    work_times,
)
from whale_train.strategies.hardware.cluster import (
    CPU_PROCESS,
    Cluster,
    Device,
    HostShare,
    Kernel,
    Link,
    Node,
    Roofline,
)

# 1 TFLOP/s, 100 GB/s of memory; 1 GB/s and 1 ms a message.
DEVICE = Device("round", {"fp32": 1e12, "bf16": 4e12}, 16e9, 1e11)
LINK = Link("round", 1e9, 1e-3)
NETWORK = Link("network", 5e8, 1e-2)
ONE_ROOFLINE = Kernel(Roofline(1.0, 10.0, 5.0), Roofline(2.0, 5.0, 2.5))
MEASURED = Device(
    "measured", {"fp32": 1.0}, 1.0, 1.0, {"fp32": dict.fromkeys(KernelKind, ONE_ROOFLINE)}
)


def test_a_roofline_adds_overhead_arithmetic_and_traffic() -> None:
    assert Roofline(1.0, 10.0, 5.0).seconds(20.0, 15.0) == 1.0 + 2.0 + 3.0


def test_what_was_measured_counts_and_not_the_peaks() -> None:
    # 2 samples: 40 FLOPs and 5 + 2 x 5 bytes: 1 + 4 + 3 forward; 2 + 8 + 6 backward, in halves.
    product = Work(KernelKind.PRODUCT, 20.0, Traffic(5.0, 5.0), None, True, True)
    assert work_times({product: 3}, 2, MEASURED, "fp32") == Times(24.0, 24.0, 24.0)
    first = Work(KernelKind.PRODUCT, 20.0, Traffic(5.0, 5.0), None, False, True)
    assert work_times({first: 1}, 2, MEASURED, "fp32") == Times(8.0, 0.0, 8.0)


def test_a_backward_of_its_own_traffic() -> None:
    lookup = Work(KernelKind.LOOKUP, 0.0, Traffic(0.0, 5.0), Traffic(20.0, 5.0), False, True)
    assert work_times({lookup: 1}, 1, MEASURED, "fp32") == Times(2.0, 0.0, 2.0 + 10.0)
    summed = Work(KernelKind.POINTWISE, 0.0, Traffic(), Traffic(0.0, 5.0), True, False)
    assert work_times({summed: 1}, 1, MEASURED, "fp32") == Times(0.0, 4.0, 0.0)


def test_without_measurements_a_part_of_the_peaks() -> None:
    kernel = kernel_of(DEVICE, "fp32", KernelKind.PRODUCT)
    assert 0.5e12 < kernel.forward.flops_s < 1e12
    assert kernel.backward.flops_s == kernel.forward.flops_s / 2
    assert 0.5e11 < kernel_of(DEVICE, "fp32", KernelKind.NORM).forward.bytes_s < 1e11
    # Half as wide, twice as many: traffic is counted in fp32.
    narrow, wide = (kernel_of(DEVICE, p, KernelKind.NORM).forward.bytes_s for p in ("bf16", "fp32"))
    assert narrow == 2 * wide
    assert whole_times(1e15, DEVICE, "fp32").total > 3e15 / 1e12
    assert flops_rate(DEVICE, "bf16") == 4e12
    with pytest.raises(KeyError):
        flops_rate(DEVICE, "fp16")


@pytest.mark.parametrize(("states", "passes"), [(0, 4), (1, 6), (2, 8)])
def test_the_update_is_memory_traffic(states: int, passes: int) -> None:
    # Each state and the weight is read and written, the gradient read twice: for the norm as well.
    found = update_time_s(1e9, states, DEVICE) - update_time_s(0, states, DEVICE)
    assert found == pytest.approx(4e9 * passes / 0.7e11, rel=1e-9)
    assert offloaded_update_time_s(1e9, states, DEVICE, on_cpu=True) == update_time_s(
        1e9, states, DEVICE
    )
    assert offloaded_update_time_s(1e9, states, DEVICE, on_cpu=False) > 2 * 4e9 / 16e9


def test_gradients_are_added_to_those_there_are() -> None:
    # 1e9 values of fp32 read twice and written once over seven tenths of 100 GB/s, 3 operations.
    found = accumulation_time_s(1e9, 3, DEVICE, "fp32")
    assert found == pytest.approx(12e9 / 0.7e11 + 3 * 7e-6)
    # Gradients are of fp32 whatever the precision, of which a device's bandwidth is as it is.
    assert accumulation_time_s(1e9, 3, DEVICE, "bf16") == pytest.approx(found)
    assert accumulation_time_s(20.0, 2, MEASURED, "fp32") == 2 * 1.0 + 240 / 5.0


def test_what_a_host_keeps_goes_over_its_link_and_is_updated_in_its_memory() -> None:
    device = replace(DEVICE, host=HostShare(memory_bytes_s=5e10, link_bytes_s=2e10))
    slower = replace(DEVICE, host=HostShare(memory_bytes_s=5e10, link_bytes_s=1e9))
    # 4 GB of gradients down and of weights up; 8 fp32 values each over four fifths of 50 GB/s.
    assert offloaded_update_time_s(1e9, 2, device, on_cpu=False) == pytest.approx(0.4 + 32e9 / 4e10)
    assert fetch_time_s(4e9, [device, device], on_cpu=False) == pytest.approx(0.2)
    assert fetch_time_s(4e9, [device, slower], on_cpu=False) == pytest.approx(4.0)
    assert fetch_time_s(4e9, [device], on_cpu=True) == 0.0


@pytest.mark.parametrize(
    ("members", "gather_s"),
    [
        (1, 0.0),
        (2, 0.4 / 2 * 1 + 0.001),  # 0.4 GB: half of it, in one message
        (4, 0.4 / 4 * 3 + 0.003),  # three messages of a quarter
        (5, 0.32 + 0.004),
    ],
)
def test_rings_by_hand(members: int, gather_s: float) -> None:
    assert gather_time_s(4e8, members, LINK) == pytest.approx(gather_s, rel=1e-12)
    assert all_reduce_time_s(4e8, members, LINK) == pytest.approx(2 * gather_s, rel=1e-12)
    assert send_time_s(4e8, LINK) == pytest.approx(0.401)


def test_few_bytes_go_up_and_down_a_tree() -> None:
    # 1,024 members: ten levels each way, and not 1,023 messages twice.
    assert all_reduce_time_s(4.0, 1024, LINK) == pytest.approx(20e-3, rel=1e-3)


def test_nodes_exchange_what_they_have_summed() -> None:
    """Between two nodes half of the bytes go each way, twice, whatever number of GPUs each has; and
    not 3/4 as in a ring of all. CPU processes go in that ring."""
    cluster = Cluster("two", (Node((DEVICE,) * 2, LINK),) * 2, NETWORK)
    between = 2 * (NETWORK.latency_s + 2e8 / NETWORK.bandwidth_bytes_s)
    assert sum_time_s(cluster, range(4), 4e8) == pytest.approx(between)
    ring = all_reduce_time_s(4e8, 4, NETWORK)
    process = replace(DEVICE, name=CPU_PROCESS)
    hosts = replace(cluster, nodes=(Node((process,) * 2, LINK),) * 2)
    assert sum_time_s(hosts, range(4), 4e8) == ring > between
    # One on each node has nothing to sum inside; on one node there is nothing between.
    assert sum_time_s(cluster, (0, 2), 4e8) == all_reduce_time_s(4e8, 2, NETWORK)
    assert sum_time_s(cluster, (0, 1), 4e8) == all_reduce_time_s(4e8, 2, LINK)


def test_two_levels_are_hosts_and_places_on_them() -> None:
    pair = Node((DEVICE,) * 2, LINK)
    cluster = Cluster("three", (pair, pair, Node((DEVICE,), LINK)), NETWORK)
    assert two_levels(cluster, [(0, 1, 2, 3)]) == TwoLevels(((0, 1), (2, 3)), ((0, 2), (1, 3)))
    # One host, one member on each, hosts of unlike numbers, and one group of several that cannot.
    for groups in ([(0, 1)], [(0, 2)], [(0, 1, 2, 3, 4)], [(0, 1, 2, 3), (0, 4)], []):
        assert two_levels(cluster, groups) is None


def test_two_levels_by_hand() -> None:
    """Half of the bytes inside, twice; then both halves out of a host and in, by one connection."""
    cluster = Cluster("two", (Node((DEVICE,) * 2, LINK),) * 2, NETWORK)
    inside = LINK.latency_s + 2e8 / LINK.bandwidth_bytes_s
    across = 2 * (NETWORK.latency_s + 1e8 / (NETWORK.bandwidth_bytes_s / 2))
    by_hand = 2 * inside + across
    assert hierarchical_sum_time_s(cluster, range(4), 4e8) == pytest.approx(by_hand)
    crowded = hierarchical_sum_time_s(cluster, range(4), 4e8, {0: 3, 1: 3})
    assert crowded == pytest.approx(by_hand + 2 * 2 * 2e8 / NETWORK.bandwidth_bytes_s)
    # Few bytes cross the network in fewer messages than those of a ring or a tree of all.
    process = replace(DEVICE, name=CPU_PROCESS)
    hosts = replace(cluster, nodes=(Node((process,) * 2, LINK),) * 2)
    assert hierarchical_sum_time_s(hosts, range(4), 4.0) < sum_time_s(hosts, range(4), 4.0)


@given(st.integers(2, 40), st.floats(1, 1e12))
def test_a_gather_is_its_messages_one_after_another(members: int, num_bytes: float) -> None:
    total = 0.0
    for _ in range(members - 1):
        total += LINK.latency_s + num_bytes / members / LINK.bandwidth_bytes_s
    assert gather_time_s(num_bytes, members, LINK) == pytest.approx(total, rel=1e-9)


def test_groups_that_leave_a_node_share_its_way_out() -> None:
    cluster = Cluster("two", (Node((DEVICE,) * 2, LINK),) * 2, NETWORK)
    assert group_link(cluster, (0, 1)) == LINK
    assert group_link(cluster, (0, 2)) == NETWORK
    crowd = nic_contention(cluster, [(0, 2), (1, 3), (0, 1)])
    assert crowd == {0: 2, 1: 2}
    assert group_link(cluster, (0, 2), crowd).bandwidth_bytes_s == NETWORK.bandwidth_bytes_s / 2


def test_a_shard_group_of_one_host_shares_memory() -> None:
    memory = Link("memory", 1e10, 1e-5)
    nodes = (Node((DEVICE,) * 2, LINK),) * 2
    cluster = Cluster("two", nodes, NETWORK, shared_memory=memory)
    assert group_link(cluster, (0, 1), by_memory=True) == memory
    assert group_link(cluster, (0, 1)) == LINK
    assert group_link(cluster, (0, 2), by_memory=True) == NETWORK
    assert sum_time_s(cluster, (0, 1), 4e8, by_memory=True) == all_reduce_time_s(4e8, 2, memory)


def test_members_that_share_memory_add_up_all_of_theirs() -> None:
    memory = Link("memory", 1e10, 0.0)
    cluster = Cluster("one", (Node((DEVICE,) * 8, LINK),), NETWORK, shared_memory=memory)
    two, four, eight = (sum_time_s(cluster, range(n), 4e8, by_memory=True) for n in (2, 4, 8))
    # A pass to write theirs, then two read and one written for each of the others.
    assert (four, eight) == (pytest.approx(two * 10 / 4), pytest.approx(two * 22 / 4))
