"""How slow processes that stand for devices, and what joins them, are."""

import pytest

from whale_train.launcher.planning.devices.emulation import (
    bandwidths_in_use,
    paces,
    relative_bandwidths,
)
from whale_train.strategies.cost.collectives import group_link
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node


def device(tera: float) -> Device:
    return Device(f"gpu_{tera}", {"fp32": tera * 1e12, "bf16": 8e12}, 16e9, 9e11)


def test_the_fastest_has_a_processor_where_there_are_enough() -> None:
    assert paces([device(4), device(2), device(1)], "fp32", processors=8) == (1, 2, 4)
    assert paces([device(4), device(2)], "bf16", processors=8) == (1, 1)


@pytest.mark.parametrize("processors", [1.0, 2.0, 0.5])
def test_all_are_slowed_alike_where_there_are_not(processors: float) -> None:
    found = paces([device(4)] * 4 + [device(2)] * 4, "fp32", processors)
    assert found[4:] == tuple(2 * pace for pace in found[:4])
    # Together they want a little less than there is.
    assert 0.8 * processors < sum(1 / pace for pace in found) < processors


def cluster(network: float, *nodes: tuple[int, float]) -> Cluster:
    """Of nodes of (devices, bandwidth of their link)."""
    made = (Node((device(1),) * count, Link("inside", link, 1e-6)) for count, link in nodes)
    return Cluster("c", tuple(made), Link("network", network, 1e-5))


def test_links_are_measured_by_the_fastest_in_use() -> None:
    found = relative_bandwidths(cluster(6.25, (2, 150), (2, 15)))
    slow = 6.25 / 150
    assert found == (
        (1, 1, slow, slow),
        (1, 1, slow, slow),
        (slow, slow, 1, 0.1),
        (slow, slow, 0.1, 1),
    )
    # Nothing goes through the one device's own node alone.
    assert relative_bandwidths(cluster(5, (1, 150), (2, 10))) == (
        (1, 0.5, 0.5),
        (0.5, 1, 1),
        (0.5, 1, 1),
    )
    assert relative_bandwidths(cluster(5, (1, 150))) == ((1,),)


@pytest.mark.parametrize(
    "case",
    [
        cluster(5, (2, 10)),
        cluster(5, (1, 10)),
        cluster(20, (1, 10), (1, 30), (1, 15)),
        cluster(20, (2, 10), (1, 30), (1, 40), (3, 7)),
        cluster(10, (2, 10), (2, 10)),
    ],
)
def test_the_bandwidths_in_use_are_those_between_any_two_ranks(case: Cluster) -> None:
    ranks = range(len(case.devices))
    pairs = [(i, j) for i in ranks for j in ranks if i < j]
    assert bandwidths_in_use(case) == {group_link(case, p).bandwidth_bytes_s for p in pairs}
