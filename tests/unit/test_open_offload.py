"""What replicas offload where the strategy says `auto`."""

from dataclasses import replace

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import strategy_of, training
from tests.unit.test_likeness import blocks

from whale_train.errors import PlanError
from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.hardware.cluster import (
    Cluster,
    Device,
    HostFigures,
    Link,
    Node,
    NvmeFigures,
)
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.open_offload import alternatives
from whale_train.strategies.resolver.resolve import resolve
from whale_train.strategies.stage_memory.within_memory import ShortOfMemoryError

AUTO = {"replicate": {"offload": "auto"}}
STATE = {"optimizer": "auto", "parameters": "auto"}
LINK = Link("inside", 1e10, 1e-6)


FILES = {**STATE, "path": "/nvme"}


def ways(body: object) -> list[tuple[int, str, str]]:
    nodes = [way.strategy.graph[0] for way in alternatives(strategy_of({"graph": body}))]
    assert all(isinstance(node, Replicate) for node in nodes)
    return [(x.zero, x.offload_optimizer, x.offload_parameters) for x in nodes]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"offload": {"optimizer": "auto"}}, [
            (0, "none", "none"), (1, "cpu", "none"), (2, "cpu", "none"), (3, "cpu", "none")
        ]),
        ({"zero": 2, "offload": {"optimizer": "auto"}}, [(2, "none", "none"), (2, "cpu", "none")]),
        ({"offload": {"parameters": "auto"}}, [(0, "none", "none"), (3, "none", "cpu")]),
        ({"zero": 2, "offload": {"optimizer": "cpu", "parameters": "auto"}}, [
            (2, "cpu", "none"), (3, "cpu", "cpu")
        ]),
        ({"zero": 3, "offload": STATE}, [
            (3, "none", "none"), (3, "cpu", "none"), (3, "none", "cpu"), (3, "cpu", "cpu")
        ]),
        ({"offload": {"optimizer": "none"}}, []),
        ({"zero": 1, "offload": FILES}, [
            (1, "none", "none"), (1, "cpu", "none"), (3, "nvme", "none"), (3, "none", "cpu"),
            (3, "cpu", "cpu"), (3, "nvme", "cpu"), (3, "cpu", "nvme"), (3, "nvme", "nvme"),
        ]),
        ({"zero": 3, "offload": {**FILES, "parameters": "none"}}, [
            (3, "none", "none"), (3, "cpu", "none"), (3, "nvme", "none")
        ]),
    ],
)  # fmt: skip
def test_which_alternatives_there_are(body: object, expected: list[tuple[int, str, str]]) -> None:
    assert ways({"replicate": body}) == expected


def test_open_offload_inside_of_a_pipeline_is_decided() -> None:
    inner = {"replicate": {"degree": 2, "offload": {"optimizer": "auto"}}}
    graph = {"pipeline": {"stages": [{"stage": {"of": inner}}, {"stage": {"of": inner}}]}}
    assert len(alternatives(strategy_of({"graph": graph}))) == 4
    plan = planned(graph, 1e9, devices=4)
    assert [x.offload["optimizer"] for x in plan.task_graphs] == ["none", "none"]


def cluster(memory_bytes: float, devices: int = 2) -> Cluster:
    device = Device("chip", {"fp32": 1e12}, memory_bytes, 1e11)
    return Cluster("mine", (Node((device,) * devices, LINK),), LINK)


def planned(graph: object, memory_bytes: float, devices: int = 2) -> Plan:
    strategy = strategy_of({"graph": graph})
    of_training = replace(training(2, momentum=0.5), bucket_elements=8)
    here = cluster(memory_bytes, devices)
    return resolve(strategy, here, classifier(batch_norm=False, classes=100_000), of_training)


def test_only_what_does_not_fit_is_offloaded_and_the_plan_says_why() -> None:
    chosen = []
    for memory_bytes in (1e9, 5.9e6, 4.5e6):
        plan = planned(AUTO, memory_bytes)
        (graph,), (decision, *_) = plan.task_graphs, plan.decisions
        chosen.append((graph.zero, *graph.offload.values(), decision.chosen, decision.rejected))
    assert chosen == [
        (0, "none", "none", "none", ""),
        (1, "cpu", "none", "optimizer on the host, zero: 1", "none"),
        (2, "cpu", "none", "optimizer on the host, zero: 2", "none"),
    ]
    assert "none is 3.10 MB short; " in decision.reason
    assert "optimizer on the host, zero: 1 is" in decision.reason
    with pytest.raises(ShortOfMemoryError, match=r"101 kB more than its 3\.50 MB"):
        planned(AUTO, 3.5e6)


def test_files_are_chosen_where_a_folder_is_named_and_the_host_is_full() -> None:
    device = Device("chip", {"fp32": 1e12}, 1e9, 1e11)
    host, disks = HostFigures("small", 1e9, 1e11, LINK), NvmeFigures(1e10, 1e9, 1e9)
    here = Cluster("mine", (Node((device,), LINK, host, nvme=disks),), LINK)
    model = blocks((2_000_000,) * 16)  # 256 M parameters, whose values alone fill the host

    def resolved(offload: object, micro_batches: int) -> Plan:
        of_training = replace(training(2, momentum=0.5), accumulate=micro_batches)
        strategy = strategy_of({"graph": {"replicate": {"offload": offload}}})
        return resolve(strategy, here, model, of_training)

    with pytest.raises(PlanError):
        resolved(STATE, 1)
    plan = resolved(FILES, 1)
    (graph,), (decision, *_) = plan.task_graphs, plan.decisions
    assert decision.chosen == "optimizer and parameters in files, zero: 3"
    assert (graph.zero, *graph.offload.values()) == (3, "nvme", "nvme")
    with pytest.raises(PlanError):  # two backwards add up gradients in the host's memory
        resolved(FILES, 2)


def test_a_fault_of_every_alternative_is_the_first_ones() -> None:
    with pytest.raises(PlanError, match="degree=3 does not divide"):
        planned({"replicate": {"degree": 3, "offload": "auto"}}, 1e9)
