"""Candidates for sharding every weight, from which the search of `choose.py` chooses.

A weight is a parameter that a product, a convolution or a table lookup reads, perhaps through a
transpose. Its candidates are its output and input dimensions, its experts or its rows. A fused
weight (several projections in one) is recognised by looking ahead at the operations that split its
result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from whale_train.strategies.graph.operation_graph import Operation, OperationGraph, Ref, Size
from whale_train.strategies.layouts.rule_table import RULES
from whale_train.strategies.layouts.rules.matmul import (
    addmm,
    convolution,
    grouped_mm,
    linear,
    matmul,
    transposed_convolution,
)
from whale_train.strategies.layouts.rules.pointwise import pointwise
from whale_train.strategies.layouts.rules.reductions import cross_entropy, embedding
from whale_train.strategies.layouts.rules.slicing import LISTS, narrow, part_sizes, unbind
from whale_train.strategies.layouts.rules.views import (
    permute,
    reshape,
    reverse,
    select,
    squeeze,
    transpose,
    unsqueeze,
    viewed,
)
from whale_train.strategies.layouts.types import (
    MinUnits,
    RuleInput,
    Shard,
    dimension,
    flat_pieces,
    product,
    shard,
)

_CHAIN = (transpose, reverse, permute)
_MOST_PIECES = 8  # projections fused into one weight; more are heads or experts, not projections
_LOOK_AHEAD = 40  # operations; a fused result is split within a handful of operations


@dataclass(frozen=True)
class WeightSharding:
    """A way to shard a weight.

    pattern: the name of the pattern.
    layout: the layout, along an axis of the weight's own.
    """

    pattern: str
    layout: Shard


@dataclass(frozen=True)
class Weight:
    """A parameter with a choice of patterns.

    path: path of the parameter.
    reader: the operation that first reads it.
    candidates: the ways to shard it, in the order of preference.
    follows: True if the reader can take the weight row-parallel where its other operand is sharded.
        A transpose cannot.
    """

    path: str
    reader: str
    candidates: tuple[WeightSharding, ...]
    follows: bool


def find_weights(
    graph: OperationGraph, region: set[str], parameters: Mapping[str, str], fineness: MinUnits
) -> dict[str, Weight]:
    """Return the parameters of `region` that a product, convolution or lookup reads there, by path.

    graph: the graph of the model.
    region: names of the operations.
    parameters: paths by the names of parameter operations.
    fineness: the smallest number of units that a candidate may have.
    """
    weights: dict[str, Weight] = {}
    for operation in graph:
        if operation.name not in region:
            continue
        for name in _weights_read(graph, operation):
            root, dims = _through_transposes(graph, name)
            path = parameters.get(root, "")
            if not path or path in weights or root not in region:
                continue
            candidates = _candidates(graph, operation, dims, path, graph[root], fineness)
            chained = root != name
            reader = _first_reader(graph, root, operation.name)
            if candidates:
                weights[path] = Weight(path, reader, candidates, not chained)
    return weights


def cuts_of(
    graph: OperationGraph, operation: Operation, parameters: Mapping[str, str]
) -> Iterator[WeightSharding]:
    """Yield all candidates of the weights that `operation` reads, however few units they have."""
    for name in _weights_read(graph, operation):
        root, dims = _through_transposes(graph, name)
        if root in parameters:
            yield from _candidates(
                graph, operation, dims, parameters[root], graph[root], MinUnits(1)
            )


def _weights_read(graph: OperationGraph, operation: Operation) -> tuple[str, ...]:
    position = _WEIGHT_POSITION.get(RULES.get(operation.target))  # type: ignore[arg-type]
    if position is None or position >= len(operation.args):
        return ()
    argument = operation.args[position]
    return (argument.name,) if isinstance(argument, Ref) else ()


_WEIGHT_POSITION = {
    linear: 1, addmm: 2, matmul: 1, convolution: 1, transposed_convolution: 1, embedding: 0,
    grouped_mm: 1,
}  # fmt: skip


def sees_otherwise(operation: Operation) -> bool:
    """Return True if `operation` gives the same values as its input, transposed, cast or copied."""
    copies = ("aten.to.dtype", "aten.contiguous.default", "aten.clone.default")
    return RULES.get(operation.target) in _CHAIN or operation.target in copies


def _first_reader(graph: OperationGraph, root: str, reader: str) -> str:
    users = graph.users[root]
    return users[0] if users else reader


def _through_transposes(graph: OperationGraph, name: str) -> tuple[str, tuple[int, ...]]:
    """Return the parameter that `name` is a transpose of and, for each dimension of `name`, the
    parameter's dimension."""
    operation = graph[name]
    dims = tuple(range(len(operation.shape or ())))
    while sees_otherwise(operation):
        typed = RuleInput(operation, {}, graph)
        rule = RULES[operation.target]
        rank = len(dims)
        if rule is transpose:
            a, b = (dimension(typed.argument(i, i - 1), rank) for i in (1, 2))
            swapped = {a: b, b: a}
            inward = tuple(swapped.get(d, d) for d in range(rank))
        elif rule is reverse:
            inward = tuple(reversed(range(rank)))
        elif rule is permute:
            order = typed.argument(1)
            assert isinstance(order, tuple)
            inward = tuple(dimension(x, rank) for x in order)
        else:
            inward = tuple(range(rank))
        dims = tuple(inward[d] for d in dims)
        operation = graph[operation.inputs[0]]
    return operation.name, dims


def _candidates(
    graph: OperationGraph,
    operation: Operation,
    dims: tuple[int, ...],
    path: str,
    parameter: Operation,
    fineness: MinUnits,
) -> tuple[WeightSharding, ...]:
    """Return the candidates of the weight `parameter`, read by `operation`. `dims` holds the
    parameter's dimension for each dimension that the operation sees."""
    rule = RULES[operation.target]
    shape = parameter.shape or ()
    cuts: list[tuple[str, int, tuple[int, ...]]] = []

    def plain(pattern: str, seen: int) -> None:
        cuts.append((pattern, dims[seen], (shape[dims[seen]].fixed,)))

    def fused(seen: int, result: int) -> None:
        pattern = "vocabulary" if _feeds_cross_entropy(graph, operation.name) else "column"
        plain(pattern, seen)
        extent = shape[dims[seen]].fixed
        for pieces in parts_of(graph, operation.name, result, extent):
            cuts.append((pattern, dims[seen], pieces))

    rank = len(operation.shape or ())
    if rule is embedding:
        plain("vocabulary", 0)
        plain("column", 1)
    elif rule in (convolution, transposed_convolution):
        fused(0 if rule is convolution else 1, 1)
        plain("row", 1 if rule is convolution else 0)
    elif rule is grouped_mm:
        if len(dims) != 3:
            return ()
        plain("experts", 0)
        fused(2, rank - 1)
        plain("row", 1)
    else:
        if len(dims) != 2:
            return ()
        out = 0 if rule is linear else 1
        fused(out, rank - 1)
        plain("row", 1 - out)
    shardings = []
    for pattern, dim, pieces in cuts:
        if fineness.allows(min(pieces)):
            shardings.append(WeightSharding(pattern, shard(dim, path, pieces)))
    return tuple(dict.fromkeys(shardings))


def parts_of(graph: OperationGraph, name: str, dim: int, extent: int) -> list[tuple[int, ...]]:
    """Return the lengths of the parts into which the users of `name` split its dimension `dim` of
    `extent`: a list of one tuple, or an empty list where they do not split it."""
    edges = {0, extent}
    seen: set[tuple[str, int, int]] = set()
    stack = [(name, dim, 1)]  # a value, its dimension, and the fused elements per index
    while stack and len(seen) < _LOOK_AHEAD:
        value, at, scale = stack.pop(0)
        if (value, at, scale) in seen:
            continue
        seen.add((value, at, scale))
        for user in graph.users[value]:
            operation = graph[user]
            if operation.inputs[0] != value and RULES.get(operation.target) is not pointwise:
                continue
            edges.update(edge * scale for edge in _edges(graph, operation, value, at))
            onward = _onward(graph, operation, value, at, scale, extent)
            if onward is not None:
                stack.append((user, *onward))
    ordered = sorted(edges)
    pieces = tuple(b - a for a, b in pairwise(ordered))
    return [pieces] if 1 < len(pieces) <= _MOST_PIECES else []


def _edges(graph: OperationGraph, operation: Operation, value: str, at: int) -> tuple[int, ...]:
    """Return the indices at which `operation` splits dimension `at` of `value`."""
    typed = RuleInput(operation, {}, graph)
    rule, shape = RULES.get(operation.target), graph[value].shape or ()
    kind = operation.target.removeprefix("aten.")
    if kind in LISTS:
        if dimension(typed.argument(2, 0, "dim"), len(shape)) != at:
            return ()
        sizes = part_sizes(typed) or []
        return tuple(sum(sizes[:i]) for i in range(len(sizes)))
    if rule in (select, unbind, narrow) and dimension(typed.argument(1, 0), len(shape)) == at:
        if rule is unbind:
            return tuple(range(shape[at].fixed))
        start = typed.argument(2, 0)
        if not isinstance(start, int):
            return ()
        start %= max(shape[at].fixed, 1)
        length = 1 if rule is select else (operation.shape or ())[at].fixed
        return start, start + length
    return ()


def _onward(
    graph: OperationGraph, operation: Operation, value: str, at: int, scale: int, extent: int
) -> tuple[int, int] | None:
    """Return the dimension of `operation`'s result that holds the fused dimension, and its scale;
    None where no dimension does. The scale is the number of fused elements for each index."""
    rule, shape = RULES.get(operation.target), graph[value].shape or ()
    target = operation.shape or ()
    probe = Shard(at, "probe", 1, (extent // scale,))
    if rule is reshape:
        view = viewed(probe, shape, target)
        if view is None or view[0].outer != 1:
            return None
        length = sum(flat_pieces(view[0]) or ())
        # The view may mix in elements of other dimensions, and then it is longer.
        fits = target[view[0].dim] == Size(length) and length and extent % length == 0
        return (view[0].dim, extent // length) if fits else None
    if rule is pointwise:
        same = len(shape) == len(target) and shape[at] == target[at]
        return (at, scale) if same and product(shape) == product(target) else None
    if rule in (transpose, permute, reverse, squeeze, unsqueeze):
        typing = RULES[operation.target](RuleInput(operation, {value: probe}, graph))
        laid = typing.gives if typing else None
        return (laid.dim, scale) if isinstance(laid, Shard) else None
    return None


def _feeds_cross_entropy(graph: OperationGraph, name: str) -> bool:
    """Return True if the result of the operation `name` holds the classes of a cross-entropy, with
    no other product between."""
    stack, seen = [name], set[str]()
    while stack and len(seen) < _LOOK_AHEAD:
        value = stack.pop(0)
        if value in seen:
            continue
        seen.add(value)
        for user in graph.users[value]:
            rule = RULES.get(graph[user].target)
            if rule is cross_entropy:
                return True
            if rule in (pointwise, reshape, transpose, permute, narrow) and value in (
                graph[user].inputs
            ):
                stack.append(user)
    return False
