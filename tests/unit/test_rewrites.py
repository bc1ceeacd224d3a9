"""Which operations run as one: what stands between them, and who reads their values."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import Sketch

from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.graph.rewrites import RewriteScope

NORM = ("square", "mean", "shifted", "root", "normed", "wide", "y")


def llama_norm() -> OperationGraph:
    """A norm as Llama writes it, between an embedding and a sum."""
    sketch = Sketch()
    ids = sketch.input("ids", "B 3")
    sketch.parameter("table", "8 4")
    sketch.parameter("weight", "4")
    x = sketch.call("x", "embedding.default", "table", ids, shape="B 3 4")
    sketch.call("square", "pow.Tensor_Scalar", x, 2, shape="B 3 4")
    sketch.call("mean", "mean.dim", "square", (-1,), True, shape="B 3 1")
    sketch.call("shifted", "add.Tensor", "mean", 1e-6, shape="B 3 1")
    sketch.call("root", "rsqrt.default", "shifted", shape="B 3 1")
    sketch.call("normed", "mul.Tensor", x, "root", shape="B 3 4")
    sketch.call("wide", "to.dtype", "normed", "torch.float32", shape="B 3 4")
    sketch.call("y", "mul.Tensor", "weight", "wide", shape="B 3 4")
    return sketch.graph(sketch.call("loss", "sum.default", "y", shape=""))


def norms(
    operations: Sequence[str] = (),
    gives: Sequence[str] = (),
    casts: Mapping[tuple[str, str], Hashable] | None = None,
    replaced: Sequence[str] = (),
) -> list[tuple[str, ...]]:
    """The norms of `operations`, by default all of the graph's."""
    graph = llama_norm()
    names = operations or [operation.name for operation in graph]
    scope = RewriteScope(graph, names, gives, casts or {}, replaced)
    return [rewrite.operations for rewrite in scope.rms_norms()]


def test_a_norm_is_its_seven_operations() -> None:
    assert norms() == [NORM]
    assert norms(NORM) == [NORM]
    assert norms(NORM, gives=["y"]) == [NORM]


@pytest.mark.parametrize(
    ("casts", "is_norm"),
    [
        ({("y", "weight"): "reduce"}, True),  # the weight, and what is normalised, may be cast
        ({("square", "x"): "reduce", ("normed", "x"): "reduce"}, True),
        ({("square", "x"): "reduce"}, False),
        ({("square", "x"): "reduce", ("normed", "x"): "gather"}, False),
        ({("shifted", "mean"): "reduce"}, False),  # the mean of a row that is cut
        ({("y", "wide"): "gather"}, False),
    ],
)
def test_what_is_cast_between_its_operations(
    casts: Mapping[tuple[str, str], Hashable], is_norm: bool
) -> None:
    assert norms(casts=casts) == ([NORM] if is_norm else [])


def test_what_others_read_or_replace_is_not_joined() -> None:
    assert norms(gives=["normed"]) == []
    assert norms(replaced=["mean"]) == []
    assert norms(NORM[1:]) == []
    assert norms(NORM[:-1]) == []


KEYS = ("new", "wide", "merged")


def shared_keys(times: int = 2, gqa: bool = False) -> OperationGraph:
    """An attention of four heads, whose keys are its values and are of two."""
    sketch = Sketch()
    x = sketch.input("x", "B 4 3 8", "float32")
    sketch.parameter("keys", "2 3 8")
    sketch.call("of_sample", "expand.default", "keys", (1, 2, 3, 8), shape="1 2 3 8")
    sketch.call("new", "unsqueeze.default", "of_sample", 2, shape="1 2 1 3 8")
    sketch.call("wide", "expand.default", "new", (1, 2, times, 3, 8), shape=f"1 2 {times} 3 8")
    sketch.call("merged", "reshape.default", "wide", (1, 4, 3, 8), shape="1 4 3 8")
    sketch.call(
        *("y", "scaled_dot_product_attention.default", x, "merged", "merged"),
        shape="B 4 3 8",
        kwargs={"enable_gqa": True} if gqa else {},
    )
    return sketch.graph(sketch.call("loss", "sum.default", "y", shape=""))


def grouped(graph: OperationGraph, **between: Any) -> list[tuple[str, ...]]:
    scope = replace(RewriteScope.whole(graph), **between)
    return [rewrite.operations for rewrite in scope.grouped_keys()]


def test_keys_that_are_repeated_for_queries() -> None:
    graph = shared_keys()
    (rewrite,) = RewriteScope.whole(graph).grouped_keys()
    assert rewrite.operations == (*KEYS, *KEYS, "y")
    assert set(rewrite.unmade) == {"merged"}
    assert rewrite.repeated(graph) == {"merged": "of_sample"}
    assert grouped(shared_keys(times=1)) == []
    assert grouped(shared_keys(gqa=True)) == []


@pytest.mark.parametrize(
    ("between", "is_grouped"),
    [
        ({"gives": ["merged"]}, True),
        ({"casts": {("wide", "new"): "reduce"}}, True),  # a key that is put together late
        ({"casts": {("merged", "wide"): "gather"}}, False),
        ({"casts": {("y", "merged"): "gather"}}, False),
        ({"cut": {"wide": 3}}, True),
        ({"cut": {"wide": 1}}, False),  # by heads
        ({"replaced": ["y"]}, False),  # it draws what all members draw
    ],
)
def test_what_stands_between_keys_and_queries(between: Mapping[str, Any], is_grouped: bool) -> None:
    assert bool(grouped(shared_keys(), **between)) == is_grouped
