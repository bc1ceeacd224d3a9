"""What a strategy file may not say: every fault word for word."""

from typing import Any

import pytest

from whale_train.errors import Fault
from whale_train.strategies.grammar.nodes import read_strategy


def faults_of(graph: Any, **others: Any) -> list[str]:
    faults: list[Fault] = []
    assert read_strategy({"graph": graph, **others}, "mine", faults) is None
    return [str(fault) for fault in faults]


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
PATTERNS = "strategy.graph.split.patterns"
LISTED = '{weight: "*.q_proj.weight", pattern: column}'
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
            "One of: degree, modules, of, offload, recompute, state, zero",
        ),
        (
            {"split": {"zero": 1}},
            "strategy.graph.split.zero is not a key here; use one of: attention, degree, dim, "
            "modules, of, patterns, recompute",
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
            "One of: activations, optimizer, parameters, path",
        ),
        (
            {"split": {"patterns": "row"}},
            f"{PATTERNS}=row is neither a mapping nor a list; use {{*.q_proj.weight: column}} or "
            f"[{LISTED}]",
        ),
        (
            {"split": {"patterns": ["lm_head"]}},
            f"{PATTERNS}[0]=lm_head is not a weight with its pattern; use {LISTED}",
        ),
        (
            {"split": {"patterns": [{"weight": "a", "pattern": "row"}, {"weight": "b"}]}},
            f"{PATTERNS}[1].pattern is missing; use {LISTED}",
        ),
        (
            {"split": {"patterns": [{"weight": 3, "pattern": "row"}]}},
            f"{PATTERNS}[0].weight=3 is not a glob of weights; use {LISTED}",
        ),
        (
            {"split": {"patterns": [{"weight": "a", "pattern": "rwo"}]}},
            f"{PATTERNS}[0].pattern=rwo is unknown; did you mean row? One of: column, experts, "
            "replicate, row, vocabulary",
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
            f"{REPLICATE}.offload=cpu is not a mapping; "
            "use auto, or {optimizer: cpu, parameters: none}",
        ),
        (
            {"replicate": {"zero": 1, "offload": {"optimizer": "disk"}}},
            f"{REPLICATE}.offload.optimizer=disk is unknown; use one of: auto, cpu, none, nvme",
        ),
        (
            {"replicate": {"offload": {"activations": "disk"}}},
            f"{REPLICATE}.offload.activations=disk is unknown; use one of: auto, cpu, none",
        ),
        (
            {"replicate": {"zero": 3, "offload": {"parameters": None}}},
            f"{REPLICATE}.offload.parameters=null is unknown; "
            "use one of: auto, cpu, none, nvme",
        ),
        (
            {"replicate": {"offload": {"optimizer": "cpu"}}},
            f"{REPLICATE}.offload.optimizer=cpu needs ZeRO: the copies' optimizer state is only "
            f"moved once it is partitioned; use {REPLICATE}.zero=1, 2 or 3",
        ),
        (
            {"replicate": {"state": "memory"}},
            f"{REPLICATE}.state=memory needs ZeRO: without it every copy keeps all of its state; "
            f"use {REPLICATE}.zero=1, 2 or 3",
        ),
        (
            {"replicate": {"zero": 1, "state": "memori"}},
            f"{REPLICATE}.state=memori is unknown; did you mean memory? One of: auto, even, memory",
        ),
        (
            {"replicate": {"zero": 1, "state": [1, -1]}},
            f"{REPLICATE}.state=[1, -1] is no list of relative parts; "
            "use numbers of at least 0, as [3, 1]",
        ),
        (
            {"replicate": {"zero": 1, "state": 3}},
            f"{REPLICATE}.state=3 is not known to cut state; "
            "use auto, even, memory, or a list such as [3, 1]",
        ),
        (
            {"replicate": {"zero": 1, "state": [3, 1], "offload": {"optimizer": "cpu"}}},
            f"{REPLICATE}.state=[3, 1] cuts what devices keep, and offload keeps it on the hosts; "
            "use even, or no offload",
        ),
        (
            {"replicate": {"zero": 2, "offload": {"parameters": "cpu"}}},
            f"{REPLICATE}.offload.parameters=cpu needs ZeRO 3: only partitioned parameters can "
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
            "use one of: auto, context, experts, sequence, tensor, vocabulary",
        ),
        (
            {"split": {"dim": "context", "modules": "*.mlp"}},
            "strategy.graph.split.modules=*.mlp says which weights are cut, and dim: context "
            "leaves all of them whole; leave it out, or use dim: auto",
        ),
        (
            {"pipeline": {"stages": [{"stage": {"recompute": True}}]}},
            f"{PIPELINE}.stages[0].stage.recompute=True is no form of recomputation; "
            "use none, full, auto, a list of modules, or {memory: 0.5}",
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
        *(
            ({"replicate": {"recompute": value}}, f"{REPLICATE}.recompute{said}")
            for value, said in [
                ("ful", "=ful is no form of recomputation; did you mean full? Use none, full, "
                 "auto, a list of modules, or {memory: 0.5}"),
                ({"memory": 2}, ".memory=2 is no fraction of the bytes that are kept without "
                 "recomputation; use a number from 0 to 1"),
                *(
                    (other, f"={shown} is no form of recomputation; use none, full, auto, a list "
                     "of modules, or {memory: 0.5}")
                    for other, shown in [([], "[]"), ("*", "*"), ({"mem": 0.5}, "{'mem': 0.5}")]
                ),
            ]
        ),
        (
            [{"replicate": {}}, {"split": {"modules": "head", "recompute": "full"}}],
            "strategy.graph[1].split.recompute is not a key here; use one of: degree, dim, "
            "modules, of, patterns",
        ),
        (
            {"split": {"of": {"replicate": {}}}},
            "strategy.graph.split.of.replicate is a replicate inside a split, and a shard has no "
            "replicate of its own; put the split inside: replicate.of: {split: ...}",
        ),
        (
            {"split": {"of": {"pipeline": {"stages": 2}}}},
            "strategy.graph.split.of.pipeline is a pipeline inside a split, and a shard has no "
            "pipeline of its own; put the split inside: pipeline.stages: [{split: ...}]",
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
        "logical_workers, prefer_intra_node",
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
