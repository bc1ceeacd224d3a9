"""Rules for what a forward makes of nothing but shapes and numbers."""

from whale_train.strategies.independence.call import Answer, Call
from whale_train.strategies.independence.computing import elementwise
from whale_train.strategies.independence.states import (
    FIXED,
    Fixed,
    Position,
    equal_rows,
)


def fresh(call: Call) -> Answer:
    """Type a value that only knows a shape."""
    if any(call.states[x] != FIXED and call.graph[x].shape == () for x in call.operation.inputs):
        return None  # filled with it
    return equal_rows(call.shape)


def drawn(call: Call) -> Answer:
    """Type random numbers: independent ones, beside which any rows fit, or such as the values of
    other rows say."""
    of_values = call.kind.startswith(("bernoulli", "multinomial", "normal", "poisson"))
    if of_values and any(state != FIXED for state in call.tensors().values()):
        return elementwise(call)
    return equal_rows(call.shape)


def arange(call: Call) -> Answer:
    """Type numbers from 0 up: the places of samples, where there are as many."""
    if call.shape and call.shape[0].per_sample:
        return Position(0) if call.kind == "arange.default" and not call.shape[0].fixed else None
    return FIXED


def extent(call: Call) -> Answer:
    """Type the extent of a dimension, as a number."""
    dim = call.argument(1, "dim", 0)
    shape = call.shape_of(call.name(0))
    if not isinstance(dim, int) or not shape:
        return None
    size = shape[dim]
    if not size.per_sample:
        return FIXED
    return Fixed(1) if not size.fixed else None
