"""Globs of splits against the weights of models and stages: what counts, and what is refused."""

from typing import Any

import pytest
from tests.unit.operation_graphs import classifier, gpt, two_heads
from tests.unit.plan_requests import strategy_of, training

from whale_train.errors import PlanError
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve

LINK = Link("link", 1e10, 1e-6)
COPIES: Any = {"replicate": {}}


def planned(graph: Any, profile: ModelProfile, devices: int = 2) -> Plan:
    device = Device("device", {"fp32": 1e12}, 1e12, 1e11)
    on = Cluster("cluster", (Node((device,) * devices, LINK),), LINK)
    return resolve(strategy_of({"graph": graph}), on, profile, training(64))


def faults_of(graph: Any, profile: ModelProfile, devices: int = 2) -> list[str]:
    with pytest.raises(PlanError) as refused:
        planned(graph, profile, devices)
    return [str(fault) for fault in refused.value.faults]


def cuts(plan: Plan) -> dict[str, int]:
    """Return the dimension in which each weight is cut, by path."""
    return {path: dim for task in plan.task_graphs for path, dim in task.shard_dims.items()}


def split(*patterns: tuple[str, str], **options: Any) -> Any:
    listed = [{"weight": glob, "pattern": pattern} for glob, pattern in patterns]
    return {"split": {"patterns": listed, **options}}


HEAD = {"modules": "head"}


@pytest.mark.parametrize(
    ("profile", "patterns", "dims"),
    [
        (gpt(), [("lm_head.weight", "row")], {"lm_head.weight": 1}),
        (gpt(), [("lm_head.weight", "column")], {"lm_head.weight": 0}),
        (gpt(), [("lm_head", "vocabulary")], {"lm_head.weight": 0}),
        (classifier(batch_norm=False), [("head.weight", "row")], {"head.weight": 1}),
        (
            classifier(batch_norm=False),
            [("head.*", "vocabulary")],
            {"head.weight": 0, "head.bias": 0},
        ),
        # Of a head whose classes are cut alone, the bias stays whole if that is asked.
        (
            classifier(batch_norm=False),
            [("head.bias", "replicate"), ("*", "vocabulary")],
            {"head.weight": 0},
        ),
        # A tied head's columns are those of the table: the width.
        (gpt(tied=True), [("lm_head", "vocabulary")], {"token.weight": 0}),
    ],
)
def test_patterns_of_a_head_beside_copies_count(
    profile: ModelProfile, patterns: list[tuple[str, str]], dims: dict[str, int]
) -> None:
    assert cuts(planned([COPIES, split(*patterns, **HEAD)], profile)) == dims


def test_patterns_are_a_mapping_or_a_list() -> None:
    listed = [COPIES, split(("lm_head.weight", "row"), **HEAD)]
    mapping = [COPIES, {"split": {"modules": "head", "patterns": {"lm_head.weight": "row"}}}]
    assert planned(listed, gpt()) == planned(mapping, gpt())


def test_a_tied_weight_goes_by_all_its_names() -> None:
    for name in ("token.weight", "lm_head.weight", "lm_head"):
        assert cuts(planned(split((name, "column")), gpt(tied=True)))["token.weight"] == 1
    assert "token.weight" in cuts(planned({"split": {"modules": "lm_head"}}, gpt(tied=True)))


def test_the_first_pattern_that_a_weight_can_have_counts() -> None:
    assert faults_of(split(("*", "column"), ("block.weight", "row")), gpt()) == [
        "strategy.graph.split.patterns.block.weight=row comes after *, which names block.weight as "
        "well, and the first that matches counts; write it before *, or leave it out"
    ]
    swapped = split(("block.weight", "row"), ("*", "column"))
    assert cuts(planned(swapped, gpt()))["block.weight"] == 1
    assert planned(split(("block", "replicate"), ("block.weight", "replicate")), gpt())


@pytest.mark.parametrize(
    ("graph", "profile", "faults"),
    [
        (
            split(("tokne.weight", "column"), ("lm_haed", "row")),
            gpt(),
            [
                "strategy.graph.split.patterns.tokne.weight=column names no weight of gpt; did you "
                "mean token.weight? Else use weights or modules, such as token.weight, "
                "block.weight, norm.weight and 1 more",
                "strategy.graph.split.patterns.lm_haed=row names no weight of gpt; did you mean "
                "lm_head? Else use weights or modules, such as token.weight, block.weight, "
                "norm.weight and 1 more",
            ],
        ),
        (
            {"split": {"modules": ["block", "blokc"]}},
            gpt(),
            [
                "strategy.graph.split.modules=blokc names no weights of gpt; did you mean block? "
                "Else use head, or modules with weights, such as token, block, norm and 1 more"
            ],
        ),
        (
            [COPIES, {"split": {"modules": ["fine", "corase"]}}],
            two_heads(),
            [
                "strategy.graph[1].split.modules=corase names no weights of two_heads; did you "
                "mean coarse? Else use head, or modules with weights, such as trunk, coarse, fine"
            ],
        ),
        (
            split(("token", "column"), modules="block"),
            gpt(),
            [
                "strategy.graph.split.patterns.token=column names token.weight, which "
                "modules=block leaves whole; name it there, or leave it out"
            ],
        ),
        (
            split(("token", "row")),
            gpt(),
            [
                "strategy.graph.split.patterns.token=row cannot be had for token.weight, which "
                "stays whole; use replicate, or leave it out"
            ],
        ),
        (
            [COPIES, split(("block", "row"), **HEAD)],
            gpt(),
            [
                "strategy.graph[1].split.patterns.block=row names block.weight, which "
                "modules=head leaves whole; name it there, or leave it out"
            ],
        ),
        (
            [COPIES, split(("lm_head", "row"), dim="vocabulary", **HEAD)],
            gpt(),
            [
                "strategy.graph[1].split.patterns.lm_head=row cannot be had for lm_head.weight; "
                "use vocabulary or replicate"
            ],
        ),
    ],
)
def test_names_without_effect_are_refused(
    graph: Any, profile: ModelProfile, faults: list[str]
) -> None:
    assert faults_of(graph, profile) == faults


def test_stages_with_equal_patterns_have_one_list() -> None:
    both = split(("token", "column"), ("lm_head", "row"), degree=2)
    plan = planned({"pipeline": {"stages": [both, both]}}, gpt(), devices=4)
    assert {"token.weight": 1, "lm_head.weight": 1}.items() <= cuts(plan).items()
    unlike = [split(("token", "column"), degree=2), split(("block", "column"), degree=2)]
    assert faults_of({"pipeline": {"stages": unlike}}, gpt(), devices=4) == [
        "strategy.graph.pipeline.stages[1].split.patterns.block=column names weights of other "
        "stages alone; give it to a split of these, or leave it out"
    ]


def test_stages_cut_their_tokens_by_their_own_numbers() -> None:
    """Shard groups of two and of three have other tokens of the same sequences."""
    stages = [split(degree=2, dim="sequence"), split(degree=3, dim="sequence")]
    plan = planned({"pipeline": {"stages": stages}}, gpt(), devices=5)
    assert [len(task.replicas[0]) for task in plan.task_graphs] == [2, 3]


@pytest.mark.parametrize(
    ("node", "cause"),
    [
        (split(("block", "replicate"), ("*", "column")), "patterns say replicate"),
        (split(modules="lm_head"), "no split names it"),
        (split(dim="vocabulary"), "no pattern fits it"),
    ],
)
def test_a_plan_says_why_a_weight_is_whole(node: Any, cause: str) -> None:
    plan = planned(node, gpt(), devices=2)
    (reason,) = (x.reason for x in plan.decisions if x.key.endswith(".split block"))
    assert reason == f"{cause}: every device of the group holds it whole"
