"""Parts beside copies: what runs on the samples of all, carried out on pieces against the whole in
NumPy; the casts of small graphs by hand; and every reason to refuse."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.unit import spmd
from tests.unit.operation_graphs import (
    Sketch,
    auxiliary_loss,
    bert,
    classifier,
    conv1d_head,
    gpt,
    transposed_head,
    two_heads,
)
from tests.unit.spmd import Ranks, drawn

from whale_train.strategies.graph.operation_graph import ModelProfile, Size
from whale_train.strategies.independence.judge import states_of
from whale_train.strategies.layouts.propagation import BATCH, R
from whale_train.strategies.partition.dense_parts import dense_parts, number_of
from whale_train.strategies.partition.split_parts import SplitParts, SplitRefused, together
from whale_train.strategies.tensor_parallel.choose import choose_patterns


def parts_of(
    profile: ModelProfile, named: str, members: int = 2, patterns: tuple[tuple[str, str], ...] = ()
) -> SplitParts:
    """What of a model is split where only weights with `named` in their path may be."""
    graph = profile.graph
    assert graph is not None
    names = tuple(op.name for op in graph if op.target != "output")
    loss = graph.operations[-1].inputs[0]
    typed = choose_patterns(
        graph,
        names,
        parameters=profile.weights_read(names),
        held=profile.weight_elements,
        group_size=members,
        given={},
        wanted={loss: R},
        by_hand=[
            *((p.path, "replicate") for p in profile.parameters if named not in p.path),
            *patterns,
        ],
    )
    return dense_parts(graph, names, (loss,), states_of(graph), typed)


def casts_of(parts: SplitParts) -> list[tuple[str, str, str]]:
    return [(cast.user, cast.value, cast.kind) for cast in parts.sharded.assignment.casts]


def mlp() -> ModelProfile:
    """Two layers, of which the first's bias is cut with it and the second's is not."""
    s = Sketch()
    s.input("x", "B 3 4", "float32")
    for path, shape in (
        *(("mlp.up.weight", "8 4"), ("mlp.up.bias", "8")),
        *(("mlp.down.weight", "4 8"), ("mlp.down.bias", "4")),
        ("head.weight", "600 4"),
    ):
        s.parameter(path, shape)
    s.input("labels", "B 3")
    s.call("up", "linear.default", "x", "mlp_up_weight", "mlp_up_bias", shape="B 3 8")
    s.call("relu", "relu.default", "up", shape="B 3 8")
    s.call("down", "linear.default", "relu", "mlp_down_weight", "mlp_down_bias", shape="B 3 4")
    s.call("added", "add.Tensor", "down", "x", shape="B 3 4")
    s.call("logits", "linear.default", "added", "head_weight", shape="B 3 600")
    s.call("flat", "view.default", "logits", (-1, 600), shape="3B 600")
    s.call("targets", "view.default", "labels", (-1,), shape="3B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "flat", "targets", shape="")
    return s.profile("mlp", "loss")


def rows_of_tokens() -> ModelProfile:
    """A layer that sees tokens of all samples in one dimension, and a table of positions."""
    s = Sketch()
    s.input("ids", "B 3")
    s.parameter("table.weight", "12 4")
    s.parameter("places.weight", "12 4")
    s.buffer("order", "3")
    s.operations[-1] = replace(s.operations[-1], dtype="int64")
    s.parameter("inner.weight", "4 4")
    s.call("tokens", "embedding.default", "table_weight", "ids", shape="B 3 4")
    s.call("placed", "embedding.default", "places_weight", "order", shape="3 4")
    s.call("both", "add.Tensor", "tokens", "placed", shape="B 3 4")
    s.call("flat", "view.default", "both", (-1, 4), shape="3B 4")
    s.call("inner", "linear.default", "flat", "inner_weight", shape="3B 4")
    s.call("loss", "mean.default", "inner", shape="")
    return s.profile("rows", "loss")


def test_an_mlp() -> None:
    parts = parts_of(mlp(), "mlp")
    assert parts.operations == {"up", "relu", "down"}
    assert set(parts.sharded.weights) == {"mlp.up.weight", "mlp.up.bias", "mlp.down.weight"}
    assert casts_of(parts) == [
        ("up", "x", "gather"),
        # Held by all: what it gets of all samples, one member hands on.
        ("down", "mlp_down_bias", "repeated_once"),
        ("added", "down", "reduce_scatter"),
    ]
    assert parts.sharded.assignment.gathered == ()


def test_a_head_has_one_loss_of_all_samples() -> None:
    parts = parts_of(mlp(), "head")
    assert parts.operations == {"logits", "flat", "loss"}
    assert casts_of(parts) == [("logits", "added", "gather_enter"), ("loss", "targets", "gather")]


def test_numbers_of_all_samples_are_made_of_all() -> None:
    """A sum over the batch that is added to a loss of all samples is one of all samples."""
    parts = parts_of(auxiliary_loss(), "head")
    assert parts.operations == {"logits", "balance", "scaled", "task", "loss"}
    assert ("balance", "scores", "gather") in casts_of(parts)


def test_a_table_that_no_sample_has_a_part_in() -> None:
    parts = parts_of(rows_of_tokens(), "places")
    assert parts.operations == set()
    assert casts_of(parts) == [("both", "placed", "gather_enter")]


GRAPHS: dict[str, tuple[Callable[[], ModelProfile], str]] = {
    "mlp": (mlp, "mlp"),
    "mlp_and_head": (mlp, ""),
    "table": (rows_of_tokens, "table"),
    "rows": (rows_of_tokens, "inner"),
    "gpt": (gpt, "lm_head"),
    "gpt_tied": (lambda: gpt(tied=True), "token"),
    "gpt_block": (gpt, "block"),
    "classifier": (lambda: classifier(batch_norm=False), "head"),
    "conv1d": (conv1d_head, "head"),
    "transposed": (transposed_head, "classes"),
    "bert": (bert, "embeddings"),
    "two_heads": (two_heads, "coarse"),
    "auxiliary_loss": (auxiliary_loss, "head"),
}


@pytest.mark.parametrize("samples", [(2, 3), (1, 4, 2)])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_pieces_make_the_whole(name: str, samples: tuple[int, ...]) -> None:
    """Uneven samples and shards."""
    build, named = GRAPHS[name]
    profile = build()
    assert profile.graph is not None
    by_rows = (("inner.weight", "row"),) if name == "rows" else ()
    parts = parts_of(profile, named, len(samples), by_rows)
    first = [1, 2][: len(samples) - 1]
    axes = {axis: (*first, units - sum(first)) for axis, units in parts.sharded.axes.items()}
    values = drawn(profile.graph, sum(samples))
    whole = spmd.run_whole(profile.graph, values)
    found = spmd.run_parts(profile.graph, parts, values, Ranks({"batch": samples, **axes}))
    assert parts.sharded.weights
    assert found
    for value, pieces in found.items():
        np.testing.assert_allclose(pieces, whole[value], rtol=1e-9, err_msg=value)


def test_what_one_part_gives_another_takes_where_it_is() -> None:
    """Two layers in two parts are what they are in one."""
    profile, samples = mlp(), (2, 3)
    rows = (("mlp.down.weight", "row"),)
    parts = [parts_of(profile, "mlp.up"), parts_of(profile, "mlp.down", patterns=rows)]
    assert ("down", "relu", "reshard") in casts_of(parts[0])
    both = together(parts)
    assert both.operations == {"up", "relu", "down"}
    (between,) = (x for x in both.sharded.assignment.casts if x.value == "relu")
    assert BATCH not in (between.source.axis, between.target.axis)  # type: ignore[union-attr]
    assert profile.graph is not None
    axes = {axis: (3, units - 3) for axis, units in both.sharded.axes.items()}
    values = drawn(profile.graph, sum(samples))
    found = spmd.run_parts(profile.graph, both, values, Ranks({"batch": samples, **axes}))
    whole = spmd.run_whole(profile.graph, values)
    np.testing.assert_allclose(found["added"], whole["added"], rtol=1e-9)


def test_parts_have_nothing_in_common() -> None:
    part = parts_of(mlp(), "mlp")
    with pytest.raises(SplitRefused, match=r"two parts have mlp\.down\.weight"):
        together([part, part])


def sized(kind: str, by: object) -> ModelProfile:
    """A layer that is seen in an extent, the batch's and `by` in a `kind` of number."""
    s = Sketch()
    s.input("x", "B 4", "float32")
    s.parameter("inner.weight", "600 4")
    s.call("size", "sym_size.int", "x", 0, shape=None)
    s.call("number", kind, "size", by, shape=None)
    s.operations[-1] = replace(s.operations[-1], target=kind)
    s.call("inner", "linear.default", "x", "inner_weight", shape="B 600")
    s.call("seen", "view.default", "inner", ("number", 200), shape="3B 200")
    s.call("loss", "mean.default", "seen", shape="")
    return s.profile("sized", "loss")


def test_a_number_that_follows_the_batch_is_another_inside() -> None:
    profile = sized("<built-in function mul>", 3)
    assert profile.graph is not None
    assert number_of(profile.graph, "number") == Size(0, 3)
    assert ("seen", "number", "gather") in casts_of(parts_of(profile, "inner"))
    # One that nobody can tell from the shares is made again, of those that one can.
    casts = casts_of(parts_of(sized("<built-in function floordiv>", 2), "inner"))
    assert ("number", "size", "gather") in casts
    assert ("seen", "number", "gather") not in casts


def in_place(target: str, second: str) -> ModelProfile:
    s = Sketch()
    s.input("x", "B 4", "float32")
    s.parameter("inner.weight", "600 4")
    s.parameter("norm.weight", "600")
    s.parameter("norm.bias", "600")
    s.buffer("mean", "600")
    s.buffer("variance", "600")
    s.call("inner", "linear.default", "x", "inner_weight", shape="B 600")
    rest = ("norm_weight", "norm_bias", "mean", "variance", True, 0.1, 1e-5)
    args = ("inner", *rest) if second == "norm" else ("inner", second)
    s.call("changed", target, *args, shape="B 600")
    s.call("loss", "mean.default", "changed", shape="")
    return s.profile("changed", "loss")


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (sized("<built-in function mul>", "size"), "seen reads number"),
        (
            in_place("batch_norm.default", "norm"),
            r"changed \(aten.batch_norm.default\) normalises over the batch",
        ),
        (
            in_place("addcmul_.default", "x"),
            r"changed \(aten.addcmul_.default\) changes inner in place",
        ),
    ],
)
def test_each_reason_to_refuse(profile: ModelProfile, reason: str) -> None:
    with pytest.raises(SplitRefused, match=reason):
        parts_of(profile, "inner")
