"""Losses that are means over samples, and those that are not."""

from typing import Any

import pytest
from tests.unit.test_stages import model

from whale_train.errors import Fault
from whale_train.strategies.graph.operation_graph import (
    Argument,
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
    Size,
)
from whale_train.strategies.independence.judge import classify_loss
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.shared_batch import refuse_shared_batch, where_samples_meet
from whale_train.strategies.stages.analysis import ModelAnalysis

SAMPLE = (Size(0, 1), Size(8))
BATCH, ALL, SCALAR = (Size(0, 1),), (Size(8),), ()


def graph(
    *operations: tuple[str, str, tuple[Argument, ...], tuple[Size, ...] | None],
) -> OperationGraph:
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
        [("a", "mean.default", (Y,), SCALAR), ("loss", "div.Tensor", (Ref("a"), 3.0), SCALAR)],
    ],
)  # fmt: skip
def test_means_over_samples(
    operations: list[tuple[str, str, tuple[Argument, ...], tuple[Size, ...] | None]],
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
    operations: list[tuple[str, str, tuple[Argument, ...], tuple[Size, ...] | None]], where: str
) -> None:
    met = where_samples_meet(graph(*operations))
    assert met is not None
    assert met.name == where


def test_a_mean_and_a_sum_are_neither() -> None:
    made = graph(
        ("a", "mean.default", (Y,), SCALAR),
        ("b", "sum.default", (Y,), SCALAR),
        ("loss", "add.Tensor", (Ref("a"), Ref("b")), SCALAR),
    )
    assert classify_loss(made).kind == "meets"
    assert classify_loss(made).because.startswith(
        "adds a sum over the samples of the batch to a mean"
    )


# What was once accepted as a mean over samples: each operation, and where samples meet in it.
EACH = ("r", "mean.dim", (Y, (1,)), BATCH)
ACROSS = {
    "max over the batch": [("m", "amax.default", (Y, (0,)), ALL)],
    "variance over the batch": [("m", "var.correction", (Y, (0,)), ALL)],
    "norm of all": [("m", "linalg_vector_norm.default", (Y,), SCALAR)],
    "log-sum-exp over the batch": [("m", "logsumexp.default", (Y, (0,)), ALL)],
    "softmax over the batch": [("m", "softmax.int", (Y, 0), SAMPLE)],
    "mixup": [("m", "flip.default", (Y, (0,)), SAMPLE)],
    "cumulative sum": [("m", "cumsum.default", (Y, 0), SAMPLE)],
    "rolled": [("m", "roll.default", (Y, (1,), (0,)), SAMPLE)],
    "sorted samples": [EACH, ("m", "sort.default", (Ref("r"),), None)],
    "the hardest": [EACH, ("m", "topk.default", (Ref("r"), 4), None)],
}  # fmt: skip


@pytest.mark.parametrize("name", ACROSS)
def test_what_looks_across_the_batch(name: str) -> None:
    last = ("value", "<built-in function getitem>", (Ref("m"), 0), (Size(4),))
    picked = [last] if ACROSS[name][-1][3] is None else []
    loss = ("loss", "sum.default", (Ref("value" if picked else "m"),), SCALAR)
    met = where_samples_meet(graph(*ACROSS[name], *picked, loss))
    assert met is not None
    assert met.name == "m"


def test_what_nobody_has_said_anything_about() -> None:
    made = graph(
        ("odd", "matrix_exp.default", (Y,), SAMPLE), ("loss", "mean.default", (Ref("odd"),), SCALAR)
    )
    found = classify_loss(made)
    assert found.kind == "unknown"
    assert found.operation is not None
    assert found.operation.name == "odd"


def test_sums_over_samples_are_sums() -> None:
    made = graph(("loss", "sum.default", (Y,), SCALAR))
    assert classify_loss(made).kind == "sum"
    faults: list[Fault] = []
    findings = ModelAnalysis(profile_of(made), "fp32")
    refuse_shared_batch(findings, training(loss_over="mean"), 1, faults)
    assert [str(fault) for fault in faults] == [
        "model.loss_over=mean is not what the loss of sketched is: by its graph, it is a sum over "
        "the samples; use sum, or null"
    ]


@pytest.mark.parametrize("vouched", [False, True])
def test_samples_that_meet_are_refused_by_the_name_of_the_operation(vouched: bool) -> None:
    made = graph(
        ("m", "softmax.int", (Y, 0), SAMPLE), ("loss", "mean.default", (Ref("m"),), SCALAR)
    )
    faults: list[Fault] = []
    findings = ModelAnalysis(profile_of(made), "fp32")
    refuse_shared_batch(findings, training(samples_are_independent=vouched), 1, faults)
    said = [] if vouched else [
        "model=sketched lets the samples of a batch meet: softmax in top (m) works along the "
        "samples of the batch, so that copies and micro-batches of their own samples would train "
        "something else; use strategy=single, strategy=split, or a pipeline of one micro-batch"
    ]  # fmt: skip
    assert [str(fault) for fault in faults] == said


TOTAL = ("total", "sum.dim_IntList", (Ref("y"), (0,)), ALL)


@pytest.mark.parametrize(
    ("operations", "sums"),
    [
        # One factor is enough: times a constant, the other is a mean as before.
        ([MEAN, ("product", "mul.Tensor", (Ref("mean"), Ref("mean")), ALL)], {"mean": -1}),
        ([MEAN, ("root", "sqrt.default", (Ref("mean"),), ALL),
          ("loss", "sum.default", (Ref("root"),), SCALAR)], {"mean": -1}),
        # What was added up is exchanged as it was before it was converted.
        ([TOTAL, ("wide", "to.dtype", (Ref("total"), 7), ALL),
          ("root", "sqrt.default", (Ref("wide"),), ALL),
          ("loss", "sum.default", (Ref("root"),), SCALAR)], {"total": 0}),
        # A sum of what is exchanged is that of the whole batch: it is not exchanged again.
        ([TOTAL, ("all", "sum.default", (Ref("total"),), SCALAR),
          ("part", "div.Tensor", (Ref("total"), Ref("all")), ALL),
          ("loss", "sum.default", (Ref("part"),), SCALAR)], {"total": 0}),
        ([("all", "sum.default", (Y,), SCALAR), TOTAL,
          ("inverse", "div.Tensor", (1.0, Ref("all")), SCALAR),
          ("root", "sqrt.default", (Ref("total"),), ALL),
          ("part", "mul.Tensor", (Ref("root"), Ref("inverse")), ALL),
          ("loss", "sum.default", (Ref("part"),), SCALAR)], {"all": 0, "total": 0}),
        # By the samples at hand, of which there are fewer than in the batch.
        ([TOTAL, ("n", "sym_size.int", (Y, 0), None),
          ("root", "sqrt.default", (Ref("total"),), ALL),
          ("each", "div.Tensor", (Ref("root"), Ref("n")), ALL),
          ("loss", "sum.default", (Ref("each"),), SCALAR)], {}),
        ([("all", "matmul.default", (Y, Y), (Size(0, 1), Size(0, 1))),
          ("loss", "mean.default", (Ref("all"),), SCALAR)], {}),
    ],
)  # fmt: skip
def test_what_copies_tell_each_other(
    operations: list[tuple[str, str, tuple[Argument, ...], tuple[Size, ...] | None]],
    sums: dict[str, int],
) -> None:
    found = classify_loss(graph(*operations))
    assert found.kind == "meets"
    assert found.sums == sums


def test_micro_batches_cannot_tell_each_other() -> None:
    made = graph(
        MEAN,
        ("root", "sqrt.default", (Ref("mean"),), ALL),
        ("loss", "sum.default", (Ref("root"),), SCALAR),
    )
    faults: list[Fault] = []
    findings = ModelAnalysis(profile_of(made), "fp32")
    refuse_shared_batch(findings, training(), 1, faults)
    assert not faults
    refuse_shared_batch(findings, training(), 2, faults)
    assert [str(fault) for fault in faults] == [
        "model=sketched lets the samples of a batch meet: sqrt in top (root) is not linear in a "
        "statistic of the whole batch, and micro-batches of one copy are not there at the same "
        "time; use one micro-batch: copies of the model exchange what is made of all samples"
    ]


def profile_of(made: OperationGraph) -> ModelProfile:
    weight = Parameter("w", (8, 8))
    return ModelProfile("sketched", (weight,), (), 1.0, 1.0, graph=made)


def training(**said: Any) -> Training:
    return Training(8, "fp32", 0.0, "sgd", {"lr": 0.1}, **said)


def test_a_stack_of_blocks_is_shared() -> None:
    faults: list[Fault] = []
    refuse_shared_batch(ModelAnalysis(model([1.0, 2.0]), "fp32"), training(), 1, faults)
    assert not faults
