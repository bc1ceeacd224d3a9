"""What a strategy file may say: every key and default."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from whale_train.errors import Fault
from whale_train.strategies.grammar.nodes import (
    Node,
    Pipeline,
    Replicate,
    Split,
    Stage,
    Strategy,
    read_strategy,
)
from whale_train.strategies.grammar.recompute import Recompute
from whale_train.strategies.grammar.state import StateCut

CONF = Path(__file__).parents[2] / "conf" / "strategy"


def read(graph: Any, **others: Any) -> Strategy:
    faults: list[Fault] = []
    strategy = read_strategy({"graph": graph, **others}, "mine", faults)
    assert strategy is not None, faults
    return strategy


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
                    recompute=None,
                    of=(),
                ),
            ),
        ),
    )


def test_every_key() -> None:
    offload = {"optimizer": "cpu", "parameters": "cpu"}
    replicate = {"degree": 4, "zero": 3, "offload": offload, "modules": ["a", "b.*"]}
    assert read({"replicate": replicate}, balance="even", devices=8) == Strategy(
        "mine",
        (Replicate("strategy.graph.replicate", 4, 3, "cpu", "cpu", ("a", "b.*")),),
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
    full = Recompute(f"{path}.stages[0].stage.recompute", "full")
    assert read({"pipeline": pipeline}).graph == (
        Pipeline(path, (Stage(f"{path}.stages[0].stage", ("a", "b"), full),), 6, "zero_bubble"),
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
        ({"zero": 1, "state": "auto"}, "state", StateCut()),
        ({"zero": 1, "state": "memory"}, "state", StateCut("memory")),
        ({"zero": 3, "state": [3, 1]}, "state", StateCut("listed", (3, 1))),
        ({"zero": 3, "state": [0.75, 0.25]}, "state", StateCut("listed", (750_000, 250_000))),
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
    "experts_dp": (
        Replicate("strategy.graph[0].replicate"),
        Split("strategy.graph[1].split", dim="experts"),
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
    assert {path.stem for path in CONF.glob("*.yaml")} == {*STRATEGIES, "auto", "elastic_dp"}


def test_logical_workers() -> None:
    mapping = yaml.safe_load((CONF / "elastic_dp.yaml").read_text())
    copies = (Replicate("strategy.graph.replicate"),)
    assert read_strategy(mapping, "elastic_dp", []) == Strategy(
        "elastic_dp", copies, logical_workers=8
    )


def test_a_graph_left_to_the_planner() -> None:
    mapping = yaml.safe_load((CONF / "auto.yaml").read_text())
    strategy = read_strategy(mapping, "auto", [])
    assert strategy == Strategy("auto", (), time_limit_s=0.0)
    assert strategy.is_auto
