"""Rules for products of tensors: matrices, images with weights, queries with keys."""

from dataclasses import replace

from whale_train.strategies.graph.operation_graph import Ref
from whale_train.strategies.independence.call import Answer, Call, Refused
from whale_train.strategies.independence.computing import BESIDE, STATISTIC, per_image
from whale_train.strategies.independence.states import (
    FIXED,
    Fixed,
    PerSample,
    Reduced,
    added,
    multiplied,
)


def _product(call: Call, first: int, second: int) -> Answer:
    """Derive the state of a matrix product of the arguments at two positions."""
    left, right = call.state(first), call.state(second)
    ranks = call.rank_of(first), call.rank_of(second)
    contracted = ranks[0] - 1, max(ranks[1] - 2, 0)
    rank = max(*ranks, 2) if min(ranks) > 1 else max(ranks) - 1
    rows: list[PerSample] = []
    summed: list[bool] = []
    for state, own, over in ((left, ranks[0], contracted[0]), (right, ranks[1], contracted[1])):
        if isinstance(state, PerSample):
            summed.append(state.dim == over)
            dim = state.dim + rank - own
            if min(ranks) == 1:  # a vector adds no dimension, and takes the contracted one away
                dim = state.dim - (state.dim > over)
            rows.append(replace(state, dim=dim))
        elif not isinstance(state, Fixed | Reduced):
            return None
    if not rows:
        return multiplied([left, right], [1, 1]) or Refused(STATISTIC)
    if any(isinstance(x, Reduced) for x in (left, right)):
        return Refused(BESIDE)
    degree = sum(x.degree for x in (left, right) if isinstance(x, Fixed | PerSample))
    if all(summed):
        same = len({(x.before, x.order) for x in rows if not x.uniform}) <= 1
        return Reduced(degree) if same and len(rows) == 2 else None
    if any(summed):
        return Refused("sums over the samples of the batch beside those of another input")
    product = multiplied(list(rows), [1] * len(rows))
    if product is None:
        return Refused("multiplies different samples with each other")
    return replace(product, degree=degree) if isinstance(product, PerSample) else None


def matmul(call: Call) -> Answer:
    """Derive the state of a matrix product of two tensors."""
    return _product(call, 0, 1)


def added_product(call: Call) -> Answer:
    """Derive the state of a matrix product of the second and the third argument, added to the
    first."""
    made = _product(call, 1, 2)
    if made is None or isinstance(made, Refused):
        return made
    total = added([call.shifted(call.name(0)), made])
    return total if total is not None else Refused(STATISTIC)


def linear(call: Call) -> Answer:
    """Derive the state of every row times a weight, plus a bias."""
    state, rank = call.state(0), call.rank_of(0)
    if any(call.states[x] != FIXED for x in call.operation.inputs[1:]):
        return None
    if isinstance(state, PerSample):
        if state.dim == rank - 1:
            return Refused("multiplies the samples of the batch with a weight of their number")
        return state if not state.degree else None
    biased = len(call.operation.inputs) > 2
    if isinstance(state, Reduced) and biased:
        return added([state, FIXED]) or Refused(STATISTIC)
    return state if isinstance(state, Reduced) else None


def einsum(call: Call) -> Answer:
    """Derive the state of a sum of products, given by an equation."""
    equation, operands = call.argument(0), call.argument(1)
    if not isinstance(equation, str) or not isinstance(operands, tuple) or "." in equation:
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    labels, degree = set(), 0
    for term, operand in zip(inputs.split(","), operands, strict=False):
        state = call.state_of(operand)
        if isinstance(state, PerSample):
            labels.add((term[state.dim], state.before, state.order))
        elif not isinstance(state, Fixed | Reduced):
            return None
        degree += state.degree
    states = [call.state_of(operand) for operand in operands]
    if not labels:
        return multiplied(states, [1] * len(states)) or Refused(STATISTIC)
    if any(isinstance(x, Reduced) for x in states):
        return Refused(BESIDE)
    if len(labels) > 1:
        return Refused("multiplies different samples with each other")
    ((label, before, order),) = labels
    if label not in result:
        return Reduced(degree)
    return PerSample(result.index(label), before, degree, order=order)


def convolution(call: Call) -> Answer:
    """Derive the state of every sample convolved with one weight."""
    if call.rank_of(0) != call.rank_of(1):
        return None  # without a dimension of samples
    return per_image(call)


def attention(call: Call) -> Answer:
    """Derive the state of attention of each sample's queries to the same sample's keys."""
    rows = call.rows()
    if isinstance(rows, PerSample) and rows.dim >= len(call.shape) - 2:
        return Refused("attends from one sample to another")
    return rows


def grouped_product(call: Call) -> Answer:
    """Derive the state of the rows of each expert times that expert's weight. The rows must be
    sorted by expert, with end offsets counted from the same rows."""
    state, offsets = call.state(0), call.argument(2, "offs")
    if not isinstance(state, PerSample) or state.degree or not state.order:
        return None
    if call.state(1) != FIXED or not isinstance(offsets, Ref):
        return None
    counted = call.graph[offsets.name]
    if "cumsum" in counted.target:
        counted = call.graph[counted.inputs[0]]
        while counted.target.startswith(("aten.to.", "aten._to_copy.")):
            counted = call.graph[counted.inputs[0]]
        if not counted.target.startswith(("aten.histc.", "aten.bincount.")):
            return None
    elif not counted.target.startswith("aten.searchsorted."):
        return None
    of = call.states.get(counted.inputs[0]) if counted.inputs else None
    same = isinstance(of, PerSample) and of.order == state.order
    return state if same else None


def lookup(call: Call) -> Answer:
    """Derive the state of table rows that are looked up by number."""
    table, numbers = call.state(0), call.state(1)
    if call.argument(3, "scale_grad_by_freq"):
        return Refused("divides gradients by how often the batch looks up each row")
    if table != FIXED or not isinstance(numbers, PerSample) or numbers.degree:
        return None
    return numbers


def renormed(call: Call) -> Answer:
    """Derive the state of a table whose looked-up rows are rescaled in place."""
    if call.state(0) == FIXED and isinstance(call.state(1), PerSample):
        return Refused("rescales the rows of a table that the batch looks up")
    return None
