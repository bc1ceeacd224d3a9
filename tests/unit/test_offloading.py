"""What is said of hosts that keep what devices do not."""

from dataclasses import replace

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import mixed, shipped, strategy_of, training

from whale_train.errors import PlanError
from whale_train.quantities import in_bytes
from whale_train.strategies.hardware.cluster import Cluster, Device, HostFigures, Link, Node
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.resolver.resolve import resolve

LINK = Link("inside", 1e10, 1e-6)
OFFLOAD = {"optimizer": "cpu", "parameters": "cpu"}
SPLIT = {"split": {"degree": 2}}
# The classifier has 8 x 4 + 4 parameters of its trunk, and 10 classes of 4 weights and a bias.
ELEMENTS = 36 + 50


def offload_of(strategy: object, cluster: Cluster) -> list[Decision]:
    plan = resolve(strategy, cluster, classifier(batch_norm=False), training(64, momentum=0.5))  # type: ignore[arg-type]
    return [decision for decision in plan.decisions if "offload" in decision.key]


@pytest.mark.parametrize(
    ("graph", "whats", "each"),
    [
        # SGD's momentum, the optimizer's copy and the gradient, fp32 all.
        ({"replicate": {"zero": 2, "offload": {"optimizer": "cpu"}}}, "optimizer", 12),
        ({"replicate": {"zero": 1, "offload": {"optimizer": "cpu"}}}, "optimizer", 8),
        # ZeRO 3 has the gradient twice.
        ({"replicate": {"zero": 3, "offload": OFFLOAD}}, "optimizer and parameters", 20),
        (
            {"replicate": {"zero": 3, "offload": OFFLOAD, "of": SPLIT}},
            "optimizer and parameters",
            20,
        ),
    ],
)
def test_how_much_hosts_keep(graph: object, whats: str, each: int) -> None:
    (decision,) = offload_of(strategy_of({"graph": graph}), mixed())
    in_all = in_bytes(ELEMENTS * each)
    assert (decision.key, decision.chosen) == ("strategy.graph.replicate.offload", "cpu")
    assert decision.reason == (
        f"{whats} on the hosts: {in_all} in all, {in_bytes(ELEMENTS * each / 2)} on each of 2, "
        "of whose memory hardware=v100_p100_mix says nothing"
    )


def hosted(*memory_bytes: float | None) -> Cluster:
    """Two devices on each of so many hosts, of whose memory so much is known."""
    device = Device("chip", {"fp32": 1e12}, 16e9, 1e11)
    hosts = [None if m is None else HostFigures("host", m, 1e11, LINK) for m in memory_bytes]
    return Cluster("mine", tuple(Node((device,) * 2, LINK, host) for host in hosts), LINK)


OPTIMIZER = {"zero": 2, "offload": {"optimizer": "cpu"}}
GRAPHS: list[object] = [
    {"replicate": OPTIMIZER},
    {"replicate": {**OPTIMIZER, "of": {"split": {"degree": 2}}}},
]


@pytest.mark.parametrize("graph", GRAPHS)
def test_hosts_hold_what_is_offloaded(graph: object) -> None:
    half = ELEMENTS * 12 / 2  # on each of two hosts: momentum, the optimizer's copy, the gradient
    (decision,) = offload_of(strategy_of({"graph": graph}), hosted(half, half))
    assert decision.reason == "optimizer on the hosts: 1.03 kB in all, 516 B on each of 2"
    with pytest.raises(PlanError) as error:
        offload_of(strategy_of({"graph": graph}), hosted(half, half - 100))
    (fault,) = error.value.faults
    assert str(fault) == (
        "strategy.graph.replicate.offload keeps 516 B on host 1 of hardware=mine, 100 B more "
        "than its memory; use more hosts, or an optimizer with less state"
    )
    (decision,) = offload_of(strategy_of({"graph": graph}), hosted(half, None))
    assert decision.reason.endswith("of whose memory hardware=mine says nothing")


def test_hosts_of_unlike_numbers_of_devices() -> None:
    whole = hosted(ELEMENTS * 8, ELEMENTS * 4)
    cluster = replace(
        whole, nodes=(whole.nodes[0], replace(whole.nodes[1], devices=whole.devices[:1]))
    )
    (decision,) = offload_of(strategy_of({"graph": GRAPHS[0]}), cluster)
    assert decision.reason == "optimizer on the hosts: 1.03 kB in all, at most 688 B on each of 2"


def test_cpu_processes_are_on_their_host() -> None:
    process = Device("cpu_process", {"fp32": 1e11}, 4e9, 1e10)
    link = Link("memory", 1e9, 1e-5)
    assert (
        offload_of(shipped("zero3_offload"), Cluster("cpu", (Node((process,) * 2, link),), link))
        == []
    )
