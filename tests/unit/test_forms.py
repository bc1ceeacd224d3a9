"""Every nesting comes down to copies of stages of copies of shards, or is refused by name."""

from typing import Any

import pytest
from tests.unit.plan_requests import strategy_of

from whale_train.errors import Fault
from whale_train.strategies.grammar.degrees import legal_degrees
from whale_train.strategies.grammar.form import Form, needs_graph, partitions
from whale_train.strategies.grammar.normal_form import read_form


def form_of(
    graph: Any, devices: int | dict[str, int], per_node: int = 0
) -> tuple[Form | None, list[str]]:
    faults: list[Fault] = []
    form = read_form(strategy_of({"graph": graph}), devices, per_node, "cluster", faults)
    return form, [str(fault) for fault in faults]


def pipeline(*stages: Any, **keys: Any) -> Any:
    return {"pipeline": {"stages": list(stages), **keys}}


def split(degree: Any = "auto", **keys: Any) -> Any:
    return {"split": {"degree": degree, **keys}}


def replicate(degree: Any = "auto", **keys: Any) -> Any:
    return {"replicate": {"degree": degree, **keys}}


def stage(of: Any = None, **keys: Any) -> Any:
    return {"stage": {"of": of, **keys}}


@pytest.mark.parametrize(
    ("graph", "devices", "copies", "stages"),
    [
        (split(), 4, 1, [(1, 4)]),
        (split(2), 8, 4, [(1, 2)]),
        (replicate(of=split(2)), 8, 4, [(1, 2)]),
        (replicate(2, of=split()), 8, 2, [(1, 4)]),
        ([replicate(8), split(4)], 16, 4, [(1, 4)]),
        ([replicate(4), split(2)], 4, 2, [(1, 2)]),
        ([replicate(4), split()], 8, 2, [(1, 4)]),
        (pipeline(stage([replicate(4), split(2)]), replicate(4)), 8, 1, [(2, 2), (4, 1)]),
        (replicate(2, of=replicate(2, of=split(2))), 8, 4, [(1, 2)]),
        ({"pipeline": {"stages": 4}}, 4, 1, [(1, 1)] * 4),
        ({"pipeline": {"stages": 2}}, 8, 1, [(4, 1)] * 2),
        (replicate(of={"pipeline": {"stages": 2}}), 8, 4, [(1, 1)] * 2),
        (replicate(2, of={"pipeline": {"stages": 2}}), 8, 2, [(2, 1)] * 2),
        (pipeline(split(2), split(2)), 4, 1, [(1, 2), (1, 2)]),
        (pipeline(split(2), split(2)), 12, 3, [(1, 2), (1, 2)]),
        (pipeline(stage(), split(), replicate(2)), 10, 1, [(1, 1), (1, 7), (2, 1)]),
        (pipeline(replicate(3), split(2)), 5, 1, [(3, 1), (1, 2)]),
        (pipeline(replicate(3), split(2)), 10, 2, [(3, 1), (1, 2)]),
        (pipeline(stage(replicate(2, of=split(2))), stage()), 5, 1, [(2, 2), (1, 1)]),
        (pipeline(stage(replicate(2, of=split())), split(2)), 8, 1, [(2, 3), (1, 2)]),
    ],
)
def test_degrees(graph: Any, devices: int, copies: int, stages: Any) -> None:
    form, faults = form_of(graph, devices)
    assert form is not None, faults
    assert form.copies == copies
    assert [(s.copies, s.shards) for s in form.stages] == stages
    assert form.copies * form.width == devices


def test_a_lone_split_inside_open_copies_fills_a_node() -> None:
    form, _ = form_of(replicate(of=split()), 16, per_node=8)
    assert form is not None
    assert (form.copies, form.stages[0].shards) == (2, 8)


@pytest.mark.parametrize(
    ("graph", "needed"),
    [
        ("replicate", False),
        (replicate(of=replicate(2)), False),
        (["replicate", "split"], True),
        ("split", True),
        (replicate(of=split()), True),
        ({"pipeline": {"stages": 1}}, True),
    ],
)
def test_copies_alone_run_the_model_as_it_is(graph: Any, needed: bool) -> None:
    assert needs_graph(strategy_of({"graph": graph})) == needed


@pytest.mark.parametrize(
    ("graph", "partitioned"),
    [
        (replicate(), False),
        (split(2), False),
        (replicate(zero=1), True),
        (pipeline(stage(replicate(2, zero=2)), stage()), True),
        (pipeline(stage(replicate(2)), stage()), False),
    ],
)
def test_copies_partition_where_any_of_them_has_zero(graph: Any, partitioned: bool) -> None:
    assert partitions(strategy_of({"graph": graph})) == partitioned


@pytest.mark.parametrize(
    ("graph", "devices", "copies", "shards", "added"),
    [
        ("replicate", 16, 16, 1, 1),
        (replicate(16), 16, 16, 1, 1),
        (replicate(4), 16, 16, 1, 4),
        (replicate(1), 16, 16, 1, 16),
        (replicate(2, of=replicate(2)), 8, 8, 1, 2),
        ([replicate(2), {"split": {"modules": "head"}}], 16, 8, 2, 8),
        (["replicate", {"split": {"modules": "head", "degree": 8}}], 16, 2, 8, 2),
        ([replicate(4), {"split": {"modules": "head", "degree": 4}}], 4, 1, 4, 1),
        (["replicate", {"split": {"modules": "head"}}], 16, 1, 16, 1),
    ],
)
def test_copies_of_the_whole_and_beside_a_split_head(
    graph: Any, devices: int, copies: int, shards: int, added: int
) -> None:
    form, faults = form_of(graph, devices)
    assert form is not None, faults
    (only,) = form.stages
    assert (form.copies, only.copies, only.shards, form.added) == (copies, 1, shards, added)
    assert form.members == (shards if isinstance(graph, list) else 1)
    assert (only.path, form.pipeline) == (
        only.body.path if only.body else only.path,
        None,
    )


@pytest.mark.parametrize(
    ("graph", "filled"),
    [
        ("replicate", "strategy.graph.replicate"),
        (replicate(2), None),
        (replicate(2, of=replicate()), "strategy.graph.replicate.of.replicate"),
        (["replicate", {"split": {"modules": "head"}}], "strategy.graph[0].replicate"),
        (["replicate", {"split": {"modules": "head", "degree": 4}}], None),
    ],
)
def test_the_node_that_took_all_devices_is_known(graph: Any, filled: str | None) -> None:
    form, faults = form_of(graph, 8)
    assert form is not None, faults
    assert form.filled == filled


@pytest.mark.parametrize(
    ("devices", "text"),
    [(1, "1"), (2, "1 or 2"), (7, "1 or 7"), (12, "1, 2, 3, 4, 6 or 12"), (16, "1, 2, 4, 8 or 16")],
)
def test_legal_degrees(devices: int, text: str) -> None:
    assert legal_degrees(devices) == text


@pytest.mark.parametrize(
    ("graph", "faults"),
    [
        (
            replicate(3),
            [
                "strategy.graph.replicate.degree=3 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16"
            ],
        ),
        (
            replicate(32),
            [
                "strategy.graph.replicate.degree=32 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16"
            ],
        ),
        (
            [replicate(5), "split"],
            [
                "strategy.graph[0].replicate.degree=5 does not divide the 16 devices of "
                "hardware=cluster; use 1, 2, 4, 8 or 16"
            ],
        ),
        (
            [replicate(8), split(3)],
            [
                "strategy.graph[1].split.degree=3 does not divide strategy.graph[0].replicate."
                "degree=8, though nodes of a list share their devices; use 2 or 4 or 8"
            ],
        ),
        (
            {"replicate": {"modules": "encoder.*"}},
            [
                "strategy.graph.replicate.modules=encoder.* names a part of the model, and nothing "
                'in the strategy covers the rest; use "*", or a list with a node for the rest'
            ],
        ),
        (
            [replicate(), split(4), split(2)],
            [
                "strategy.graph[2].split.degree=2 differs from strategy.graph[1].split.degree=4, "
                "though splits of a list share their devices; give both the same, or auto"
            ],
        ),
    ],
)
def test_copies_that_have_no_form(graph: Any, faults: list[str]) -> None:
    assert form_of(graph, 16) == (None, faults)


def test_a_split_needs_two_devices() -> None:
    assert form_of(["replicate", {"split": {"modules": "head"}}], 1) == (
        None,
        [
            "strategy.graph[1].split has nothing to divide over 1 device; use strategy=single, "
            "or more devices"
        ],
    )


@pytest.mark.parametrize(
    ("graph", "devices", "faults"),
    [
        (
            split(3),
            8,
            [
                "strategy.graph.split.degree=3 does not divide the 8 devices of "
                "hardware=cluster; use 1, 2, 4 or 8"
            ],
        ),
        (
            replicate(3, of=split(2)),
            8,
            [
                "strategy.graph.replicate.degree=3 does not divide the 8 devices of "
                "hardware=cluster; use 1, 2, 4 or 8"
            ],
        ),
        (
            pipeline(replicate(3), split(2)),
            8,
            [
                "strategy.graph.pipeline.stages[0].replicate=5 devices does not divide the 8 "
                "devices of hardware=cluster; use 1, 2, 4 or 8"
            ],
        ),
        (
            {"pipeline": {"stages": 3}},
            8,
            [
                "strategy.graph.pipeline.stages leaves 8 of 8 devices of hardware=cluster to "
                "share among 3 stages; use 1, 2, 4 or 8 stages"
            ],
        ),
        (
            pipeline(split(2), split()),
            2,
            [
                "strategy.graph.pipeline.stages leaves 0 of 2 devices of hardware=cluster to "
                "share with one stage; use a multiple of 1 devices more than 2"
            ],
        ),
        (
            replicate(of=split()),
            8,
            [
                "strategy.graph.replicate.of.split.degree=auto is auto, and so is the replicate "
                "around it: nothing says which takes the devices; give one of them a number"
            ],
        ),
        (
            {"split": {"of": {"split": {"degree": 2}}}},
            8,
            [
                "strategy.graph.split.of cuts again what a split has cut; multiply the degrees "
                "into one"
            ],
        ),
        (
            {"split": {"dim": "context", "of": {"split": {"degree": 2}}}},
            8,
            [
                "strategy.graph.split.of divides positions and weights over the same devices, "
                "which is not executed; use one of the two, or each in a pipeline stage of its "
                "own"
            ],
        ),
        (
            replicate(2, zero=3, of={"pipeline": {"stages": 2}}),
            4,
            [
                "strategy.graph.replicate.zero=3 gathers parameters with all copies at every "
                "forward, and in a pipeline copies take different micro-batches at different "
                "times; use 1 (a stage's optimizer state is what is largest), or no pipeline"
            ],
        ),
        (
            replicate(2, zero=2, of={"pipeline": {"stages": 2}}),
            4,
            [
                "strategy.graph.replicate.zero=2 reduces gradients with all copies at every "
                "backward, and in a pipeline copies take different micro-batches at different "
                "times; use 1 (a stage's optimizer state is what is largest), or no pipeline"
            ],
        ),
        (
            replicate(2, zero=1, of=pipeline(replicate(2, zero=2), stage())),
            6,
            [
                "strategy.graph.replicate.of.pipeline.stages[0].replicate.zero=2 differs from "
                "strategy.graph.replicate.zero=1: all copies keep alike; give both the same"
            ],
        ),
        (
            pipeline(replicate(1, zero=1), stage()),
            2,
            [
                "strategy.graph.pipeline.stages[0].replicate.zero=1 partitions over the copies, "
                "and there is only one; use 0, or more devices"
            ],
        ),
        (
            pipeline(split(1), stage()),
            2,
            [
                "strategy.graph.pipeline.stages[0].split has nothing to divide over 1 device; "
                "use a degree of at least 2, or no split"
            ],
        ),
        (
            replicate(2, modules="encoder.*", of=split(2)),
            4,
            [
                "strategy.graph.replicate.modules=encoder.* names a part of the model, and "
                'nothing in the strategy covers the rest; use "*", or a list with a node for the '
                "rest"
            ],
        ),
        (
            ["replicate", "replicate"],
            4,
            [
                "strategy.graph=2 nodes has parts that share devices, which are executed as a "
                "replicate, then splits of modules; use strategy=hybrid_split_dp, or one node"
            ],
        ),
    ],
)
def test_refusals(graph: Any, devices: int, faults: list[str]) -> None:
    form, said = form_of(graph, devices)
    assert form is None
    assert said == faults


FAST, SLOW = stage(device="fast"), stage(device="slow")
FAST_COPIES = stage(replicate(), device="fast")
SLOW_COPIES = stage(replicate(), device="slow")


@pytest.mark.parametrize(
    ("graph", "kinds", "copies", "stages"),
    [
        (pipeline(FAST, SLOW), (4, 4), 4, [(1, 1), (1, 1)]),
        (pipeline(FAST_COPIES, SLOW_COPIES), (2, 4), 1, [(2, 1), (4, 1)]),
        (replicate(of=pipeline(FAST, SLOW)), (4, 4), 4, [(1, 1), (1, 1)]),
        (replicate(of=pipeline(FAST, SLOW, SLOW)), (2, 4), 2, [(1, 1), (1, 1), (1, 1)]),
        (replicate(2, of=pipeline(SLOW_COPIES, FAST_COPIES)), (2, 6), 2, [(3, 1), (1, 1)]),
        (
            replicate(of=pipeline(stage(split(2), device="fast"), SLOW)),
            (4, 2), 2, [(1, 2), (1, 1)],
        ),
    ],
)  # fmt: skip
def test_degrees_where_stages_name_devices(
    graph: Any, kinds: tuple[int, int], copies: int, stages: Any
) -> None:
    form, faults = form_of(graph, dict(zip(("fast", "slow"), kinds, strict=True)))
    assert form is not None, faults
    assert form.copies == copies
    assert [(s.copies, s.shards) for s in form.stages] == stages
    assert form.copies * form.width == sum(kinds)


@pytest.mark.parametrize(
    ("graph", "fault"),
    [
        (
            pipeline(FAST, stage()),
            "strategy.graph.pipeline.stages[1].stage.device=auto names no device, and other stages "
            "of its pipeline do; name it for all, or none",
        ),
        (
            pipeline(FAST, stage(device="slwo")),
            "strategy.graph.pipeline.stages[1].stage.device=slwo is no device of hardware=cluster; "
            "did you mean slow? One of: fast, slow",
        ),
        (
            pipeline(FAST, FAST),
            "strategy.graph.pipeline.stages leaves the 2 x slow of hardware=cluster without a "
            "stage; give a stage device: slow",
        ),
        (
            replicate(of=pipeline(FAST, SLOW)),
            "strategy.graph.replicate.of.pipeline.stages makes unlike numbers of copies: 4 of fast "
            "and 2 of slow; give stages degrees that divide the devices of every kind equally "
            "often",
        ),
        (
            pipeline(stage(split(3), device="fast"), SLOW),
            "strategy.graph.pipeline.stages[0].stage.of.split.degree=3 does not divide the 4 "
            "devices of hardware=cluster; use 1, 2 or 4",
        ),
    ],
)
def test_stages_of_devices_that_cannot_be(graph: Any, fault: str) -> None:
    form, faults = form_of(graph, {"fast": 4, "slow": 2})
    assert form is None
    assert faults == [fault]
