"""The head: a model's output projection, found in its graph and not configured.

The head is a product with a trained weight that is followed, on the way to the loss, by elementwise
weights alone (a bias, a scale). Names of modules play no part in finding it.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from whale_train.strategies.graph.operation_graph import (
    WEIGHTS,
    ModelProfile,
    Operation,
    OperationGraph,
    Ref,
)
from whale_train.strategies.layouts.propagation import RULES, pointwise

# Position of the weight among a product's arguments, and the dimension of the weight that is the
# projection's output.
PRODUCTS = {
    "aten.linear.default": (1, 0),
    "aten.addmm.default": (2, 1),
    "aten.mm.default": (1, 1),
    "aten.matmul.default": (1, 1),
}

_SWAPS = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
_COPIES = ("aten.to.dtype", "aten._to_copy.default", "aten.contiguous.default")


@dataclass(frozen=True)
class Head:
    """An output projection.

    operation: name of its product in the graph.
    weight: canonical path of its weight.
    dim: dimension of the weight that runs over the classes.
    classes: number of classes.
    module: path of the module that computes the product.
    """

    operation: str
    weight: str
    dim: int
    classes: int
    module: str


def find_heads(profile: ModelProfile) -> tuple[Head, ...]:
    """Return all output projections of a model that has a graph, the one with the largest weight
    first."""
    graph = profile.graph
    assert graph is not None
    before = graph.ancestors({graph.operations[-1].inputs[0]})
    on_the_way = (op for op in graph if op.name in before)
    projections = [head for op in on_the_way if (head := _projection(op, graph, profile))]
    of_weights = graph.descendants({op.name for op in graph if op.target in WEIGHTS})
    mixing = [op for op in graph if _takes_weight_as_more_than_scale(op, graph, of_weights)]
    mixed = graph.ancestors({name for op in mixing for name in (*op.inputs, *op.after)})
    heads = [head for head in projections if head.operation not in mixed]
    return tuple(sorted(heads, key=lambda h: -profile.parameter_by_path[h.weight].elements))


def matching(heads: Sequence[Head], patterns: Sequence[str]) -> tuple[Head, ...]:
    """Return the heads whose module matches one of `patterns` (paths or globs; `head` matches
    any)."""
    return tuple(
        head
        for head in heads
        if any(pattern == "head" or fnmatchcase(head.module, pattern) for pattern in patterns)
    )


def _projection(op: Operation, graph: OperationGraph, profile: ModelProfile) -> Head | None:
    """Return the product `op` as a head; None unless it multiplies by a trained weight [rows,
    columns], read directly or through a transpose, a cast or a copy."""
    if op.target not in PRODUCTS or not op.shape:
        return None
    position, dim = PRODUCTS[op.target]
    argument = op.args[position]
    if not isinstance(argument, Ref):
        return None
    source = graph[argument.name]
    while source.target in _SWAPS + _COPIES:  # `x @ W.T` reads W through a transpose
        if source.target in _SWAPS:
            dim = 1 - dim
        source = graph[source.inputs[0]]
    if source.target != "parameter" or len(source.shape or ()) != 2:
        return None
    parameter = profile.parameter_by_path[source.path]
    return Head(op.name, parameter.path, dim, parameter.shape[dim], op.module)


def _takes_weight_as_more_than_scale(
    op: Operation, graph: OperationGraph, of_weights: Set[str]
) -> bool:
    """Return True if `op` mixes elements with a weight: a product, convolution, norm or lookup."""
    if RULES.get(op.target) is pointwise:
        return False
    if op.target in PRODUCTS:  # its weight may come through a transpose
        return any(name in of_weights for name in op.inputs[1:])
    return any(graph[name].target in WEIGHTS for name in op.inputs)
