"""A strategy bound to a model: what each node holds, on how many devices, and every refusal."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import (
    classifier,
    gpt,
    head_read_elsewhere,
    two_heads,
    without_head,
)

from whale_train.errors import Fault
from whale_train.strategies.grammar import Strategy, read_strategy
from whale_train.strategies.graph import StrategyGraph, bind, legal_degrees
from whale_train.strategies.operations import ModelProfile

HYBRID = ["replicate", {"split": {"modules": "head"}}]


def strategy_of(graph: Any) -> Strategy:
    faults: list[Fault] = []
    strategy = read_strategy({"graph": graph}, "mine", faults)
    assert strategy is not None, faults
    return strategy


def bound(graph: Any, profile: ModelProfile, devices: int = 8) -> StrategyGraph:
    faults: list[Fault] = []
    found = bind(strategy_of(graph), profile, devices, "cluster", faults)
    assert found is not None, faults
    assert faults == []
    return found


def faults_of(graph: Any, profile: ModelProfile | None = None, devices: int = 16) -> list[str]:
    faults: list[Fault] = []
    assert bind(strategy_of(graph), profile or gpt(), devices, "cluster", faults) is None
    return [str(fault) for fault in faults]


def test_a_whole_model_is_one_task_graph() -> None:
    profile = gpt(tied=True)
    graph = bound("replicate", profile)
    (model,) = graph.task_graphs
    assert (model.name, model.modules, model.flops) == ("model", ("*",), 96.0 + 288.0)
    assert model.parameters == ("token.weight", "block.weight", "norm.weight")  # tied ones once
    assert (graph.degree, graph.head, graph.cut) == (8, None, None)


def test_a_split_head_is_a_second_one() -> None:
    graph = bound(HYBRID, classifier())
    backbone, head = graph.task_graphs
    assert (backbone.name, backbone.node.path) == ("backbone", "strategy.graph[0].replicate")
    assert backbone.parameters == ("trunk.weight", "trunk.bias", "norm.weight", "norm.bias")
    assert backbone.flops == 64.0
    assert (head.name, head.node.path, head.modules) == (
        "head",
        "strategy.graph[1].split",
        ("head",),
    )
    assert set(head.parameters) == {"head.weight", "head.bias"}
    assert head.flops == 80.0
    assert graph.head is not None
    assert graph.head.classes == 10
    assert graph.cut is not None


@pytest.mark.parametrize(
    ("modules", "operation"),
    [("head", "fine"), ("*", "fine"), ("coarse", "coarse"), (["c*"], "coarse")],
)
def test_the_head_a_split_names(modules: Any, operation: str) -> None:
    graph = bound(["replicate", {"split": {"modules": modules}}], two_heads(), devices=4)
    assert graph.head is not None
    assert graph.head.operation == operation


@pytest.mark.parametrize(
    ("graph", "degree"),
    [
        ("replicate", 16),
        ({"replicate": {"degree": 16}}, 16),
        ({"replicate": {"degree": 4}}, 4),
        ({"replicate": {"degree": 1}}, 1),
        ([{"replicate": {"degree": 2}}, {"split": {"modules": "head"}}], 2),
        (["replicate", {"split": {"modules": "head", "degree": 8}}], 8),
        ([{"replicate": {"degree": 4}}, {"split": {"modules": "head", "degree": 4}}], 4),
    ],
)
def test_degrees(graph: Any, degree: int) -> None:
    assert bound(graph, classifier(classes=64), devices=16).degree == degree


@pytest.mark.parametrize(
    ("devices", "text"),
    [(1, "1"), (2, "1 or 2"), (7, "1 or 7"), (12, "1, 2, 3, 4, 6 or 12"), (16, "1, 2, 4, 8 or 16")],
)
def test_legal_degrees(devices: int, text: str) -> None:
    assert legal_degrees(devices) == text


@pytest.mark.parametrize(
    ("graph", "faults"),
    [
        # Degrees
        (
            {"replicate": {"degree": 3}},
            [
                "strategy.graph.replicate.degree=3 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16"
            ],
        ),
        (
            {"replicate": {"degree": 32}},
            [
                "strategy.graph.replicate.degree=32 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16"
            ],
        ),
        (
            [{"replicate": {"degree": 8}}, {"split": {"degree": 4}}],
            [
                "strategy.graph[1].split.degree=4 differs from strategy.graph[0].replicate."
                "degree=8, though nodes of a list share their devices; give both the same, or auto"
            ],
        ),
        (
            [{"replicate": {"degree": 5}}, {"split": {"degree": 6}}],
            [
                "strategy.graph[0].replicate.degree=5 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16",
                "strategy.graph[1].split.degree=6 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16",
                "strategy.graph[1].split.degree=6 differs from strategy.graph[0].replicate."
                "degree=5, though nodes of a list share their devices; give both the same, or auto",
            ],
        ),
        # What a node covers
        (
            {"replicate": {"modules": "encoder.*"}},
            [
                "strategy.graph.replicate.modules=encoder.* names a part of the model, and "
                'nothing in the strategy covers the rest; use "*", or a list with a node for the '
                "rest"
            ],
        ),
        (
            [{"replicate": {"modules": ["a", "b"]}}, "split"],
            [
                "strategy.graph[0].replicate.modules=[a, b] must cover what the split leaves; "
                'use "*"'
            ],
        ),
        (
            [{"replicate": {"modules": "a", "degree": 3}}, "split"],
            [
                "strategy.graph[0].replicate.degree=3 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16",
                'strategy.graph[0].replicate.modules=a must cover what the split leaves; use "*"',
            ],
        ),
    ],
)
def test_what_no_model_makes_right(graph: Any, faults: list[str]) -> None:
    assert faults_of(graph) == faults


def test_a_split_needs_two_devices() -> None:
    assert faults_of(HYBRID, classifier(), devices=1) == [
        "strategy.graph[1].split has nothing to divide over 1 device; "
        "use strategy=single, or more devices"
    ]


def test_the_vocabulary_may_be_named() -> None:
    graph = ["replicate", {"split": {"modules": "head", "dim": "vocabulary"}}]
    assert bound(graph, gpt()).cut is not None


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
            "strategy.graph[1].split.modules=[encoder, x] names no output projection of "
            "two_heads; use head, or one of: fine, coarse",
        ),
        (
            HYBRID,
            classifier(classes=10),
            "strategy.graph[1].split.modules=head has 10 classes, too few to give each of 16 "
            "devices one; use strategy=dp, or fewer devices",
        ),
        (
            HYBRID,
            head_read_elsewhere(),
            "strategy.graph[1].split.modules=head is head, which cannot be split from the rest: "
            "its weight is also read by centre (mean); use strategy=dp or a zero strategy",
        ),
    ],
)
def test_models_whose_head_cannot_be_split(graph: Any, profile: ModelProfile, fault: str) -> None:
    devices = 16 if "too few" in fault else 2
    assert faults_of(graph, profile, devices) == [fault]


def test_as_many_classes_as_devices_are_enough() -> None:
    assert bound(HYBRID, classifier(classes=16), devices=16).degree == 16


PERHAPS = replace(gpt(), graph=None, perhaps_unused=("block.weight", "norm.weight"))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_must_know_which_parameters_get_a_gradient(zero: int) -> None:
    assert faults_of({"replicate": {"zero": zero}}, PERHAPS) == [
        f"strategy.graph.replicate.zero={zero} needs to know which parameters get no gradient, "
        "and whether block.weight does depends on the values gpt looks at; use strategy=dp"
    ]


def test_without_zero_it_need_not_be_known() -> None:
    assert bound("replicate", PERHAPS).degree == 8


def test_a_model_that_cannot_be_exported_runs_as_it_is() -> None:
    for zero in (0, 1, 2, 3):
        assert bound({"replicate": {"zero": zero}}, UNEXPORTED).cut is None
