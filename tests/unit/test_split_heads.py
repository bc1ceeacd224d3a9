"""Which model's head a strategy can split, what ZeRO must know, and every refusal of a model."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import (
    classifier,
    gpt,
    two_heads,
    without_head,
)
from tests.unit.plan_requests import strategy_of
from tests.unit.plan_requests import training as plain_training

from whale_train.errors import PlanError
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve

HYBRID = ["replicate", {"split": {"modules": "head"}}]
LINK = Link("link", 1e10, 1e-6)


def planned(graph: Any, profile: ModelProfile, devices: int = 8) -> Plan:
    device = Device("device", {"fp32": 1e12}, 1e12, 1e11)
    on = Cluster("cluster", (Node((device,) * devices, LINK),), LINK)
    return resolve(strategy_of({"graph": graph}), on, profile, plain_training(64))


def faults_of(graph: Any, profile: ModelProfile, devices: int = 16) -> list[str]:
    with pytest.raises(PlanError) as refused:
        planned(graph, profile, devices)
    return [str(fault) for fault in refused.value.faults]


def test_a_whole_model_is_one_task_graph() -> None:
    plan = planned("replicate", gpt(tied=True))
    (model,) = plan.task_graphs
    assert (model.name, model.modules, model.flops) == ("model", ("*",), 96.0 + 288.0)
    assert (model.primitive, model.path) == ("replicate", "strategy.graph.replicate")
    assert model.parameters == ("token.weight", "block.weight", "norm.weight")  # tied ones once
    assert (plan.rewrite, plan.pipeline) == (None, None)


def test_a_split_head_is_a_second_one() -> None:
    backbone, head = planned(HYBRID, classifier()).task_graphs
    assert (backbone.name, backbone.path) == ("backbone", "strategy.graph[0].replicate")
    assert backbone.parameters == ("trunk.weight", "trunk.bias", "norm.weight", "norm.bias")
    assert backbone.flops == 64.0
    assert (head.name, head.path) == ("head", "strategy.graph[1].split")
    assert set(head.parameters) == {"head.weight", "head.bias"}
    assert head.flops == 80.0


@pytest.mark.parametrize(
    ("modules", "weight"),
    [("head", "fine"), ("*", "fine"), ("coarse", "coarse"), (["c*"], "coarse")],
)
def test_the_head_a_split_names(modules: Any, weight: str) -> None:
    plan = planned(["replicate", {"split": {"modules": modules}}], two_heads(), devices=4)
    assert set(plan.task_graphs[1].shards) == {f"{weight}.weight"}


def test_the_vocabulary_may_be_named() -> None:
    graph = ["replicate", {"split": {"modules": "head", "dim": "vocabulary"}}]
    assert planned(graph, gpt()).rewrite is not None


UNEXPORTED = replace(gpt(), graph=None, export_error="ValueError: it branches")


@pytest.mark.parametrize(
    ("graph", "profile", "fault"),
    [
        (
            HYBRID,
            UNEXPORTED,
            "strategy.graph[1].split.modules=head needs the model's graph, and gpt cannot be "
            "exported (ValueError: it branches); use strategy=dp or a zero strategy, which run "
            "the model as it is",
        ),
        (
            HYBRID,
            without_head(),
            "strategy.graph[1].split.modules=head finds no output projection in headless; "
            "use strategy=dp or a zero strategy",
        ),
        (
            ["replicate", {"split": {"modules": ["encoder", "x"]}}],
            two_heads(),
            "strategy.graph[1].split.modules=encoder, x names no weights of two_heads; use head, "
            "or modules with weights, such as trunk, coarse, fine",
        ),
        (
            ["replicate", {"split": {"modules": "fine"}}, {"split": {"modules": ["t*", "fine"]}}],
            two_heads(),
            "strategy.graph splits parts that meet: two parts have fine.weight; name each module "
            "in one split, or use a split of the whole stage",
        ),
        (
            HYBRID,
            classifier(classes=10),
            "strategy.graph[1].split.modules=head has 10 classes, too few to give each of 16 "
            "devices one; use strategy=dp, or fewer devices",
        ),
    ],
)
def test_models_whose_head_cannot_be_split(graph: Any, profile: ModelProfile, fault: str) -> None:
    devices = 16 if "too few" in fault else 2
    assert faults_of(graph, profile, devices) == [fault]


def test_as_many_classes_as_devices_are_enough() -> None:
    assert planned(HYBRID, classifier(classes=16), devices=16).world_size == 16


PERHAPS = replace(gpt(), graph=None, perhaps_unused=("block.weight", "norm.weight"))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_must_know_which_parameters_get_a_gradient(zero: int) -> None:
    assert faults_of({"replicate": {"zero": zero}}, PERHAPS) == [
        f"strategy.graph.replicate.zero={zero} needs to know which parameters get no gradient, "
        "and whether block.weight does is another thing in every call of gpt; use strategy=dp"
    ]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_keeps_no_values_of_64_bits(zero: int) -> None:
    first, *rest = gpt().parameters
    doubled = replace(gpt(), parameters=(replace(first, bytes_per_element=8), *rest))
    assert faults_of({"replicate": {"zero": zero}}, doubled) == [
        f"strategy.graph.replicate.zero={zero} keeps fp32 values of parameters, and {first.path} "
        "of gpt is of fp64; use strategy=dp"
    ]
    assert planned("replicate", doubled).world_size == 8


def test_without_zero_it_need_not_be_known() -> None:
    assert planned("replicate", PERHAPS).world_size == 8


def test_a_model_that_cannot_be_exported_runs_as_it_is() -> None:
    for zero in (0, 1, 2, 3):
        plan = planned({"replicate": {"zero": zero}}, UNEXPORTED)
        assert (plan.exported, plan.rewrite) == (False, None)


def test_copies_may_be_named_and_hold_what_nobody_names() -> None:
    named = [{"replicate": {"modules": "coarse"}}, {"split": {"modules": "fine"}}]
    rest, split = planned(named, two_heads(), devices=2).task_graphs
    assert set(split.parameters) == {"fine.weight"}
    assert {"trunk.weight", "coarse.weight"} <= set(rest.parameters)


def test_a_split_without_modules_has_what_named_copies_leave() -> None:
    named = [{"replicate": {"modules": "trunk"}}, "split"]
    rest, split = planned(named, two_heads(), devices=2).task_graphs
    assert set(split.parameters) == {"coarse.weight", "fine.weight"}
    assert set(rest.parameters) == {"trunk.weight"}


@pytest.mark.parametrize(
    ("copied", "split", "fault"),
    [
        (
            "t*",
            "trunk",
            "strategy.graph[0].replicate.modules=t* names trunk.weight, which a split of the list "
            "names as well; name each module in one node",
        ),
        (
            "trnk",
            "fine",
            "strategy.graph[0].replicate.modules=trnk names no weights of two_heads; did you mean "
            "trunk? Else use head, or modules with weights, such as trunk, coarse, fine",
        ),
    ],
)
def test_what_copies_may_not_name(copied: str, split: str, fault: str) -> None:
    graph = [{"replicate": {"modules": copied}}, {"split": {"modules": split}}]
    assert faults_of(graph, two_heads(), 2) == [fault]
