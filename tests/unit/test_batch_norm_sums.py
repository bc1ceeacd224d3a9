"""What copies exchange for a synchronised BatchNorm, by hand: bytes and messages."""

from dataclasses import replace

import pytest
from tests.unit.operation_graphs import Sketch, classifier
from tests.unit.plan_requests import strategy_of, training

from whale_train.strategies.cost.batch_exchange import batch_norm_times, batch_sum_times
from whale_train.strategies.cost.roofline import Times
from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve

# 1 GB/s, 1 ms a message.
LINK = Link("round", 1e9, 1e-3)
DEVICES = tuple(Device("gpu", {"fp32": 1e12}, 1e9, 1e12) for _ in range(4))
CLUSTER = Cluster("mine", (Node(DEVICES, LINK),), LINK)

# Of four channels on four copies: three messages of nine fp64 numbers; and eight fp32 numbers, up
# and down a tree of two levels.
FORWARD_S = 3 * (1e-3 + 9 * 8 / 1e9)
BACKWARD_S = 2 * (2 * 1e-3 + 8 * 4 / 1e9)


def graph_of(profile: ModelProfile) -> OperationGraph:
    assert profile.graph is not None
    return profile.graph


def test_statistics_are_gathered_and_two_sums_come_back() -> None:
    graph = graph_of(classifier())
    found = batch_norm_times(graph, graph.by_name, 4, LINK)
    assert found.forward == pytest.approx(FORWARD_S, rel=1e-12)
    assert found.backward_input == pytest.approx(BACKWARD_S, rel=1e-12)
    assert found.backward_weight == 0.0
    assert batch_norm_times(graph, graph.by_name, 1, LINK) == Times()
    # A member with half of the channels sends less, in as many messages.
    half = batch_norm_times(graph, ["normed"], 4, LINK, lambda _, reader: 0.5)
    assert half.forward == pytest.approx(3 * (1e-3 + 5 * 8 / 1e9), rel=1e-12)


def norm_of_the_input(trains: bool) -> OperationGraph:
    sketch = Sketch()
    sketch.input("x", "B 4", "float32")
    sketch.parameter("norm.weight", "4")
    arguments = ("x", "norm_weight", None, None, None, trains, 0.1, 1e-5, True)
    sketch.call("normed", "batch_norm.default", *arguments, shape="B 4")
    return sketch.graph("normed")


def test_what_has_no_gradient_needs_no_sums() -> None:
    found = batch_norm_times(norm_of_the_input(trains=True), ["normed"], 4, LINK)
    assert found == Times(forward=pytest.approx(FORWARD_S, rel=1e-12))
    assert batch_norm_times(norm_of_the_input(trains=False), ["normed"], 4, LINK) == Times()


def planned(graph: object, synchronised: bool) -> Plan:
    options = replace(training(16), sync_batchnorm=synchronised)
    return resolve(strategy_of({"graph": graph}), CLUSTER, classifier(), options)


def test_copies_wait_for_them() -> None:
    alone, together = (planned({"replicate": {}}, x).predicted for x in (False, True))
    added_s = FORWARD_S + BACKWARD_S
    assert together.step_time_s - alone.step_time_s == pytest.approx(added_s, rel=1e-9)
    assert together.communication_s - alone.communication_s == pytest.approx(added_s, rel=1e-9)
    assert together.compute_s == pytest.approx(alone.compute_s, rel=1e-12)


def test_copies_of_the_stage_that_has_one_wait_for_them() -> None:
    """Two copies of a pipeline: one message of nine numbers, and a ring of eight."""
    graph = {"replicate": {"degree": 2, "of": {"pipeline": {"stages": 2, "micro_batches": 1}}}}
    alone, together = (planned(graph, x).predicted for x in (False, True))
    added_s = 1e-3 + 9 * 8 / 1e9 + 2 * (1e-3 + 4 * 4 / 1e9)
    assert together.step_time_s - alone.step_time_s == pytest.approx(added_s, rel=1e-9)


def test_sums_over_the_batch_are_one_message_each_way() -> None:
    graph = graph_of(classifier())
    # One fp32 number, up and down a tree of two levels.
    found = batch_sum_times(graph, ["loss"], 4, LINK)
    assert found.forward == pytest.approx(4 * 1e-3 + 2 * 4 / 1e9, rel=1e-12)
    assert found.backward_input == found.forward
    assert batch_sum_times(graph, ["loss"], 1, LINK) == Times()
    assert batch_sum_times(graph, [], 4, LINK) == Times()
