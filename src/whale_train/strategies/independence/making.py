"""Rules for values that a forward creates from shapes and numbers alone."""

from dataclasses import replace

from whale_train.strategies.independence.call import Answer, Call
from whale_train.strategies.independence.computing import elementwise
from whale_train.strategies.independence.states import (
    FIXED,
    Fixed,
    PerSample,
    RowPosition,
    equal_rows,
)

# The position of the argument with the fill value.
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "fill": 1, "scalar_tensor": 0}


def fresh(call: Call) -> Answer:
    """Derive the state of a value of a given shape with one number everywhere. The number may
    depend on the batch's size."""
    kind = call.kind.partition(".")[0].rstrip("_")
    position = _FILLED.get(kind)
    name = "s" if kind == "scalar_tensor" else "value" if kind == "fill" else "fill_value"
    number = FIXED if position is None else call.state_of(call.argument(position, name))
    made = equal_rows(call.shape)
    if not isinstance(number, Fixed):
        return None
    return replace(made, degree=number.degree) if isinstance(made, PerSample | Fixed) else None


def drawn(call: Call) -> Answer:
    """Derive the state of random numbers. Independent ones fit with any rows; others are drawn for
    the values of given rows."""
    of_values = call.kind.startswith(("bernoulli", "multinomial", "normal", "poisson"))
    if of_values and any(state != FIXED for state in call.tensors().values()):
        return elementwise(call)
    return equal_rows(call.shape)


def arange(call: Call) -> Answer:
    """Derive the state of numbers from 0 up. If there are as many as samples, they are the places
    of the samples."""
    if call.shape and call.shape[0].per_sample:
        return RowPosition(0) if call.kind == "arange.default" and not call.shape[0].fixed else None
    return FIXED


def extent(call: Call) -> Answer:
    """Derive the state of the extent of a dimension, as a number."""
    dim = call.argument(1, "dim", 0)
    shape = call.shape_of(call.name(0))
    if not isinstance(dim, int) or not shape:
        return None
    size = shape[dim]
    if not size.per_sample:
        return FIXED
    return Fixed(1) if not size.fixed else None
