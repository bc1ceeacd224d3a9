"""Rules for operations that compute: elementwise, reductions, along a dimension.

A rule derives, from the states of an operation's inputs, how its result depends on the samples of
the batch. It returns `Refused` where it proves that samples meet, and None where it cannot decide.
"""

from dataclasses import replace

from whale_train.strategies.graph.operation_graph import Ref
from whale_train.strategies.independence.call import Answer, Call, Refused
from whale_train.strategies.independence.states import (
    FIXED,
    Fixed,
    Permutation,
    PerSample,
    Reduced,
    RowPosition,
    State,
    added,
    batch_dims,
    multiplied,
)

STATISTIC = "is not linear in a statistic of the whole batch"
BESIDE = "combines each sample with a statistic of the whole batch"


def elementwise(call: Call) -> Answer:
    """Derive the state of any function of one element of each input."""
    states = [call.shifted(name) for name in call.operation.inputs]
    if any(isinstance(x, Reduced) for x in states):
        rows = any(isinstance(x, PerSample) and not x.uniform for x in states)
        return Refused(BESIDE if rows else STATISTIC)
    if all(x == FIXED for x in states) and not batch_dims(call.shape):
        return FIXED  # numbers drawn for all samples alike, as a dropout of weights
    return call.rows()


def copying(call: Call) -> Answer:
    """Derive the state of an operation that changes no value, or only its sign. A conversion to
    integers or to bool rounds."""
    state = call.state(0)
    rounds = "int" in call.operation.dtype and "float" in call.graph[call.name(0)].dtype
    if isinstance(state, Permutation | RowPosition):
        return state
    to_bool = call.operation.dtype == "bool" and call.graph[call.name(0)].dtype != "bool"
    if (rounds or to_bool) and isinstance(state, Reduced):
        return Refused(STATISTIC)
    if (rounds or to_bool) and state != FIXED and not isinstance(state, PerSample):
        return None
    return state


def adding(call: Call) -> Answer:
    """Derive the state of a sum or difference."""
    states = [call.shifted(name) for name in call.operation.inputs if not _is_zero(call, name)]
    if any(call.numbers()) or not states:
        states.append(FIXED)
    total = added(states)
    if total is not None:
        return total
    pooled = any(isinstance(x, Reduced) for x in states)
    if pooled and any(isinstance(x, PerSample) for x in states):
        return Refused(BESIDE)
    if pooled and all(isinstance(x, Reduced | Fixed) for x in states):
        return Refused("adds a sum over the samples of the batch to a mean, or to a constant")
    return elementwise(call)


def _is_zero(call: Call, name: str) -> bool:
    """Return True if a value is created as zeros, as the first term of a sum often is."""
    of = call.graph[name]
    return of.target == "aten.zeros.default" and not batch_dims(of.shape or ())


def multiplying(call: Call) -> Answer:
    """Derive the state of a product."""
    states = [call.shifted(x.name) for x in call.operation.args if isinstance(x, Ref)]
    product = multiplied(states, [1] * len(states))
    return product if product is not None else elementwise(call)


def dividing(call: Call) -> Answer:
    """Derive the state of a quotient."""
    powers = [1 if i == 0 else -1 for i, x in enumerate(call.operation.args) if isinstance(x, Ref)]
    states = [call.shifted(x.name) for x in call.operation.args if isinstance(x, Ref)]
    quotient = multiplied(states, powers)
    if quotient is not None:
        return quotient
    if isinstance(states[-1], Reduced) and powers[-1] == -1:
        return Refused("divides by a statistic of the whole batch")
    return elementwise(call)


def dividing_numbers(call: Call) -> Answer:
    """Derive the state of a rounding division. Entry numbers divided by the number of entries in a
    row give row numbers."""
    state, by = call.state(0), call.argument(1)
    if isinstance(state, Permutation) and isinstance(by, int) and not state.inverse:
        return replace(state, unit=state.unit * by)
    return elementwise(call)


def broadcast_rows(call: Call) -> Answer:
    """Derive the state of inputs that are broadcast against each other, whatever is computed from
    them."""
    rank = max(len(call.shape_of(name)) for name in call.operation.inputs)
    rows: list[State] = []
    for name in call.operation.inputs:
        state = call.states[name]
        if isinstance(state, PerSample) and not state.degree:
            rows.append(replace(state, dim=state.dim + rank - len(call.shape_of(name))))
        elif state != FIXED:
            return None
    one = added(rows or [FIXED])
    return one if one is not None else Refused("compares different samples with each other")


# --- Reductions ----------------------------------------------------------------------------------


def _left(call: Call, dims: tuple[int, ...], state: PerSample) -> PerSample:
    """Return `state` after a reduction of dimensions `dims`, which do not include the sample
    dimension."""
    if call.operation.shape is None:  # a tuple: `item` finds the dimension of each part
        return state
    if len(call.shape) == call.rank_of(0):
        return state
    return replace(state, dim=state.dim - sum(dim < state.dim for dim in dims))


def _reduced(call: Call, dims: tuple[int, ...] | None, *, mean: bool) -> Answer:
    state = call.state(0)
    if dims is None:
        return None
    if isinstance(state, PerSample):
        if state.dim not in dims:
            return _left(call, dims, state)
        return Reduced(state.degree - (1 if mean else 0))
    return state if isinstance(state, Fixed | Reduced) else None


def summing(call: Call) -> Answer:
    """Derive the state of a sum over dimensions."""
    return _reduced(call, call.dims(1), mean=False)


def averaging(call: Call) -> Answer:
    """Derive the state of a mean over dimensions."""
    return _reduced(call, call.dims(1), mean=True)


def counting(call: Call) -> Answer:
    """Derive the state of a count of the elements of each kind. Counts of parts add up, in any
    order of rows."""
    state = call.state(0)
    dims = call.dims(1) if call.kind.startswith("count_nonzero") else (0,)
    if isinstance(state, PerSample) and not state.degree:
        return _reduced(call, dims, mean=False)
    return Refused(STATISTIC) if isinstance(state, Reduced) else None


def histogram(call: Call) -> Answer:
    """Derive the state of counts between two fixed ends. Equal ends stand for the range of the
    data."""
    low, high = call.argument(2, "min", 0), call.argument(3, "max", 0)
    if low == high:
        return Refused("counts between the least and the largest value of the batch")
    return counting(call)


def _other_reduction(call: Call, dims: tuple[int, ...] | None) -> Answer:
    state = call.state(0)
    if dims is None:
        return None
    if isinstance(state, PerSample):
        if state.dim in dims:
            return Refused("reduces over the samples of the batch, and is no sum or mean")
        return _left(call, dims, state) if not state.degree else None
    return Refused(STATISTIC) if isinstance(state, Reduced) else None


def reducing(call: Call) -> Answer:
    """Derive the state of any other reduction, over the dimensions of the second argument."""
    return _other_reduction(call, call.dims(1))


def norm(call: Call) -> Answer:
    """Derive the state of a norm. Its second argument is the order, its third the dimensions."""
    return _other_reduction(call, call.dims(2))


# --- Along a dimension ---------------------------------------------------------------------------


def _along(call: Call, dims: tuple[int, ...] | None, *, linear: bool = False) -> Answer:
    state = call.state(0)
    if dims is None:
        return None
    if isinstance(state, PerSample):
        if state.dim in dims:
            return Refused("works along the samples of the batch")
        return state if not state.degree or linear else None
    if isinstance(state, Reduced):
        return state if linear else Refused(STATISTIC)
    return None


def along(call: Call) -> Answer:
    """Derive the state of an operation along one dimension, the second argument."""
    return _along(call, call.dims(1))


def along_last(call: Call) -> Answer:
    """Derive the state of an operation along one dimension: the second argument, or the last
    dimension."""
    dim = call.dim(1, default=-1)
    return _along(call, None if dim is None else (dim,))


def along_third(call: Call) -> Answer:
    """Derive the state of an operation along one dimension: the third argument, or the last
    dimension."""
    dim = call.dim(2, default=-1)
    return _along(call, None if dim is None else (dim,))


def running_sum(call: Call) -> Answer:
    """Derive the state of a cumulative sum, or another linear function, along the dimensions of the
    second argument."""
    return _along(call, call.dims(1), linear=True)


def rolling(call: Call) -> Answer:
    """Derive the state of values that are rolled along the dimensions of the third argument."""
    return _along(call, call.dims(2, "dims"), linear=True)


def sorting(call: Call) -> Answer:
    """Derive the state of a sort. A one-dimensional value is sorted over the whole batch, as
    mixtures of experts sort the tokens that they dispatch."""
    state, dim = call.state(0), call.dim(1, default=-1)
    if isinstance(state, Permutation) and call.kind.startswith("argsort") and state.unit == 1:
        return replace(state, inverse=not state.inverse)
    if isinstance(state, PerSample) and state.dim == dim and call.rank_of(0) == 1:
        if call.argument(2, "descending"):
            return Refused("sorts the samples of the batch")
        if state.order or state.degree or "int" not in call.graph[call.name(0)].dtype:
            return Refused("sorts the samples of the batch")
        if call.kind.startswith("argsort"):
            return Permutation(call.operation.name)
        return replace(state, order=call.operation.name)
    return _along(call, None if dim is None else (dim,))


def last_dims(call: Call) -> Answer:
    """Derive the state of a normalisation over the last dimensions, as many as the second argument
    has entries."""
    shape = call.argument(1, "normalized_shape")
    state, count = call.state(0), len(shape) if isinstance(shape, tuple) else 1
    if any(call.states[x] != FIXED for x in call.operation.inputs[1:]):
        return None
    rank = call.rank_of(0)
    return _along(call, tuple(range(rank - count, rank))) if state != FIXED else FIXED


def triangle(call: Call) -> Answer:
    """Derive the state of a linear operation on the matrices of the last two dimensions."""
    rank = call.rank_of(0)
    return _along(call, (rank - 2, rank - 1), linear=True)


def per_image(call: Call) -> Answer:
    """Derive the state of an operation on the channels and places of each sample. Dimension 0 must
    be the sample dimension."""
    state = call.state(0)
    if any(call.states[x] != FIXED for x in call.operation.inputs if x != call.name(0)):
        return None
    if isinstance(state, PerSample) and not state.degree and call.rank_of(0) > 1:
        return state if state.dim == 0 else None
    return None


def batch_norm(call: Call) -> Answer:
    """Derive the state of a BatchNorm. The runtime computes the statistics of torch's own modules
    over the whole batch, so they count as an operation on each sample. Any other BatchNorm in
    training makes samples meet."""
    training = call.argument(5, "training")
    state = call.state(0)
    if not training or call.operation.module in call.batch_norms:
        return per_image(call)
    if isinstance(state, PerSample):
        return Refused("normalises by the statistics of the batch, outside of torch's BatchNorm")
    return None


def recurrent(call: Call) -> Answer:
    """Derive the state of an LSTM, a GRU or a plain RNN: its outputs and its last states."""
    batch_first = call.operation.args[-1]
    state, rank = call.state(0), call.rank_of(0)
    others = [call.states[x] for x in call.operation.inputs[1:]]
    known = all(x == FIXED or isinstance(x, PerSample) for x in others)
    if not isinstance(state, PerSample) or state.degree or state.before != 1 or not known:
        return None
    if rank != 3 or state.dim != (0 if batch_first is True else 1):
        return Refused("runs along the samples of the batch") if rank in (2, 3) else None
    return replace(state, uniform=False)
