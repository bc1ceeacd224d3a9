"""What a strategy file may say: every key and default, every fault word for word."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from whale_train.errors import Fault
from whale_train.strategies.grammar import (
    Node,
    Pipeline,
    Replicate,
    Split,
    Stage,
    Strategy,
    read_strategy,
)

CONF = Path(__file__).parents[2] / "conf" / "strategy"


def read(graph: Any, **others: Any) -> Strategy:
    faults: list[Fault] = []
    strategy = read_strategy({"graph": graph, **others}, "mine", faults)
    assert strategy is not None, faults
    return strategy


def faults_of(graph: Any, **others: Any) -> list[str]:
    faults: list[Fault] = []
    assert read_strategy({"graph": graph, **others}, "mine", faults) is None
    return [str(fault) for fault in faults]


def test_defaults() -> None:
    assert read({"replicate": {}}) == Strategy(
        "mine",
        (
            Replicate(
                path="strategy.graph.replicate",
                degree=None,
                zero=0,
                offload_optimizer="none",
                offload_parameters="none",
                modules=("*",),
                of=(),
            ),
        ),
        balance="hardware",
        devices=None,
    )
    assert read({"split": {}}).graph == (
        Split("strategy.graph.split", degree=None, dim="auto", modules=("*",), of=()),
    )
    assert read({"pipeline": {"stages": 4}}).graph == (
        Pipeline("strategy.graph.pipeline", 4, micro_batches=None, schedule="1f1b"),
    )
    assert read({"pipeline": {"stages": [{"stage": {}}]}}).graph == (
        Pipeline(
            "strategy.graph.pipeline",
            (
                Stage(
                    "strategy.graph.pipeline.stages[0].stage",
                    modules=None,
                    recompute="none",
                    of=(),
                ),
            ),
        ),
    )


def test_every_key() -> None:
    offload = {"optimizer": "nvme", "parameters": "cpu"}
    replicate = {"degree": 4, "zero": 3, "offload": offload, "modules": ["a", "b.*"]}
    assert read({"replicate": replicate}, balance="even", devices=8) == Strategy(
        "mine",
        (Replicate("strategy.graph.replicate", 4, 3, "nvme", "cpu", ("a", "b.*")),),
        "even",
        8,
    )
    split = {"degree": 2, "dim": "vocabulary", "modules": "head"}
    assert read([{"split": split}]).graph == (
        Split("strategy.graph[0].split", 2, "vocabulary", ("head",)),
    )
    stage = {"modules": ["a", "b"], "recompute": "full"}
    pipeline = {"micro_batches": 6, "schedule": "zero_bubble", "stages": [{"stage": stage}]}
    path = "strategy.graph.pipeline"
    assert read({"pipeline": pipeline}).graph == (
        Pipeline(path, (Stage(f"{path}.stages[0].stage", ("a", "b"), "full"),), 6, "zero_bubble"),
    )


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"degree": "auto"}, "degree", None),
        ({"offload": None}, "offload_optimizer", "none"),
        ({"zero": 1, "offload": {"optimizer": "cpu"}}, "offload_optimizer", "cpu"),
        ({"modules": None}, "modules", ("*",)),
        ({"of": None}, "of", ()),
        ({"zero": 2}, "zero", 2),
    ],
)
def test_values_of_replicate(body: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read({"replicate": body}).graph[0], field) == value


@pytest.mark.parametrize("value", [None, "auto"])
def test_a_stages_modules_are_found_unless_named(value: str | None) -> None:
    (pipeline,) = read({"pipeline": {"stages": [{"stage": {"modules": value}}]}}).graph
    assert isinstance(pipeline, Pipeline)
    assert isinstance(pipeline.stages, tuple)
    assert isinstance(pipeline.stages[0], Stage)
    assert pipeline.stages[0].modules is None


@pytest.mark.parametrize("graph", ["replicate", {"replicate": None}, {"replicate": {}}])
def test_a_node_without_a_body(graph: Any) -> None:
    assert read(graph).graph == (Replicate("strategy.graph.replicate"),)


def test_a_list_keeps_its_order_and_its_indices() -> None:
    assert read(["split", {"replicate": {"of": ["split", "split"]}}]).graph == (
        Split("strategy.graph[0].split"),
        Replicate(
            "strategy.graph[1].replicate",
            of=(
                Split("strategy.graph[1].replicate.of[0].split"),
                Split("strategy.graph[1].replicate.of[1].split"),
            ),
        ),
    )


STRATEGIES: dict[str, tuple[Node, ...]] = {
    "single": (Replicate("strategy.graph.replicate"),),
    "dp": (Replicate("strategy.graph.replicate"),),
    "zero1": (Replicate("strategy.graph.replicate", zero=1),),
    "zero2": (Replicate("strategy.graph.replicate", zero=2),),
    "zero3": (Replicate("strategy.graph.replicate", zero=3),),
    "zero2_offload": (Replicate("strategy.graph.replicate", zero=2, offload_optimizer="cpu"),),
    "zero3_offload": (
        Replicate(
            "strategy.graph.replicate", zero=3, offload_optimizer="cpu", offload_parameters="cpu"
        ),
    ),
    "hybrid_split_dp": (
        Replicate("strategy.graph[0].replicate"),
        Split("strategy.graph[1].split", modules=("head",)),
    ),
    "split": (Split("strategy.graph.split"),),
    "split_sequence": (Split("strategy.graph.split", dim="sequence"),),
    "split_dp": (
        Replicate("strategy.graph.replicate", of=(Split("strategy.graph.replicate.of.split"),)),
    ),
    "split_zero3": (
        Replicate(
            "strategy.graph.replicate",
            zero=3,
            of=(Split("strategy.graph.replicate.of.split", 2),),
        ),
    ),
    "pipeline": (Pipeline("strategy.graph.pipeline", 4),),
    "interleaved": (Pipeline("strategy.graph.pipeline", 4, schedule="interleaved_1f1b"),),
    "zero_bubble": (Pipeline("strategy.graph.pipeline", 4, schedule="zero_bubble"),),
    "zero1_pipeline": (
        Replicate(
            "strategy.graph.replicate",
            degree=2,
            zero=1,
            of=(Pipeline("strategy.graph.replicate.of.pipeline", 2),),
        ),
    ),
    "3d": (
        Replicate(
            "strategy.graph.replicate",
            of=(
                Pipeline(
                    "strategy.graph.replicate.of.pipeline",
                    tuple(
                        Split(f"strategy.graph.replicate.of.pipeline.stages[{i}].split", 2)
                        for i in range(2)
                    ),
                    micro_batches=8,
                ),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_strategies_we_ship(name: str) -> None:
    mapping = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    devices = 1 if name == "single" else None
    faults: list[Fault] = []
    expected = Strategy(name, STRATEGIES[name], "hardware", devices)
    assert read_strategy(mapping, name, faults) == expected, faults


def test_no_strategy_file_is_left_out() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {*STRATEGIES, "auto"}


def test_a_graph_left_to_the_planner() -> None:
    mapping = yaml.safe_load((CONF / "auto.yaml").read_text())
    strategy = read_strategy(mapping, "auto", [])
    assert strategy == Strategy("auto", (), time_limit_s=0.0)
    assert strategy.is_auto


@pytest.mark.parametrize("value", [-1, True, "soon", float("inf")])
def test_time_limits_that_are_none(value: object) -> None:
    (fault,) = faults_of("auto", time_limit_s=value)
    assert fault == (f"strategy.time_limit_s={value} is not a number of seconds; use 10, or null")


def test_a_time_limit_without_a_search() -> None:
    assert faults_of({"replicate": {}}, time_limit_s=5) == [
        "strategy.time_limit_s=5.0 limits the search of graph: auto, and the graph is given; "
        "use null, or strategy=auto"
    ]


@pytest.mark.parametrize("value", [1, [], {}])
def test_devices_of_a_stage_that_are_no_names(value: object) -> None:
    (fault,) = faults_of({"pipeline": {"stages": [{"stage": {"device": value}}]}})
    assert fault == (
        f"strategy.graph.pipeline.stages[0].stage.device={value} is not the name of a device; "
        "use one of hardware's, or auto"
    )


PRIMITIVES = "pipeline, replicate, split, stage"
REPLICATE = "strategy.graph.replicate"
PIPELINE = "strategy.graph.pipeline"


@pytest.mark.parametrize(
    ("graph", "fault"),
    [
        # Nodes
        ([], "strategy.graph=[] is an empty list; give at least one node"),
        (3, f"strategy.graph=3 is not a node; use one of: {PRIMITIVES}"),
        (None, f"strategy.graph=null is not a node; use one of: {PRIMITIVES}"),
        ("copy", f"strategy.graph=copy is not a node; use one of: {PRIMITIVES}"),
        (["split", [[]]], f"strategy.graph[1]=[[]] is not a node; use one of: {PRIMITIVES}"),
        (
            {"replicat": {}},
            "strategy.graph.replicat is not a primitive; did you mean replicate? "
            f"One of: {PRIMITIVES}",
        ),
        ({"zzz": {}}, f"strategy.graph.zzz is not a primitive; use one of: {PRIMITIVES}"),
        ({1: {}}, f"strategy.graph.1 is not a primitive; use one of: {PRIMITIVES}"),
        ({}, "strategy.graph has 0 keys (none); a node has one, its primitive"),
        (
            {"split": {}, "replicate": {}},
            "strategy.graph has 2 keys (split, replicate); a node has one, its primitive",
        ),
        (
            {"replicate": 3},
            "strategy.graph.replicate=3 is not a mapping; use replicate: {key: value}",
        ),
        # Keys
        (
            {"replicate": {"degre": 2}},
            f"{REPLICATE}.degre is not a key here; did you mean degree? "
            "One of: degree, modules, of, offload, zero",
        ),
        (
            {"split": {"zero": 1}},
            "strategy.graph.split.zero is not a key here; use one of: degree, dim, modules, of, "
            "patterns",
        ),
        (
            {"pipeline": {"stages": [{"stage": {"degree": 2}}]}},
            f"{PIPELINE}.stages[0].stage.degree is not a key here; "
            "use one of: device, modules, of, recompute",
        ),
        (
            {"pipeline": {"stages": 2, "microbatches": 2}},
            f"{PIPELINE}.microbatches is not a key here; did you mean micro_batches? "
            "One of: micro_batches, schedule, stages",
        ),
        (
            {"replicate": {"zero": 1, "offload": {"optimiser": "cpu"}}},
            f"{REPLICATE}.offload.optimiser is not a key here; did you mean optimizer? "
            "One of: optimizer, parameters",
        ),
        # Values
        *(
            (
                {"replicate": {"degree": value}},
                f"{REPLICATE}.degree={shown} is not a whole number of at least 1; "
                "use such a number, or auto",
            )
            for value, shown in [
                (0, "0"), (-1, "-1"), (1.0, "1.0"), (True, "True"), ("4", "4"), (None, "null"),
            ]
        ),
        *(
            (
                {"replicate": {"zero": value}},
                f"{REPLICATE}.zero={shown} is not a ZeRO stage; use 0, 1, 2 or 3",
            )
            for value, shown in [
                (4, "4"), (-1, "-1"), (True, "True"), (2.0, "2.0"), ("1", "1"), (None, "null"),
                ([], "[]"),
            ]
        ),
        (
            {"replicate": {"offload": "cpu"}},
            f"{REPLICATE}.offload=cpu is not a mapping; use {{optimizer: cpu, parameters: none}}",
        ),
        (
            {"replicate": {"zero": 1, "offload": {"optimizer": "disk"}}},
            f"{REPLICATE}.offload.optimizer=disk is unknown; use one of: cpu, none, nvme",
        ),
        (
            {"replicate": {"zero": 3, "offload": {"parameters": None}}},
            f"{REPLICATE}.offload.parameters=null is unknown; "
            "did you mean none? One of: cpu, none, nvme",
        ),
        (
            {"replicate": {"offload": {"optimizer": "cpu"}}},
            f"{REPLICATE}.offload.optimizer=cpu needs ZeRO: the copies' optimizer state is only "
            f"moved once it is partitioned; use {REPLICATE}.zero=1, 2 or 3",
        ),
        (
            {"replicate": {"zero": 2, "offload": {"parameters": "nvme"}}},
            f"{REPLICATE}.offload.parameters=nvme needs ZeRO 3: only partitioned parameters can "
            f"live elsewhere; use {REPLICATE}.zero=3",
        ),
        *(
            (
                {"split": {"modules": value}},
                f"strategy.graph.split.modules={shown} is not a module path; "
                'use a path or glob such as "encoder.*", or a list of them',
            )
            for value, shown in [(3, "3"), ([], "[]"), (["a", 1], "['a', 1]"), ({}, "{}")]
        ),
        (
            {"split": {"dim": "heads"}},
            "strategy.graph.split.dim=heads is unknown; "
            "use one of: auto, experts, sequence, tensor, vocabulary",
        ),
        (
            {"pipeline": {"stages": [{"stage": {"recompute": True}}]}},
            f"{PIPELINE}.stages[0].stage.recompute=True is unknown; use one of: auto, full, none",
        ),
        (
            {"pipeline": {"stages": 2, "schedule": "1f1"}},
            f"{PIPELINE}.schedule=1f1 is unknown; did you mean 1f1b? "
            "One of: 1f1b, gpipe, interleaved_1f1b, zero_bubble",
        ),
        (
            {"pipeline": {"stages": 2, "micro_batches": 0}},
            f"{PIPELINE}.micro_batches=0 is not a whole number of at least 1; "
            "use such a number, or auto",
        ),
        ({"pipeline": {}}, f"{PIPELINE}.stages is missing; give their number, or a list of nodes"),
        *(
            (
                {"pipeline": {"stages": value}},
                f"{PIPELINE}.stages={shown} is neither a number of stages nor a list of nodes; "
                "use a whole number of at least 1, or a list",
            )
            for value, shown in [(0, "0"), (True, "True"), (1.5, "1.5"), ("auto", "auto")]
        ),
        ({"pipeline": {"stages": []}}, f"{PIPELINE}.stages=[] is an empty list; "
         "give at least one node"),
        # Nestings without a meaning
        *(
            (
                graph,
                f"{path} is a slice of a pipeline and stands only in its stages; "
                "put it in pipeline.stages",
            )
            for graph, path in [
                ({"stage": {}}, "strategy.graph.stage"),
                ([{"stage": {}}], "strategy.graph[0].stage"),
                ({"replicate": {"of": "stage"}}, f"{REPLICATE}.of.stage"),
                ({"split": {"of": ["stage"]}}, "strategy.graph.split.of[0].stage"),
            ]
        ),
        *(
            (
                {"pipeline": {"stages": [inner]}},
                f"{PIPELINE}.stages[0]{path} is a pipeline inside a stage; "
                "list its stages in the outer pipeline instead",
            )
            for inner, path in [
                ({"pipeline": {"stages": 2}}, ".pipeline"),
                ({"stage": {"of": {"pipeline": {"stages": 2}}}}, ".stage.of.pipeline"),
            ]
        ),
        (
            {"split": {"of": {"replicate": {}}}},
            "strategy.graph.split.of.replicate is a replicate inside a shard, which holds no "
            "whole replicate to make; put the split inside: replicate.of: {split: ...}",
        ),
        (
            {"split": {"of": {"pipeline": {"stages": 2}}}},
            "strategy.graph.split.of.pipeline is a pipeline inside a shard, which holds no whole "
            "pipeline to make; put the split inside: pipeline.stages: [{split: ...}]",
        ),
    ],
)  # fmt: skip
def test_each_fault_word_for_word(graph: Any, fault: str) -> None:
    assert faults_of(graph) == [fault]


def test_an_empty_module_name() -> None:
    (fault,) = faults_of({"split": {"modules": ""}})
    assert fault.startswith("strategy.graph.split.modules is not a module path;")


def test_keys_of_the_file() -> None:
    faults: list[Fault] = []
    assert read_strategy({"balance": "odd", "grap": 1}, "mine", faults) is None
    assert [str(fault) for fault in faults] == [
        "strategy.grap is not a key here; did you mean graph? One of: balance, devices, graph, "
        "time_limit_s",
        "strategy.graph is missing; give a node or a list of nodes",
    ]
    assert faults_of("replicate", balance="odd", devices=0) == [
        "strategy.balance=odd is unknown; use one of: even, hardware",
        "strategy.devices=0 is not a whole number of at least 1; use such a number, or auto",
    ]


def test_all_faults_at_once_after_those_already_there() -> None:
    earlier = Fault("train.steps", "0", "is below 1", "use 1 or more")
    faults = [earlier]
    graph = [{"replicate": {"zero": 7, "degree": 0}}, {"split": {"of": ["stage", {"x": 1}]}}]
    assert read_strategy({"graph": graph, "devices": "all"}, "mine", faults) is None
    assert faults[0] == earlier
    assert [fault.key for fault in faults[1:]] == [
        "strategy.graph[0].replicate.zero",
        "strategy.graph[0].replicate.degree",
        "strategy.graph[1].split.of[0].stage",
        "strategy.graph[1].split.of[1].x",
        "strategy.devices",
    ]


def test_earlier_faults_do_not_refuse_a_good_strategy() -> None:
    faults = [Fault("seed", "-1", "is below 0", "use 0 or more")]
    assert read_strategy({"graph": "replicate"}, "mine", faults) is not None
    assert len(faults) == 1
