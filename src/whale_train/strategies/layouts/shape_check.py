"""The check that the shapes of every rank agree in every operation, made before ranks start.

The layouts of a region and the intervals along its axes determine each member's local shapes. This
file recomputes them from the plan alone and compares them operation by operation; it assigns
nothing.
"""

from collections.abc import Mapping, Sequence

from whale_train.strategies.graph.operation_graph import Operation, OperationGraph, Ref, Shape, Size
from whale_train.strategies.layouts.propagation import (
    RULES,
    Assignment,
    Interval,
    Layout,
    R,
    Shard,
    local_extent,
    pointwise,
    reshape,
)
from whale_train.strategies.layouts.rules.matmul import addmm, linear, matmul
from whale_train.strategies.layouts.rules.slicing import cat
from whale_train.strategies.layouts.rules.views import permute, transpose
from whale_train.strategies.layouts.types import flat_pieces, product


def shape_check(
    graph: OperationGraph, assignment: Assignment, axes: Mapping[str, Sequence[Interval]]
) -> tuple[str, ...]:
    """Return the operations whose shapes disagree, one sentence each; () where all agree.

    A sentence names the operation and the member (the index in its shard group). `axes` are the
    intervals of each axis, in units.
    """
    faults = [sentence for axis, intervals in axes.items() for sentence in _tiled(axis, intervals)]
    for name, layout in assignment.layouts.items():
        faults += _laid(graph[name], layout, axes)
    if faults:
        return tuple(faults)
    arrives = {(cast.user, cast.value): cast.target for cast in assignment.casts}
    read = (to for (user, _), to in arrives.items() if user in assignment.layouts)
    laid = (*assignment.layouts.values(), *read)
    cuts = {layout.axis for layout in laid if isinstance(layout, Shard)}
    members = _unlike([axes[axis] for axis in sorted(cuts)])
    for operation in graph:
        if operation.name not in assignment.layouts or operation.name in assignment.becomes:
            continue
        for member in members:
            shapes = {}
            for name in operation.inputs:
                layout = arrives.get((operation.name, name), assignment.layouts.get(name, R))
                shapes[name] = local_shape(graph[name], layout, axes, member)
            result_shape = local_shape(operation, assignment.layouts[operation.name], axes, member)
            if result_shape is not None and (
                sentence := _disagreement(operation, shapes, result_shape)
            ):
                where = f"{operation.name} ({operation.target}) on member {member}"
                faults.append(f"{where}: {sentence}")
    return tuple(faults)


def _unlike(axes: Sequence[Sequence[Interval]]) -> list[int]:
    """Return one member for each distinct set of local shapes. Members with intervals of equal
    lengths on every axis have equal shapes."""
    members: dict[tuple[int, ...], int] = {}
    for member in range(len(axes[0]) if axes else 1):
        held = tuple(stop - start for start, stop in (axis[member] for axis in axes))
        members.setdefault(held, member)
    return list(members.values())


def local_shape(
    operation: Operation, layout: Layout, axes: Mapping[str, Sequence[Interval]], member: int
) -> Shape | None:
    """Return the local shape of a member's part of a value; None where the value is no tensor."""
    shape = operation.shape
    if shape is None or not isinstance(layout, Shard):
        return shape
    extent = local_extent(layout, axes[layout.axis], member)
    if not layout.pieces and shape[layout.dim].per_sample:  # samples: counted as they are dealt
        extent = Size(0, extent.fixed)
    return tuple(extent if dim == layout.dim else size for dim, size in enumerate(shape))


def _tiled(axis: str, intervals: Sequence[Interval]) -> list[str]:
    """Return a fault if the intervals of an axis do not lie end to end from 0."""
    ends = [stop for _, stop in intervals]
    if [start for start, _ in intervals] != [0, *ends[:-1]]:
        return [f"the intervals of {axis} leave a gap or overlap: {tuple(intervals)}"]
    return []


def _laid(
    operation: Operation, layout: Layout, axes: Mapping[str, Sequence[Interval]]
) -> list[str]:
    """Return a fault if a value is sharded along an axis without intervals, or into pieces that the
    units do not divide or that do not add up to its extent."""
    shape = operation.shape
    if not isinstance(layout, Shard) or shape is None:
        return []
    if layout.axis not in axes:
        return [f"{operation.name} is cut along {layout.axis}, which nobody deals out"]
    units, pieces = axes[layout.axis][-1][1], layout.pieces
    if any(piece % units for piece in pieces):
        return [f"{operation.name} has pieces of {pieces}, which {units} units do not divide"]
    flat = flat_pieces(layout)
    if flat is not None and Size(sum(flat)) != shape[layout.dim]:
        return [f"{operation.name} is {shape[layout.dim]} long, and its pieces {sum(flat)}"]
    return []


def _disagreement(
    operation: Operation, shapes: Mapping[str, Shape | None], result_shape: Shape
) -> str:
    """Return the reason why the operands do not give a result of `result_shape`; '' where they do,
    and for operations whose shapes this file does not know."""
    given = [shapes[x.name] for x in operation.args if isinstance(x, Ref)]
    operands = [shape for shape in given if shape is not None]
    rule = RULES.get(operation.target)
    if rule is pointwise and operands and operation.target != "aten.type_as.default":
        expected = _broadcast(operands)
        return (
            ""
            if expected == result_shape
            else f"{_text(operands)} give {_one(expected)}, {_not(result_shape)}"
        )
    if rule is reshape and operands and product(operands[0]) != product(result_shape):
        return f"{_one(operands[0])} has not as many elements as {_one(result_shape)}"
    if rule in (transpose, permute) and operands and sorted(operands[0]) != sorted(result_shape):
        return f"{_one(operands[0])} is no permutation of {_one(result_shape)}"
    if rule in (linear, addmm, matmul):
        return _product(operation, shapes, result_shape)
    if rule is cat:
        return _joined(operation, shapes, result_shape)
    return ""


def _product(operation: Operation, shapes: Mapping[str, Shape | None], result_shape: Shape) -> str:
    first = 1 if RULES.get(operation.target) is addmm else 0
    names = [x.name for x in operation.args[first : first + 2] if isinstance(x, Ref)]
    left, right = (shapes[name] or () for name in names)
    inner, outer = (-1, -2) if RULES.get(operation.target) is linear else (-2, -1)
    if left[-1] != right[inner]:
        return f"{_one(left)} and {_one(right)} share no inner dimension"
    if result_shape[-1] != right[outer] or result_shape[-2:-1] != left[-2:-1]:
        return f"{_one(left)} times {_one(right)} is not {_one(result_shape)}"
    return ""


def _joined(operation: Operation, shapes: Mapping[str, Shape | None], result_shape: Shape) -> str:
    parts = operation.args[0]
    assert isinstance(parts, tuple)
    operands = [shapes[x.name] or () for x in parts if isinstance(x, Ref)]
    dim = operation.args[1] if len(operation.args) > 1 else 0
    assert isinstance(dim, int)
    # An empty tensor of one dimension may be joined to any other.
    of_rank = [shape for shape in operands if len(shape) == len(result_shape)]
    total = Size(sum(x[dim].fixed for x in of_rank), sum(x[dim].per_sample for x in of_rank))
    fits = result_shape[dim] == total and all(
        shape[i] == result_shape[i]
        for shape in of_rank
        for i in range(len(result_shape))
        if i != dim % len(result_shape)
    )
    return "" if fits else f"{_text(of_rank)} end to end are not {_one(result_shape)}"


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape that all `shapes` broadcast to; None where they do not fit."""
    rank = max(len(shape) for shape in shapes)
    extents = []
    for dim in range(-rank, 0):
        sizes = {shape[dim] for shape in shapes if len(shape) >= -dim} - {Size(1)}
        if len(sizes) > 1:
            return None
        extents.append(sizes.pop() if sizes else Size(1))
    return tuple(extents)


def _one(shape: Shape | None) -> str:
    return "nothing" if shape is None else f"[{', '.join(map(str, shape))}]"


def _not(shape: Shape) -> str:
    return f"not {_one(shape)}"


def _text(shapes: Sequence[Shape]) -> str:
    return " and ".join(_one(shape) for shape in shapes)
