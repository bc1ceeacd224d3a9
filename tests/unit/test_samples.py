"""Losses that are means over samples, and those that are not."""

import pytest
from tests.unit.test_stages import model

from whale_train.errors import Fault
from whale_train.strategies.findings import Findings
from whale_train.strategies.operations import Argument, Operation, OperationGraph, Ref, Size
from whale_train.strategies.samples import refuse_shared_batch, where_samples_meet

SAMPLE = (Size(0, 1), Size(8))
BATCH, ALL, SCALAR = (Size(0, 1),), (Size(8),), ()


def graph(*operations: tuple[str, str, tuple[Argument, ...], tuple[Size, ...]]) -> OperationGraph:
    """`x` times a weight gives `y`; then these; the last one is the loss."""
    made = [
        Operation("x", "input", shape=SAMPLE, dtype="float32"),
        Operation("w", "parameter", shape=(Size(8), Size(8)), dtype="float32", path="w"),
        Operation("y", "aten.mm.default", (Ref("x"), Ref("w")), (), SAMPLE, "float32"),
    ]
    for name, target, args, shape in operations:
        made.append(Operation(name, f"aten.{target}", args, (), shape, "float32", "top"))
    made.append(Operation("output", "output", (Ref(made[-1].name),)))
    return OperationGraph(tuple(made))


Y, MEAN = Ref("y"), ("mean", "mean.dim", (Ref("y"), (0,)), ALL)


@pytest.mark.parametrize(
    "operations",
    [
        [("loss", "mean.default", (Y,), SCALAR)],
        [("sq", "mul.Tensor", (Y, Y), SAMPLE), ("loss", "sum.default", (Ref("sq"),), SCALAR)],
        [MEAN, ("loss", "sum.default", (Ref("mean"),), SCALAR)],
        [MEAN, ("half", "mul.Tensor", (Ref("mean"), 0.5), ALL),
         ("loss", "sum.default", (Ref("half"),), SCALAR)],
        [("a", "mean.default", (Y,), SCALAR), ("b", "sum.default", (Y,), SCALAR),
         ("loss", "add.Tensor", (Ref("a"), Ref("b")), SCALAR)],
        [("a", "mean.default", (Y,), SCALAR), ("loss", "div.Tensor", (Ref("a"), 3.0), SCALAR)],
    ],
)  # fmt: skip
def test_means_over_samples(
    operations: list[tuple[str, str, tuple[Argument, ...], tuple[Size, ...]]],
) -> None:
    assert where_samples_meet(graph(*operations)) is None


@pytest.mark.parametrize(
    ("operations", "where"),
    [
        ([("all", "matmul.default", (Y, Y), (Size(0, 1), Size(0, 1))),
          ("loss", "mean.default", (Ref("all"),), SCALAR)], "all"),
        ([MEAN, ("product", "mul.Tensor", (Ref("mean"), Ref("mean")), ALL),
          ("loss", "sum.default", (Ref("product"),), SCALAR)], "product"),
        ([MEAN, ("root", "sqrt.default", (Ref("mean"),), ALL),
          ("loss", "sum.default", (Ref("root"),), SCALAR)], "root"),
        ([MEAN, ("centred", "sub.Tensor", (Y, Ref("mean")), SAMPLE),
          ("deviation", "mul.Tensor", (Ref("centred"), Ref("mean")), SAMPLE),
          ("loss", "sum.default", (Ref("deviation"),), SCALAR)], "centred"),
        ([("a", "mean.default", (Y,), SCALAR), ("loss", "div.Tensor", (3.0, Ref("a")), SCALAR)],
         "loss"),
    ],
)  # fmt: skip
def test_samples_that_meet(
    operations: list[tuple[str, str, tuple[Argument, ...], tuple[Size, ...]]], where: str
) -> None:
    met = where_samples_meet(graph(*operations))
    assert met is not None
    assert met.name == where


def test_a_stack_of_blocks_is_shared() -> None:
    faults: list[Fault] = []
    refuse_shared_batch(Findings(model([1.0, 2.0]), "fp32"), faults)
    assert not faults
