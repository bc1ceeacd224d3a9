"""Which model's head a strategy can split, what ZeRO must know, and every refusal of a model."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import (
    Sketch,
    classifier,
    gpt,
    two_heads,
    without_head,
)
from tests.unit.plan_requests import strategy_of
from tests.unit.plan_requests import training as plain_training
from tests.unit.test_frozen import frozen

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


def chain(*, tied: bool = False) -> ModelProfile:
    """A trunk, two layers and a head; or whose bias is `tied` to a scale before the trunk."""
    s = Sketch()
    for path, shape in (
        *(("first.scale", "10"), ("trunk.weight", "8 10"), ("up.weight", "16 8")),
        *(("down.weight", "8 16"), ("head.weight", "10 8"), ("second.scale", "10")),
    ):
        s.parameter(path, shape)
    s.input("features", "B 10", "float32")
    s.input("labels", "B")
    s.call("scaled", "mul.Tensor", "features", "first_scale", shape="B 10")
    s.call("hidden", "linear.default", "scaled", "trunk_weight", shape="B 8", module="trunk")
    s.call("up", "linear.default", "hidden", "up_weight", shape="B 16", module="up")
    s.call("down", "linear.default", "up", "down_weight", shape="B 8", module="down")
    s.call("logits", "linear.default", "down", "head_weight", shape="B 10", module="head")
    s.call("biased", "add.Tensor", "logits", "second_scale", shape="B 10")
    s.call("loss", "cross_entropy_loss.default", "biased", "labels", shape="")
    return s.profile("chain", "loss", tied={"second.scale": "first.scale"} if tied else {})


@pytest.mark.parametrize(
    ("modules", "cut"),
    [
        (["up", "down", "head"], {"up.weight", "down.weight", "head.weight", "second.scale"}),
        ("*d*", {"head.weight", "second.scale", "down.weight"}),
        ("head", {"head.weight", "second.scale"}),
    ],
)
def test_what_is_named_beside_a_head_is_split_as_well(modules: Any, cut: set[str]) -> None:
    plan = planned(["replicate", {"split": {"modules": modules}}], chain(), devices=2)
    _, split = plan.task_graphs
    assert set(split.parameters) == cut
    assert split.name == ("head" if modules == "head" else "split")


def test_a_bias_that_another_stage_holds_stays_whole() -> None:
    stages = [{"stage": {"of": {"replicate": {"degree": 1}}}}, {"stage": {"of": HYBRID}}]
    plan = planned({"pipeline": {"stages": stages}}, chain(tied=True), devices=3)
    (head,) = (t for t in plan.task_graphs if t.name == "stage_1.head")
    assert set(head.parameters) == {"head.weight"}


@pytest.mark.parametrize("copied", ["head", "*ea*"])
def test_a_head_that_copies_name_is_not_split(copied: str) -> None:
    graph = [{"replicate": {"modules": copied}}, {"split": {"modules": "head"}}]
    assert faults_of(graph, chain(), 2) == [
        f"strategy.graph[0].replicate.modules={copied} names head.weight, which a split of the "
        "list names as well; name each module in one node"
    ]


def test_a_head_tied_to_a_copied_table_is_a_copy() -> None:
    graph = [{"replicate": {"modules": "token"}}, {"split": {"modules": "head"}}]
    (fault,) = faults_of(graph, gpt(tied=True), 2)
    assert fault == (
        "strategy.graph[1].split.modules=head names weights alone that are tied to ones of "
        "strategy.graph[0].replicate.modules; name them in one node"
    )


def test_copies_of_a_stage_may_be_lists() -> None:
    inner = [{"replicate": {"degree": 4}}, {"split": {"degree": 2, "modules": "head"}}]
    stages = [{"stage": {"of": "replicate"}}, {"stage": {"of": inner}}]
    graph = {"pipeline": {"stages": stages, "micro_batches": 4}}
    plan = planned(graph, chain(), devices=5)
    rest, head = plan.task_graphs[1:]
    assert (rest.replicas, head.replicas) == (((1,), (2,), (3,), (4,)), ((1, 2), (3, 4)))
    assert sum(rest.shares) == sum(head.shares) == plan.global_batch
    assert rest.shares == tuple(
        sum(stop - start for start, stop in plan.ranks[rank].samples) for rank in (1, 2, 3, 4)
    )


def test_a_split_of_frozen_weights_is_no_deepspeeds() -> None:
    profile = frozen(chain(), "up.weight", "down.weight")
    list_ = [{"replicate": {"zero": 1, "degree": 2}}, {"split": {"modules": ["up", "down"]}}]
    plan = planned({"replicate": {"degree": 2, "of": list_}}, profile, devices=4)
    assert plan.task_graphs[1].zero == 0
    assert all(rank.deepspeed["1"] is None for rank in plan.ranks)


def test_losses_that_are_no_means_count_no_targets() -> None:
    """Whose targets a projection chooses, and whose mean is the model's own."""
    s = Sketch()
    for path in ("trunk.weight", "head.weight"):
        s.parameter(path, "8 8")
    s.input("features", "B 8", "float32")
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 8", module="trunk")
    s.call("targets", "argmax.default", "hidden", -1, shape="B", dtype="int64")
    s.call("logits", "linear.default", "hidden", "head_weight", shape="B 8", module="head")
    s.call("each", "cross_entropy_loss.default", "logits", "targets", None, 0, shape="B")
    s.call("loss", "mean.default", "each", shape="")
    profile = s.profile("own_mean", "loss")
    graph = ["replicate", {"split": {"modules": "trunk"}}]
    assert planned(graph, profile, devices=2).world_size == 2
