"""The layout rules against NumPy: what they say, carried out on pieces, is the whole."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit import spmd
from tests.unit.operation_graphs import END, one_operation
from tests.unit.spmd import Ranks

from whale_train.strategies.cut import Segment
from whale_train.strategies.layouts import ENTERED, Assignment, Layout, R, Shard, assign
from whale_train.strategies.operations import OperationGraph

S0, S1 = Shard(0, "classes"), Shard(1, "classes")
S0x3 = Shard(0, "classes", 3)


def run(graph: OperationGraph, layouts: Mapping[str, Layout], counts: tuple[int, ...]) -> None:
    """The operation on every rank's pieces, put together, is the operation on the whole."""
    names = tuple(op.name for op in graph if op.name != "output")
    region = {"result", *(name for name in names if name not in layouts)}
    assignment = assign(graph, region, layouts)
    drawn = np.random.default_rng(0)
    whole = {
        op.name: drawn.standard_normal([size.fixed for size in op.shape or ()])
        for op in graph
        if op.target == "input"
    }
    ranks = Ranks({"classes": counts})
    segment = Segment(0, names, (), (), assignment)
    held = {name: ranks.lay(whole[name], assignment.layouts.get(name, R)) for name in whole}
    found = spmd.run_region(graph, segment, held, ranks)["result"]
    joined = ranks.join(found, assignment.layouts["result"])
    np.testing.assert_allclose(joined, spmd.run_whole(graph, whole)["result"], rtol=1e-9)
    gradients_are_whole(graph, assignment)


def gradients_are_whole(graph: OperationGraph, assignment: Assignment) -> None:
    """Work that is sharded gives only a part of the gradient of a whole input, so that must
    enter; work that every rank repeats gives all of it, so nothing may enter there."""
    targets = {(cast.user, cast.value): cast.target for cast in assignment.casts}
    for operation in graph:
        if operation.name not in assignment.layouts or not operation.inputs:
            continue
        sharded = isinstance(assignment.layouts[operation.name], Shard)
        for name in operation.inputs:
            layout = targets.get((operation.name, name), assignment.layouts.get(name, R))
            if graph[name].shape is None or operation.name in assignment.becomes:
                continue
            assert (layout == ENTERED or isinstance(layout, Shard)) == sharded, operation


@st.composite
def sharded_tensors(draw: st.DrawFn) -> tuple[list[int], Shard, tuple[int, ...]]:
    """Extents, the layout, and how many each rank holds of what is cut (perhaps none)."""
    counts = draw(st.lists(st.integers(0, 3), min_size=2, max_size=3).filter(any))
    outer = draw(st.integers(1, 2))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = outer * sum(counts)
    return shape, Shard(dim, "classes", outer), tuple(counts)


def text(shape: Iterable[int]) -> str:
    return " ".join(map(str, shape))


def merged(draw: st.DrawFn, shape: list[int]) -> list[int]:
    """`shape` with neighbours merged and factors split off: any view of it."""
    groups: list[list[int]] = [[]]
    for extent in shape:
        if draw(st.booleans()):
            groups.append([])
        divisors = [d for d in range(1, extent + 1) if extent % d == 0]
        first = draw(st.sampled_from(divisors))
        if draw(st.booleans()):
            groups[-1].append(first)
            groups.append([extent // first])
        else:
            groups[-1].append(extent)
    return [prod(group) for group in groups]


@st.composite
def shape_changes(draw: st.DrawFn) -> tuple[OperationGraph, Shard, tuple[int, ...]]:
    shape, layout, counts = draw(sharded_tensors())
    rank = len(shape)
    dims = st.integers(-rank, rank - 1)
    dim = draw(dims)
    after = list(shape)
    match draw(st.sampled_from(["view", "transpose", "permute", "slice", "select", "unsqueeze"])):
        case "view":
            after = merged(draw, shape)
            call: tuple[str, tuple[object, ...]] = ("view.default", ("x", tuple(after)))
        case "transpose":
            other = draw(dims)
            after[dim], after[other] = after[other], after[dim]
            call = ("transpose.int", ("x", dim, other))
        case "permute":
            order = draw(st.permutations(range(rank)))
            after = [shape[i] for i in order]
            call = ("permute.default", ("x", tuple(order)))
        case "slice":
            start = draw(st.integers(0, shape[dim]))
            stop = draw(st.integers(start, shape[dim]))
            after[dim] = stop - start
            call = ("slice.Tensor", ("x", dim, start, END if stop == shape[dim] else stop))
        case "select":
            index = draw(st.integers(0, shape[dim] - 1))
            del after[dim]
            call = ("select.int", ("x", dim, index))
        case _:
            place = draw(st.integers(-rank - 1, rank))
            after.insert(place % (rank + 1), 1)
            call = ("unsqueeze.default", ("x", place))
    graph = one_operation(*call, {"x": text(shape)}, text(after))
    return graph, layout, counts


@settings(max_examples=150)
@given(shape_changes())
def test_changes_of_shape_on_pieces(case: tuple[OperationGraph, Shard, tuple[int, ...]]) -> None:
    graph, layout, counts = case
    run(graph, {"x": layout}, counts)


@settings(max_examples=80)
@given(sharded_tensors(), st.data())
def test_pointwise_on_pieces(
    case: tuple[list[int], Shard, tuple[int, ...]], data: st.DataObject
) -> None:
    """With another operand that is broadcast in any way, whole or cut alike."""
    shape, layout, counts = case
    kept = data.draw(st.integers(0, len(shape)))
    other = [data.draw(st.sampled_from([1, extent])) for extent in shape[len(shape) - kept :]]
    dim = layout.dim - (len(shape) - kept)
    cut_alike = dim >= 0 and other[dim] == shape[layout.dim] and data.draw(st.booleans())
    graph = one_operation(
        "mul.Tensor", ("x", "y"), {"x": text(shape), "y": text(other)}, text(shape)
    )
    layouts: dict[str, Layout] = {"x": layout}
    layouts["y"] = Shard(dim, "classes", layout.outer) if cut_alike else R
    run(graph, layouts, counts)


@pytest.mark.parametrize("counts", [(5, 7), (12, 0), (1, 8, 3)])
@pytest.mark.parametrize(
    ("operation", "layouts"),
    [
        (("linear.default", ("x", "w", "b"), {"x": "2 3 4", "w": "12 4", "b": "12"}, "2 3 12"),
         {"x": R, "w": S0, "b": R}),
        (("linear.default", ("x", "w", "b"), {"x": "2 3 4", "w": "12 4", "b": "12"}, "2 3 12"),
         {"x": R, "w": S0, "b": S0}),
        (("linear.default", ("x", "w"), {"x": "2 4", "w": "36 4"}, "2 36"), {"x": R, "w": S0x3}),
        (("linear.default", ("x", "w"), {"x": "2 12", "w": "5 12"}, "2 5"), {"x": S1, "w": S1}),
        (("addmm.default", ("b", "x", "w"), {"b": "12", "x": "2 4", "w": "4 12"}, "2 12"),
         {"b": R, "x": R, "w": S1}),
        (("matmul.default", ("x", "w"), {"x": "2 3 4", "w": "4 12"}, "2 3 12"),
         {"x": R, "w": S1}),
        (("mm.default", ("x", "w"), {"x": "2 4", "w": "4 12"}, "2 12"), {"x": R, "w": S1}),
        (("t.default", ("x",), {"x": "12 4"}, "4 12"), {"x": S0}),
        (("softmax.int", ("x", -1), {"x": "3 12"}, "3 12"), {"x": S1}),
    ],
)  # fmt: skip
def test_products_on_pieces(
    operation: tuple[Any, ...], layouts: dict[str, Layout], counts: tuple[int, ...]
) -> None:
    run(one_operation(*operation), layouts, counts)
