"""The devices that a strategy uses: the first so many, or so many of each kind."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operation_graphs import gpt
from tests.unit.plan_requests import mixed, strategy_of, training

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.nodes import read_strategy
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.resolver.resolve import resolve

KINDS = {name: Device(name, {"fp32": 1e12}, 1e10, 1e11) for name in ("a", "b", "c")}
INSIDE, NETWORK = Link("inside", 1e9, 1e-6), Link("network", 1e8, 1e-5)
DP = {"replicate": {}}


def inventory(*nodes: str) -> Cluster:
    """A node for each word, a device for each of its letters."""
    listed = tuple(Node(tuple(KINDS[kind] for kind in node), INSIDE) for node in nodes)
    return Cluster("mine", listed, NETWORK)


def names(cluster: Cluster) -> list[str]:
    return ["".join(device.name for device in node.devices) for node in cluster.nodes]


def test_devices_are_those_of_each_kind_wherever_they_are_listed() -> None:
    there = inventory("bb", "aaaa", "cb", "aa", "bbb")
    assert names(there.of_kinds({"a": 5, "b": 4})) == ["aaaa", "a", "bbb", "b"]
    assert names(there.of_kinds({"b": 4, "a": 5})) == ["bbb", "b", "aaaa", "a"]
    assert names(there.of_kinds({"c": 1})) == ["c"]
    assert names(there.first(3)) == ["bb", "a"]
    assert there.chosen(None) is there
    assert there.chosen(3) == there.first(3)
    assert there.chosen({"a": 1}) == there.of_kinds({"a": 1})


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_order_of_nodes_does_not_matter(nodes: list[str], random: Any) -> None:
    nodes = ["".join(sorted(node)) for node in nodes]
    there = inventory(*nodes)
    counts = {kind: random.randint(1, count) for kind, count in sorted(there.kinds.items())}
    shuffled = list(nodes)
    random.shuffle(shuffled)
    used = there.of_kinds(counts)
    assert Counter(device.name for device in used.devices) == counts
    assert names(inventory(*shuffled).of_kinds(counts)) == names(used)


def test_a_plan_numbers_the_ranks_that_are_used() -> None:
    plan = resolve(
        strategy_of({"devices": {"a": 2, "c": 1}, "graph": DP}),
        inventory("a", "bb", "c", "a"),
        gpt(),
        training(6),
    )
    assert [(rank.rank, rank.node, rank.device) for rank in plan.ranks] == [
        (0, 0, "a"),
        (1, 1, "a"),
        (2, 2, "c"),
    ]
    (decision,) = [each for each in plan.decisions if each.key == "strategy.devices"]
    assert (decision.chosen, decision.rejected) == ("3", "5")


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (
            {"v100": 2},
            "strategy.devices.v100=2 is no device of hardware=v100_p100_mix; use one of: "
            "p100_pcie_16gb, v100_sxm2_32gb",
        ),
        (
            {"p100_pcie_16gb": 9},
            "strategy.devices.p100_pcie_16gb=9 is more than the 8 of hardware=v100_p100_mix; "
            "use at most 8",
        ),
    ],
)
def test_devices_that_are_not_there(devices: dict[str, int], said: str) -> None:
    strategy = strategy_of({"devices": devices, "graph": DP})
    with pytest.raises(PlanError) as error:
        resolve(strategy, mixed(), gpt(), training())
    assert [str(fault) for fault in error.value.faults] == [said]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ({}, "strategy.devices={} names no device; name one, or use auto"),
        (
            {"a": 0},
            "strategy.devices.a=0 is not a whole number of at least 1; use such a number, or auto",
        ),
        (
            {"a": "auto"},
            "strategy.devices.a=auto is not a whole number of at least 1; use such a number",
        ),
    ],
)
def test_devices_that_are_no_numbers(devices: dict[str, Any], said: str) -> None:
    faults: list[Fault] = []
    assert read_strategy({"devices": devices, "graph": DP}, "mine", faults) is None
    assert [str(fault) for fault in faults] == [said]


def test_fewer_processes_have_the_threads_of_fewer() -> None:
    three = inventory("aaa")
    fewer = replace(inventory("aa"), processors=2.0)
    assert replace(three, fewer={2: fewer}).of_kinds({"a": 2}) is fewer
