"""Where a graph is cut for a split head: the pieces by hand, their sum against the whole in NumPy,
and every reason to refuse."""

from collections.abc import Callable

import numpy as np
import pytest
from tests.unit.operation_graphs import (
    Sketch,
    auxiliary_loss,
    bert,
    classifier,
    conv1d_head,
    gpt,
    head_read_elsewhere,
    transposed_head,
    two_heads,
)
from tests.unit.spmd import Array, Ranks, run_cut, run_whole

from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph
from whale_train.strategies.layouts.propagation import Shard
from whale_train.strategies.partition.head_partition import CutRefused, HeadCut, cut_head
from whale_train.strategies.partition.output_head import Head, find_heads

CLASSES_0, CLASSES_1 = Shard(0, "classes"), Shard(1, "classes")


def cut_of(profile: ModelProfile, number: int = 0) -> HeadCut:
    return cut_head(profile, find_heads(profile)[number])


def casts_of(cut: HeadCut, segment: int) -> list[tuple[str, str, str]]:
    typed = cut.segments[segment].assignment
    assert typed is not None
    return [(cast.user, cast.value, cast.kind) for cast in typed.casts]


def test_a_language_models_head() -> None:
    cut = cut_of(gpt())
    backbone, head = cut.segments
    assert (backbone.task_graph, backbone.takes, backbone.gives) == (0, (), ("norm",))
    assert backbone.assignment is None
    assert set(backbone.operations) == {
        "token_weight", "block_weight", "norm_weight", "input_ids", "embedding", "linear", "norm",
    }  # fmt: skip
    assert (head.task_graph, head.takes, head.gives) == (1, ("norm",), ("loss",))
    # The shifted labels depend on no parameter: they are made where they are used.
    assert head.operations == (
        "lm_head_weight", "labels", "logits", "rows", "shifted", "padded", "flat", "float",
        "targets", "loss",
    )  # fmt: skip
    assert casts_of(cut, 1) == [
        ("logits", "norm", "gather_enter"),
        ("padded", "shifted", "gather"),
    ]
    assert head.assignment is not None
    assert head.assignment.becomes == {"loss": "split_cross_entropy"}
    assert head.assignment.gathered == ()
    assert cut.shards == {"lm_head.weight": CLASSES_0}
    assert cut.backbone_parameters == ("token.weight", "block.weight", "norm.weight")
    assert (cut.backbone_flops, cut.head_flops) == (96.0, 288.0)


def test_a_head_tied_to_the_embedding_comes_before_the_backbone_as_well() -> None:
    cut = cut_of(gpt(tied=True))
    first, backbone, last = cut.segments
    assert [segment.task_graph for segment in cut.segments] == [1, 0, 1]
    assert (first.operations, first.takes, first.gives) == (
        ("lm_head_weight", "input_ids", "embedding"), (), ("embedding",),
    )  # fmt: skip
    assert casts_of(cut, 0) == [
        ("embedding", "input_ids", "gather"),
        ("", "embedding", "reduce_scatter"),
    ]
    assert first.assignment is not None
    assert first.assignment.becomes == {"embedding": "split_embedding"}
    assert (backbone.takes, backbone.gives) == (("embedding",), ("norm",))
    assert backbone.operations == ("block_weight", "norm_weight", "linear", "norm")
    assert (last.takes, last.gives) == (("norm",), ("loss",))
    assert cut.shards == {"token.weight": CLASSES_0}  # its canonical path, held once
    assert cut.backbone_parameters == ("block.weight", "norm.weight")
    assert (cut.backbone_flops, cut.head_flops) == (96.0, 288.0)


def test_a_classifiers_bias_is_cut_with_it_and_counters_stay_behind() -> None:
    cut = cut_of(classifier())
    backbone, head = cut.segments
    assert {"counted", "norm_num_batches_tracked"} <= set(backbone.operations)
    assert head.operations == ("head_weight", "head_bias", "labels", "logits", "float", "loss")
    assert casts_of(cut, 1) == [("logits", "normed", "gather_enter"), ("loss", "labels", "gather")]
    assert cut.shards == {"head.weight": CLASSES_0, "head.bias": CLASSES_0}
    assert cut.backbone_parameters == ("trunk.weight", "trunk.bias", "norm.weight", "norm.bias")
    assert (cut.backbone_flops, cut.head_flops) == (64.0, 80.0)


def test_what_a_view_merges_with_the_batch_crosses_before_the_view() -> None:
    cut = cut_of(conv1d_head())
    backbone, head = cut.segments
    assert backbone.gives == head.takes == ("hidden",)
    assert "flat" in head.operations
    assert cut.shards == {"head.weight": CLASSES_1, "head.bias": CLASSES_0}
    assert casts_of(cut, 1) == [
        ("flat", "hidden", "gather"),
        ("addmm", "flat", "enter"),
        ("targets", "labels", "gather"),
    ]


def test_a_weight_seen_through_a_cast_and_a_transpose() -> None:
    cut = cut_of(transposed_head())
    assert cut.segments[1].operations == ("classes", "labels", "cast", "t", "logits", "loss")
    assert cut.segments[1].takes == ("hidden",)
    assert cut.shards == {"classes": CLASSES_0}
    assert cut.backbone_parameters == ("trunk.weight",)


def test_a_bias_added_afterwards_is_cut_with_the_weight() -> None:
    cut = cut_of(bert())
    assert cut.shards == {"embeddings.weight": CLASSES_0, "decoder.bias": CLASSES_0}
    assert cut.backbone_parameters == ("transform.weight", "transform.bias")
    assert [segment.task_graph for segment in cut.segments] == [1, 0, 1]


def test_the_other_head_stays_with_the_backbone() -> None:
    fine, coarse = (cut_of(two_heads(), number) for number in (0, 1))
    assert fine.shards == {"fine.weight": CLASSES_0}
    assert fine.backbone_parameters == ("trunk.weight", "coarse.weight")
    assert fine.segments[1].takes == ("hidden", "coarse")
    assert (fine.backbone_flops, fine.head_flops) == (64.0 + 48.0, 80.0)
    assert coarse.shards == {"coarse.weight": CLASSES_0}
    assert coarse.segments[1].takes == ("hidden", "fine")
    assert (coarse.backbone_flops, coarse.head_flops) == (64.0 + 80.0, 48.0)


def test_a_scalar_is_made_again_from_the_value_it_comes_from() -> None:
    cut = cut_of(auxiliary_loss())
    assert cut.segments[1].takes == ("scores", "hidden")
    assert {"balance", "scaled"} <= set(cut.segments[1].operations)
    assert ("balance", "scores", "gather") in casts_of(cut, 1)


GRAPHS: dict[str, Callable[[], ModelProfile]] = {
    "gpt": gpt,
    "gpt_tied": lambda: gpt(tied=True),
    "classifier": classifier,
    "plain_classifier": lambda: classifier(batch_norm=False),
    "conv1d": conv1d_head,
    "transposed": transposed_head,
    "bert": bert,
    "two_heads": two_heads,
    "auxiliary_loss": auxiliary_loss,
}


def drawn(graph: OperationGraph, samples: int) -> dict[str, Array]:
    """Inputs, parameters and buffers, from one seed; every label is below any number of classes."""
    generator = np.random.default_rng(0)
    values: dict[str, Array] = {}
    for op in graph:
        if op.target in ("input", "parameter", "buffer"):
            shape = [size.at(samples) for size in op.shape or ()]
            values[op.name] = (
                generator.integers(0, 6, shape)
                if op.dtype == "int64"
                else generator.standard_normal(shape)
            )
    if "labels" in values and values["labels"].ndim == 2:
        values["labels"][0, :2] = -100  # unmasked targets are unlike samples
    return values


@pytest.mark.parametrize("samples", [(2, 3), (1, 4, 2), (3,)])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_pieces_make_the_whole_loss(name: str, samples: tuple[int, ...]) -> None:
    """Uneven samples and classes; every rank ends with the loss of the whole batch."""
    profile = GRAPHS[name]()
    head, graph = find_heads(profile)[0], profile.graph
    assert graph is not None
    first = [1, 3][: len(samples) - 1]
    ranks = Ranks({"batch": samples, "classes": (*first, head.classes - sum(first))})
    values = drawn(graph, sum(samples))
    whole = run_whole(graph, values)["loss"]
    pieces = run_cut(graph, cut_head(profile, head), values, ranks)["loss"]
    assert len(pieces) == len(samples)
    np.testing.assert_allclose(pieces, whole, rtol=1e-9)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_parameter_is_held_by_one_task_graph(name: str) -> None:
    profile = GRAPHS[name]()
    cut = cut_of(profile)
    held = [*cut.backbone_parameters, *cut.shards]
    assert sorted(held) == sorted(p.path for p in profile.parameters)


@pytest.mark.parametrize("name", GRAPHS)
def test_segments_take_what_earlier_ones_give(name: str) -> None:
    profile = GRAPHS[name]()
    graph = profile.graph
    assert graph is not None
    given: set[str] = set()
    for segment in cut_of(profile).segments:
        made = set(segment.operations) | set(segment.takes)
        assert set(segment.takes) <= given
        assert set(segment.gives) <= made
        assert all(set(graph[x].inputs) <= made for x in segment.operations)
        assert list(segment.operations) == [
            op.name for op in graph if op.name in segment.operations
        ]
        given |= set(segment.gives)
    assert "loss" in given


def labelled() -> Sketch:
    """A trunk `hidden` [batch, 4] and a head's weight [10, 4], with labels."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("head.weight", "10 4")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.call("hidden", "linear.default", "features", "trunk_weight", shape="B 4", module="trunk")
    return s


def ended(s: Sketch, logits: str = "logits") -> ModelProfile:
    s.call("loss", "cross_entropy_loss.default", logits, "labels", shape="")
    return s.profile("refused", "loss")


def logits(s: Sketch, features: str = "hidden") -> Sketch:
    s.call("logits", "linear.default", features, "head_weight", shape="B 10", module="head")
    return s


def loss_elsewhere() -> ModelProfile:
    s = logits(labelled())
    return ended(s, "hidden")


def read_by_another_loss() -> ModelProfile:
    """A penalty on the head's weight, which needs all of it."""
    s = logits(labelled())
    s.call("penalty", "norm.default", "head_weight", shape="")
    s.call("task", "cross_entropy_loss.default", "logits", "labels", shape="")
    s.call("loss", "add.Tensor", "task", "penalty", shape="")
    return s.profile("penalised", "loss")


def looked_up_late() -> ModelProfile:
    """The tied embedding is looked up with indices that the backbone makes."""
    s = labelled()
    s.call("chosen", "argmax.default", "hidden", -1, shape="B", dtype="int64")
    s.call("again", "embedding.default", "head_weight", "chosen", shape="B 4", module="memory")
    s.call("sum", "add.Tensor", "hidden", "again", shape="B 4")
    return ended(logits(s, "sum"))


def embedding_skips_the_backbone() -> ModelProfile:
    s = labelled()
    s.call("embedding", "embedding.default", "head_weight", "labels", shape="B 4")
    s.call("deep", "linear.default", "embedding", "trunk_weight", shape="B 4")
    logits(s, "deep")
    s.call("penalty", "mean.default", "embedding", shape="")
    s.call("task", "cross_entropy_loss.default", "logits", "labels", shape="")
    s.call("loss", "add.Tensor", "task", "penalty", shape="")
    return s.profile("skipping", "loss")


def nothing_before() -> ModelProfile:
    s = Sketch()
    s.parameter("head.weight", "10 4")
    s.input("features", "B 4", "float32")
    s.input("labels", "B")
    return ended(logits(s, "features"))


def transposed_batch() -> ModelProfile:
    s = labelled()
    s.call("turned", "softmax.int", "hidden", 0, shape="4 B")
    s.call("logits", "linear.default", "turned", "head_weight", shape="4 10", module="head")
    return ended(s)


def bias_shared_with_the_backbone() -> ModelProfile:
    """Tied under another name, as two nodes of one parameter."""
    s = labelled()
    s.parameter("first.scale", "10")
    s.parameter("second.scale", "10")
    s.call("scaled", "mul.Tensor", "hidden", "first_scale", shape="B 4")
    logits(s, "scaled")
    s.call("biased", "add.Tensor", "logits", "second_scale", shape="B 10")
    s.call("loss", "cross_entropy_loss.default", "biased", "labels", shape="")
    return s.profile("shared", "loss", tied={"second.scale": "first.scale"})


def temperature() -> ModelProfile:
    """A learned scalar that scales the logits has no classes to be cut along."""
    s = labelled()
    s.parameter("temperature", "")
    logits(s)
    s.call("scaled", "mul.Tensor", "logits", "temperature", shape="B 10")
    return ended(s, "scaled")


def bias_used_twice() -> ModelProfile:
    """Added to the logits, where it is cut, and penalised as a whole."""
    s = labelled()
    s.parameter("bias", "10")
    logits(s)
    s.call("biased", "add.Tensor", "logits", "bias", shape="B 10")
    s.call("penalty", "norm.default", "bias", shape="")
    s.call("task", "cross_entropy_loss.default", "biased", "labels", shape="")
    s.call("loss", "add.Tensor", "task", "penalty", shape="")
    return s.profile("biased", "loss")


def bias_broadcast_two_ways() -> ModelProfile:
    """Along the classes of the logits, and across them."""
    s = labelled()
    s.parameter("bias", "10")
    logits(s)
    s.call("biased", "add.Tensor", "logits", "bias", shape="B 10")
    s.call("column", "unsqueeze.default", "logits", -1, shape="B 10 1")
    s.call("table", "mul.Tensor", "column", "bias", shape="B 10 10")
    s.call("penalty", "mean.default", "table", shape="")
    s.call("task", "cross_entropy_loss.default", "biased", "labels", shape="")
    s.call("loss", "add.Tensor", "task", "penalty", shape="")
    return s.profile("broadcast", "loss")


HEAD = Head("logits", "head.weight", 0, 10, "head")


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (loss_elsewhere(), "the loss does not come from it"),
        (head_read_elsewhere(), "its weight is also read by centre (mean)"),
        (looked_up_late(), "its weight is also read by memory (again)"),
        (
            embedding_skips_the_backbone(),
            "the embedding it is tied to is read after the backbone as well",
        ),
        (nothing_before(), "nothing before it has a parameter to copy"),
        (
            transposed_batch(),
            "the value turned that crosses to it has no batch dimension first",
        ),
        (
            bias_shared_with_the_backbone(),
            "the backbone reads its parameter first.scale as well",
        ),
        (temperature(), "its parameter temperature cannot be cut along the classes"),
        (read_by_another_loss(), "its parameter head.weight has no cut that fits all its uses"),
        (bias_broadcast_two_ways(), "its parameter bias cannot be cut along the classes"),
        (bias_used_twice(), "its parameter bias has no cut that fits all its uses"),
        (
            auxiliary_loss(experts="3B"),
            "the value scores that crosses to it has no batch dimension first",
        ),
    ],
)
def test_each_reason_to_refuse(profile: ModelProfile, reason: str) -> None:
    with pytest.raises(CutRefused) as refused:
        cut_head(profile, HEAD)
    assert str(refused.value) == reason


def test_a_reader_without_a_module_is_the_model_itself() -> None:
    s = labelled()
    s.call("rows", "mean.dim", "head_weight", (0,), shape="4")
    s.call("moved", "sub.Tensor", "hidden", "rows", shape="B 4")
    with pytest.raises(CutRefused, match=r"^its weight is also read by the model itself \(rows\)$"):
        cut_head(ended(logits(s, "moved")), HEAD)


def counting(*, in_the_backbone: bool) -> ModelProfile:
    """A head whose logits are divided by a counter that is moved afterwards, which the backbone
    reads as well or not."""
    s = Sketch()
    s.parameter("trunk.weight", "4 8")
    s.parameter("head.weight", "12 4")
    s.buffer("calls", "")
    s.input("features", "B 8", "float32")
    s.input("labels", "B")
    s.call("scaled", "mul.Tensor", "features", "calls" if in_the_backbone else 2, shape="B 8")
    s.call("hidden", "linear.default", "scaled", "trunk_weight", shape="B 4", module="trunk")
    s.call("logits", "linear.default", "hidden", "head_weight", shape="B 12", module="head")
    s.call("divided", "div.Tensor", "logits", "calls", shape="B 12")
    s.call("moved", "add_.Tensor", "calls", 1, shape="")
    s.call("loss", "cross_entropy_loss.default", "divided", "labels", shape="")
    return s.profile("counting", "loss")


def test_a_counter_is_moved_where_it_is_read() -> None:
    backbone, head = cut_of(counting(in_the_backbone=False)).segments
    assert "moved" not in backbone.operations
    assert head.operations.index("moved") > head.operations.index("divided")


def test_a_counter_that_both_sides_read_is_not_torn() -> None:
    with pytest.raises(CutRefused, match="changes the buffer calls, which the backbone reads"):
        cut_of(counting(in_the_backbone=True))
