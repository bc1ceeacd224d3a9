"""The layout rules against NumPy: what they say, carried out on pieces, is the whole."""

from collections.abc import Iterable, Mapping
from math import gcd, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit import spmd
from tests.unit.operation_graphs import END, one_operation
from tests.unit.spmd import Ranks
from tests.unit.test_layouts import trained

from whale_train.strategies.graph.operation_graph import OperationGraph, Size
from whale_train.strategies.layouts.propagation import (
    ENTERED,
    Assignment,
    Axes,
    Layout,
    P,
    R,
    Shard,
    assign,
)
from whale_train.strategies.layouts.segment import Segment
from whale_train.strategies.layouts.types import MinUnits, shard

S0, S1 = Shard(0, "classes"), Shard(1, "classes")
S0x3 = Shard(0, "classes", 3)


def run(
    graph: OperationGraph,
    layouts: Mapping[str, Layout],
    counts: tuple[int, ...],
    units: int = 0,
) -> None:
    """The operation on every rank's pieces, put together, is the operation on the whole. `units`
    are those of an axis "fine" of explicit pieces, of which each rank gets its part of `counts`."""
    names = tuple(op.name for op in graph if op.name != "output")
    region = {"result", *(name for name in names if name not in layouts)}
    axes = Axes({"fine": units}, fineness=MinUnits(len(counts))) if units else None
    assignment = assign(trained(graph), region, layouts, axes=axes)
    drawn = np.random.default_rng(0)
    whole = {
        op.name: drawn.standard_normal([size.fixed for size in op.shape or ()])
        for op in graph
        if op.target == "input"
    }
    dealt = {"fine": dealt_out(assignment.units["fine"], counts)} if units else {}
    ranks = Ranks({"classes": counts, **dealt})
    segment = Segment(0, names, (), (), assignment)
    held = {name: ranks.lay(whole[name], assignment.layouts.get(name, R)) for name in whole}
    found = spmd.run_region(graph, segment, held, ranks)["result"]
    joined = ranks.join(found, assignment.layouts["result"])
    np.testing.assert_allclose(joined, spmd.run_whole(graph, whole)["result"], rtol=1e-9)
    gradients_are_whole(graph, assignment)


def dealt_out(units: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """One unit each, and the rest one by one in turns of `counts`."""
    mine = [1] * len(counts)
    turns = [rank for rank, count in enumerate(counts) for _ in range(count)]
    for unit in range(units - len(counts)):
        mine[turns[unit % len(turns)]] += 1
    return tuple(mine)


def gradients_are_whole(graph: OperationGraph, assignment: Assignment) -> None:
    """Work that is sharded gives only a part of the gradient of a whole input, so that must
    enter; work that every rank repeats gives all of it, so nothing may enter there."""
    targets = {(cast.user, cast.value): cast.target for cast in assignment.casts}
    for operation in graph:
        if operation.name not in assignment.layouts or not operation.inputs:
            continue
        gives = assignment.layouts[operation.name]
        for name in operation.inputs:
            layout = targets.get((operation.name, name), assignment.layouts.get(name, R))
            if graph[name].shape is None or operation.name in assignment.becomes:
                continue
            apart = layout in (ENTERED, P) or isinstance(layout, Shard)
            assert apart == (gives != R), operation


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


@settings(max_examples=examples(150))
@given(shape_changes())
def test_changes_of_shape_on_pieces(case: tuple[OperationGraph, Shard, tuple[int, ...]]) -> None:
    graph, layout, counts = case
    run(graph, {"x": layout}, counts)


@settings(max_examples=examples(80))
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


@st.composite
def pieces_and_views(draw: st.DrawFn) -> tuple[OperationGraph, Shard, tuple[int, ...]]:
    """A tensor cut in explicit pieces, and any view of it."""
    counts = draw(st.lists(st.integers(0, 3), min_size=2, max_size=3).filter(any))
    each = draw(st.sampled_from([2, 3, 4, 6]).filter(lambda x: x >= len(counts)))
    pieces = [each * draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 2)))]
    layout = shard(0, "fine", pieces, draw(st.integers(1, 2)))
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(shape)))
    extent = sum(layout.pieces) * int(str(layout.outer))
    shape.insert(dim, extent)
    after = merged(draw, shape)
    graph = one_operation("view.default", ("x", tuple(after)), {"x": text(shape)}, text(after))
    return graph, Shard(dim, "fine", layout.outer, layout.pieces), tuple(counts)


@settings(max_examples=examples(200))
@given(pieces_and_views())
def test_views_of_pieces(case: tuple[OperationGraph, Shard, tuple[int, ...]]) -> None:
    graph, layout, counts = case
    run(graph, {"x": layout}, counts, units=gcd(*layout.pieces))


@pytest.mark.parametrize(
    ("source", "target", "layout", "units", "found"),
    [
        # heads of 4 out of a width of 24; a fused one of three; grouped ones of unequal parts
        ("2 24", (2, 6, 4), Shard(1, "fine", 1, (24,)), 24, (Shard(1, "fine", 1, (6,)), 6)),
        ("2 24", (2, 3, 8), Shard(1, "fine", 3, (8,)), 8, (Shard(2, "fine", 1, (8,)), 8)),
        ("2 24", (2, 12, 2), Shard(1, "fine", 3, (8,)), 8, (Shard(1, "fine", 3, (4,)), 4)),
        ("2 24", (2, 6, 4), Shard(1, "fine", 1, (16, 8)), 8, (Shard(1, "fine", 1, (4, 2)), 2)),
        ("2 6 4", (2, 24), Shard(1, "fine", 1, (6,)), 6, (Shard(1, "fine", 1, (24,)), 6)),
        ("2 6 4", (12, 4), Shard(1, "fine", 1, (6,)), 6, (Shard(0, "fine", 2, (6,)), 6)),
        # one index of the view would hold parts of two pieces, or of two units' ranks
        ("2 24", (2, 3, 8), Shard(1, "fine", 2, (12,)), 12, (R, 12)),
        ("2 30", (2, 3, 10), Shard(1, "fine", 1, (20, 10)), 10, (R, 10)),
    ],
)
def test_what_a_view_makes_of_pieces(
    source: str, target: tuple[int, ...], layout: Shard, units: int, found: tuple[Layout, int]
) -> None:
    graph = one_operation("view.default", ("x", target), {"x": source}, text(target))
    axes = Axes({"fine": units}, fineness=MinUnits(2))
    assignment = assign(graph, {"result"}, {"x": layout}, axes=axes)
    assert (assignment.layouts["result"], assignment.units["fine"]) == found


def test_a_batch_of_heads() -> None:
    """[batch, heads, ..] as [batch * heads, ..]: how many repetitions there are, the batch says."""
    graph = one_operation("view.default", ("x", (-1, 3)), {"x": "B 6 3"}, "6B 3")
    axes = Axes({"fine": 6}, fineness=MinUnits(2))
    laid = assign(graph, {"result"}, {"x": Shard(1, "fine", 1, (6,))}, axes=axes).layouts
    assert laid["result"] == Shard(0, "fine", Size(0, 1), (6,))
    back = one_operation("view.default", ("x", (-1, 6, 3)), {"x": "6B 3"}, "B 6 3")
    laid = assign(back, {"result"}, {"x": laid["result"]}, axes=axes).layouts
    assert laid["result"] == Shard(1, "fine", 1, (6,))
