"""Which slices of a model are alike: equal blocks at any depth, and nothing else."""

from itertools import pairwise

import pytest
from tests.unit.operation_graphs import Sketch
from tests.unit.test_stages import model

from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.partition.pipeline_partition import sliced
from whale_train.strategies.stages.analysis import ModelAnalysis

BLOCKS = 4


def blocks(widths: tuple[int, ...] = (8,) * BLOCKS, dropout: float = 0.1) -> ModelProfile:
    """A stack of products with dropouts, the last but one of which is `dropout`."""
    s = Sketch()
    value = s.input("x", "B 4", "float32")
    for number, width in enumerate(widths):
        up = s.parameter(f"blocks.{number}.up", f"{width} 4")
        down = s.parameter(f"blocks.{number}.down", f"4 {width}")
        inside = f"blocks.{number}"
        s.call(f"wide_{number}", "linear.default", value, up, shape=f"B {width}", module=inside)
        part = dropout if number == len(widths) - 2 else 0.1
        s.call(
            f"dropped_{number}", "dropout.default", f"wide_{number}", part, True,
            shape=f"B {width}", module=inside,
        )  # fmt: skip
        s.call(
            f"narrow_{number}", "linear.default", f"dropped_{number}", down, shape="B 4",
            module=inside,
        )  # fmt: skip
        value = f"narrow_{number}"
    s.call("loss", "mean.default", value, shape="")
    return s.profile("blocks", "loss")


def numbers(profile: ModelProfile, shared: tuple[str, ...] = ()) -> list[int]:
    """Of every block's slice."""
    findings = ModelAnalysis(profile, "fp32")
    order = findings.order
    ends = [
        *(i for i in order.places if i < len(order.operations) and order.operations[i] != "loss"),
        len(order.operations),
    ]
    parts = sliced(profile, order, ends)
    assert [len(pair) for pair in pairwise(ends)] == [2] * len(parts)
    return [findings.likeness.number(part, shared) for part in parts]


def test_equal_blocks_are_alike_but_where_the_model_begins_and_ends() -> None:
    first, second, third, last = numbers(blocks())
    assert second == third
    assert len({first, second, last}) == 3  # an input has no gradient; a loss is not handed on


@pytest.mark.parametrize(
    "unlike",
    [blocks(dropout=0.2), blocks(dropout=0.0), blocks(widths=(8, 8, 16, 8))],
    ids=["more dropout", "none", "wider"],
)
def test_what_differs_in_anything_is_not(unlike: ModelProfile) -> None:
    _, second, third, _ = numbers(unlike)
    assert second != third


def test_nor_is_what_another_stage_holds_as_well() -> None:
    _, second, third, _ = numbers(blocks(), shared=("blocks.2.up",))
    assert second != third
    _, second, third, _ = numbers(blocks(), shared=("blocks.1.up", "blocks.2.up"))
    assert second == third


def test_nor_is_where_more_is_on_its_way() -> None:
    """The last block reads the first one's result again, which passes by those in between: by the
    second's beginning that is all there is."""

    def inner(profile: ModelProfile) -> list[int]:
        findings = ModelAnalysis(profile, "fp32")
        parts = sliced(profile, findings.order, findings.order.places)
        return [findings.likeness.number(part, ()) for part in parts[1:4]]

    assert len(set(inner(model([1.0] * 5)))) == 1
    second, third, fourth = inner(model([1.0] * 5, skip=True))
    assert second != third
    assert third == fourth
