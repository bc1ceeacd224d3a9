"""Weights that are not trained: held and cut like others, without gradients and optimizer."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import gpt
from tests.unit.plan_requests import strategy_of, training
from tests.unit.test_stages import model

from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph
from whale_train.strategies.graph.profile_json import profile_from_json, profile_to_json
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.partition.output_head import find_heads
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve

LINK = Link("link", 1e10, 1e-6)
DEVICE = Device("device", {"fp32": 1e12}, 1e12, 1e11)


def frozen(profile: ModelProfile, *paths: str) -> ModelProfile:
    """The model with `paths` of its parameters frozen."""
    assert profile.graph is not None
    operations = tuple(
        replace(op, target="frozen") if op.target == "parameter" and op.path in paths else op
        for op in profile.graph
    )
    return replace(
        profile,
        graph=OperationGraph(operations),
        parameters=tuple(p for p in profile.parameters if p.path not in paths),
        frozen=tuple(p for p in profile.parameters if p.path in paths),
    )


def planned(graph: Any, profile: ModelProfile, devices: int = 2) -> Plan:
    on = Cluster("cluster", (Node((DEVICE,) * devices, LINK),), LINK)
    train = replace(training(16), optimizer="adamw", optimizer_options={"lr": 0.1})
    return resolve(strategy_of({"graph": graph}), on, profile, train)


BACKBONE = ("token.weight", "block.weight")  # 48 and 16 elements; trained are 4 and 48
MINE = frozen(gpt(), *BACKBONE)


def test_it_is_kept_as_json() -> None:
    assert profile_from_json(profile_to_json(MINE)) == MINE


@pytest.mark.parametrize(("zero", "copies"), [(0, 1), (3, 2)])
def test_copies_hold_them_without_gradients(zero: int, copies: int) -> None:
    memory = planned({"replicate": {"zero": zero}}, MINE).ranks[0].memory_bytes
    trained = 4 * (4 + 48)
    assert memory.parameters == (trained + 4 * (48 + 16)) / copies
    assert memory.optimizer == 2 * trained / copies
    assert memory.gradients <= 1.5 * trained


def test_zero_3_gathers_them() -> None:
    large = replace(
        MINE, frozen=tuple(replace(p, shape=(1000 * p.shape[0], *p.shape[1:])) for p in MINE.frozen)
    )
    plans = [planned({"replicate": {"zero": 3}}, profile) for profile in (MINE, large)]
    moved = [plan.ranks[0].memory_bytes.communication for plan in plans]
    assert moved[1] - moved[0] > 4 * 999 * 48 / 2


def test_a_split_cuts_them() -> None:
    (of_split,) = planned({"split": {}}, MINE).task_graphs
    assert set(of_split.shards) >= {"block.weight", "lm_head.weight"}
    assert of_split.parameters == of_split.trained == ("norm.weight", "lm_head.weight")
    whole, cut = (
        planned(graph, MINE).ranks[0].memory_bytes.parameters
        for graph in ({"replicate": {}}, {"split": {}})
    )
    halved = sum(p.elements for path, p in MINE.weight_by_path.items() if path in of_split.shards)
    assert whole - cut == 4 * halved / 2


def test_a_stage_holds_its_own() -> None:
    paths = [f"blocks.{i}.weight" for i in range(6)]
    profile = frozen(model([1.0] * 6), *paths[1::2])
    plan = planned({"pipeline": {"stages": 3}}, profile, 3)
    held = [rank.memory_bytes.parameters for rank in plan.ranks]
    assert held == [4 * 2 * 64] * 3
    assert [t.trained for t in plan.task_graphs] == [(path,) for path in paths[::2]]


def test_one_that_two_stages_read_stays_whole() -> None:
    """Each cuts its own in its way; the one that they share has one layout."""
    profile = frozen(model([1.0] * 6, tied=True), "blocks.0.weight")
    split = {"split": {}}
    plan = planned({"pipeline": {"stages": [split, split]}}, profile, 4)
    for task_graph in plan.task_graphs:
        assert task_graph.shards
        assert "blocks.0.weight" not in task_graph.shards


def test_a_frozen_projection_is_no_head_to_split() -> None:
    assert find_heads(MINE)[0].weight == "lm_head.weight"
    assert find_heads(frozen(gpt(), "lm_head.weight")) == ()
