"""An output projection beside copies: what is cut of it, what runs on the samples of all, and that
the pieces make the whole, in NumPy, of whatever reads its weight or its logits besides."""

from collections.abc import Callable

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
from tests.unit.plan_requests import shipped, training
from tests.unit.spmd import Ranks, drawn

from whale_train.errors import PlanError
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import CPU_PROCESS, Cluster, Device, Link, Node
from whale_train.strategies.partition.split_parts import SplitParts
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.stages.chunks import chunked
from whale_train.strategies.stages.placement import PlanningContext, StageChunk, form_of


def cpus(count: int) -> Cluster:
    rates = dict.fromkeys(("fp32", "bf16"), 1e12)
    link = Link("link", 1e10, 1e-6)
    return Cluster("cpus", (Node((Device(CPU_PROCESS, rates, 1e12, 1e11),) * count, link),), link)


def head_of(profile: ModelProfile, devices: int = 2) -> StageChunk:
    """The one chunk of a model under `hybrid_split_dp`. Raises PlanError where it has none."""
    strategy, cluster, asked = shipped("hybrid_split_dp"), cpus(devices), training(8)
    form = form_of(strategy, cluster, asked, [])
    assert form is not None
    (chunk,) = chunked(
        PlanningContext(strategy, cluster, ModelAnalysis(profile, "fp32"), asked, form)
    ).chunks
    assert chunk.beside is not None
    return chunk


@pytest.mark.parametrize(
    ("profile", "head", "cut"),
    [
        (gpt(), "lm_head.weight", {}),
        (gpt(tied=True), "token.weight", {}),
        (classifier(), "head.weight", {"head.bias": 0}),
        (conv1d_head(), "head.weight", {"head.bias": 0}),
        (transposed_head(), "classes", {}),
        (bert(), "embeddings.weight", {"decoder.bias": 0}),
        (two_heads(), "fine.weight", {}),
    ],
)
def test_the_classes_are_cut_and_what_is_added_to_them(
    profile: ModelProfile, head: str, cut: dict[str, int]
) -> None:
    chunk = head_of(profile)
    assert chunk.head is not None
    assert chunk.head.weight == head
    shards = {path: shard.dim for path, shard in chunk.shards.items()}
    assert shards == {head: chunk.head.dim, **cut}
    assert chunk.axes == (head,)
    assert chunk.sharded is not None
    assert chunk.sharded.axes == {head: chunk.head.classes}


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
    s.parameter("deep.weight", "4 4")
    s.call("deep", "linear.default", "embedding", "deep_weight", shape="B 4")
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


def bias_shared_with_the_backbone() -> ModelProfile:
    """Tied under another name, as two nodes of one parameter."""
    s = Sketch()
    for path, shape in (
        *(("first.scale", "10"), ("trunk.weight", "4 10")),
        *(("head.weight", "10 4"), ("second.scale", "10")),
    ):
        s.parameter(path, shape)
    s.input("features", "B 10", "float32")
    s.input("labels", "B")
    s.call("scaled", "mul.Tensor", "features", "first_scale", shape="B 10")
    s.call("hidden", "linear.default", "scaled", "trunk_weight", shape="B 4")
    logits(s)
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


GRAPHS: dict[str, Callable[[], ModelProfile]] = {
    "gpt": gpt,
    "gpt_tied": lambda: gpt(tied=True),
    "classifier": lambda: classifier(batch_norm=False),
    "conv1d": conv1d_head,
    "transposed": transposed_head,
    "bert": bert,
    "two_heads": two_heads,
    "auxiliary_loss": auxiliary_loss,
    "auxiliary_loss of rows": lambda: auxiliary_loss(experts="3B"),
    "penalised": read_by_another_loss,
    "looked up late": looked_up_late,
    "skips the backbone": embedding_skips_the_backbone,
    "nothing before": nothing_before,
    "shared with the backbone": bias_shared_with_the_backbone,
    "temperature": temperature,
    "bias penalised": bias_used_twice,
    "bias two ways": bias_broadcast_two_ways,
}


@pytest.mark.parametrize("samples", [(2, 3), (1, 4, 2)])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_pieces_make_the_whole(name: str, samples: tuple[int, ...]) -> None:
    """Uneven samples and classes."""
    profile = GRAPHS[name]()
    chunk = head_of(profile, len(samples))
    assert profile.graph is not None
    assert chunk.sharded is not None
    assert chunk.beside is not None
    first = [1, 3][: len(samples) - 1]
    axes = {axis: (*first, units - sum(first)) for axis, units in chunk.sharded.axes.items()}
    values = drawn(profile.graph, sum(samples))
    whole = spmd.run_whole(profile.graph, values)
    parts = SplitParts(chunk.beside, chunk.sharded)
    found = spmd.run_parts(profile.graph, parts, values, Ranks({"batch": samples, **axes}))
    assert found
    for value, pieces in found.items():
        np.testing.assert_allclose(pieces, whole[value], rtol=1e-9, err_msg=value)


def test_a_projection_that_the_loss_does_not_come_from_is_no_head() -> None:
    with pytest.raises(PlanError, match="finds no output projection in refused"):
        head_of(loss_elsewhere())


def test_a_counter_is_moved_after_the_logits_were_divided_by_it() -> None:
    chunk = head_of(counting(in_the_backbone=True))
    assert chunk.beside is not None
    assert {"divided", "loss"} <= chunk.beside
    order = chunk.slice.operations
    assert order.index("moved") > order.index("divided")
