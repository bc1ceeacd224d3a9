"""Which operations run in another way: what stands between them, and who reads their values."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import Sketch

from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.graph.rewrites import (
    GATHERED_PRODUCTS,
    Rewrite,
    RewriteScope,
    run_order,
)

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


def changes(casts: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], tuple[str, None, None]]:
    """Changes of layout of these kinds."""
    return {key: (kind, None, None) for key, kind in casts.items()}


def norms(
    operations: Sequence[str] = (),
    gives: Sequence[str] = (),
    casts: Mapping[tuple[str, str], str] | None = None,
    replaced: Sequence[str] = (),
) -> list[tuple[str, ...]]:
    """The norms of `operations`, by default all of the graph's."""
    graph = llama_norm()
    names = operations or [operation.name for operation in graph]
    scope = RewriteScope(graph, names, gives, changes(casts or {}), replaced)
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
    casts: Mapping[tuple[str, str], str], is_norm: bool
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
        ({"casts": changes({("wide", "new"): "reduce"})}, True),  # a key that is put together late
        ({"casts": changes({("merged", "wide"): "gather"})}, False),
        ({"casts": changes({("y", "merged"): "gather"})}, False),
        ({"cut": {"wide": 3}}, True),
        ({"cut": {"wide": 1}}, False),  # by heads
        ({"replaced": ["y"]}, False),  # it draws what all members draw
    ],
)
def test_what_stands_between_keys_and_queries(between: Mapping[str, Any], is_grouped: bool) -> None:
    assert bool(grouped(shared_keys(), **between)) == is_grouped


def projections() -> OperationGraph:
    """Two products of one input, the second with its bias first, and a lookup before them."""
    sketch = Sketch()
    ids = sketch.input("ids", "B 3")
    for name, shape in (("table", "8 4"), ("first", "6 4"), ("second", "4 6"), ("bias", "6")):
        sketch.parameter(name, shape)
    x = sketch.call("x", "embedding.default", "table", ids, shape="B 3 4")
    sketch.call("one", "linear.default", x, "first", "bias", shape="B 3 6")
    sketch.call("twice", "mul.Tensor", "bias", 2.0, shape="6")
    sketch.call("other", "addmm.default", "bias", x, "second", shape="B 3 6")
    sketch.call("both", "add.Tensor", "one", "other", shape="B 3 6")
    return sketch.graph(sketch.call("loss", "sum.default", "both", shape=""))


ENTERING = {("one", "x"): "enter", ("other", "x"): "enter"}


@pytest.mark.parametrize(
    ("casts", "joined"),
    [
        (ENTERING, [("one", "other")]),
        (dict.fromkeys(ENTERING, "reduce_enter"), [("one", "other")]),
        ({("other", "x"): "enter"}, [("other",)]),  # the other one reads it as it was
        (ENTERING | {("both", "x"): "enter"}, []),  # read by a sum as well
        (ENTERING | {("", "x"): "enter"}, []),  # or by another segment
        (ENTERING | {("one", "first"): "gather"}, []),
        (ENTERING | {("other", "bias"): "repeated"}, []),
        (dict.fromkeys(ENTERING, "gather"), []),
        ({}, []),
    ],
)
def test_products_that_alone_read_what_enters(
    casts: Mapping[tuple[str, str], str], joined: list[tuple[str, ...]]
) -> None:
    graph = projections()
    scope = replace(RewriteScope.whole(graph), casts=changes(casts))
    rewrites = list(scope.joined_products())
    assert [rewrite.operations for rewrite in rewrites] == joined
    for rewrite in rewrites:
        assert rewrite.reads_as_one(graph) == {(name, "x") for name in rewrite.operations}
        assert not rewrite.gathers_again(graph)


def test_products_that_alone_read_gathered_tokens() -> None:
    graph = projections()
    casts = changes(dict.fromkeys(ENTERING, "gather_enter"))
    scope = replace(RewriteScope.whole(graph), casts=casts, gathered=list(ENTERING))
    (rewrite,) = scope.joined_products()
    assert (rewrite.kind, rewrite.operations) == (GATHERED_PRODUCTS, ("one", "other"))
    assert rewrite.reads_as_one(graph) == rewrite.gathers_again(graph) == set(ENTERING)
    others = replace(scope, gathered=())  # such as rows of a batch, for a split head
    assert not list(others.joined_products())


@pytest.mark.parametrize(
    ("between", "own"),
    [
        ({}, ["x", "one", "other"]),
        ({"replaced": ["x"]}, ["one", "other"]),  # a table whose rows are split
        ({"casts": changes({("one", "first"): "gather"})}, ["x", "other"]),
        ({"casts": changes({("one", "x"): "enter", ("one", "bias"): "repeated"})},
         ["x", "one", "other"]),
    ],
)  # fmt: skip
def test_operations_that_read_a_weight_as_it_is(between: Mapping[str, Any], own: list[str]) -> None:
    assert list(replace(RewriteScope.whole(projections()), **between).own_gradients()) == own


def mixture(first: bool, beside: str = "linear.default", writes: bool = False) -> OperationGraph:
    """A mixture's rows and a shared expert of one layer, which is computed `first` or last."""
    sketch = Sketch()
    x = sketch.input("x", "B 4", "float32")
    sketch.parameter("weight", "4 4")
    layer = {"module": "layers.0"}

    def shared() -> None:
        sketch.call("product", beside, x, "weight", shape="B 4", **layer)
        sketch.call("active", "silu.default", "product", shape="B 4", **layer)

    if first:
        shared()
    sketch.call("rows", "tanh.default", x, shape="B 4", **layer)
    target = "mul_.Tensor" if writes else "mul.Tensor"
    sketch.call("scaled", target, "rows", 2.0, shape="B 4", **layer)
    if not first:
        shared()
    sketch.call("both", "add.Tensor", "scaled", "active", shape="B 4", **layer)
    return sketch.graph(sketch.call("loss", "sum.default", "both", shape=""))


def overlapped(graph: OperationGraph) -> list[Rewrite]:
    casts = changes({("scaled", "rows"): "combine"})
    return list(replace(RewriteScope.whole(graph), casts=casts).overlapped_rows())


@pytest.mark.parametrize("first", [True, False])
def test_products_run_while_rows_come(first: bool) -> None:
    graph = mixture(first)
    (rewrite,) = overlapped(graph)
    assert rewrite.operations == ("rows", "product", "active")
    order = run_order(graph, [operation.name for operation in graph], [rewrite])
    assert order[-7:] == ("rows", "product", "active", "scaled", "both", "loss", "output")


def test_rows_are_waited_for_without_products_or_in_a_fixed_order() -> None:
    assert not overlapped(mixture(first=True, beside="mul.Tensor"))
    assert not overlapped(mixture(first=True, writes=True))
    without = [name for name in mixture(first=True).by_name if name != "both"]
    scope = RewriteScope.whole(mixture(first=True))
    casts = changes({("scaled", "rows"): "combine"})
    assert not list(replace(scope, operations=without, casts=casts).overlapped_rows())
