"""The cost model against sums done by hand on round figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.strategies.cluster import Cluster, Device, Link, Node
from whale_train.strategies.cost import (
    all_reduce_time_s,
    compute_time_s,
    flops_rate,
    gather_time_s,
    gradient_sync_time_s,
    optimizer_time_s,
    slowest_link,
)

# 1 TFLOP/s, 100 GB/s of memory; 1 GB/s and 1 ms a message.
DEVICE = Device("round", {"fp32": 1e12, "bf16": 4e12}, 16e9, 1e11)
LINK = Link("round", 1e9, 1e-3)


def test_backward_costs_twice_the_forward() -> None:
    assert compute_time_s(2e12, DEVICE, "fp32") == 6.0
    assert compute_time_s(2e12, DEVICE, "bf16") == 1.5
    assert flops_rate(DEVICE, "bf16") == 4e12
    with pytest.raises(KeyError):
        flops_rate(DEVICE, "fp16")


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
    for zero, gathers in [(0, 2), (1, 2), (2, 2), (3, 3)]:
        time_s = gradient_sync_time_s(4e8, members, LINK, zero)
        assert time_s == pytest.approx(gathers * gather_s, rel=1e-12)


@given(st.integers(2, 40), st.floats(1, 1e12))
def test_a_gather_is_its_messages_one_after_another(members: int, num_bytes: float) -> None:
    total = 0.0
    for _ in range(members - 1):
        total += LINK.latency_s + num_bytes / members / LINK.bandwidth_bytes_s
    assert gather_time_s(num_bytes, members, LINK) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(("states", "time_s"), [(0, 0.12), (1, 0.2), (2, 0.28)])
def test_the_update_is_memory_traffic(states: int, time_s: float) -> None:
    # 1e9 elements of 4 bytes at 1e11 bytes/s are 0.04 s a pass: each state is read and written,
    # the weight too, the gradient read. 3 passes for SGD, 5 with momentum, 7 for Adam.
    assert optimizer_time_s(1e9, states, DEVICE) == pytest.approx(time_s, rel=1e-12)


FAST, MIDDLE, SLOW = Link("fast", 1e11, 0), Link("middle", 1e10, 0), Link("slow", 1e9, 0)


@pytest.mark.parametrize(
    ("ranks", "network", "slowest"),
    [
        ([0, 1], SLOW, FAST),  # inside the first node
        ([2, 3], SLOW, MIDDLE),
        ([0, 2], SLOW, SLOW),
        ([0, 1, 2, 3], FAST, MIDDLE),  # the network is no slower than a node's own link
        ([1, 4], MIDDLE, SLOW),
        ([4], FAST, SLOW),
    ],
)
def test_a_ring_waits_for_its_slowest_link(ranks: list[int], network: Link, slowest: Link) -> None:
    nodes = (Node((DEVICE,) * 2, FAST), Node((DEVICE,) * 2, MIDDLE), Node((DEVICE,), SLOW))
    assert slowest_link(Cluster("mixed", nodes, network), ranks) is slowest
