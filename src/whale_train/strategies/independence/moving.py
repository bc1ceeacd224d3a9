"""Rules for views, and for operations that split and join values."""

from dataclasses import replace

from whale_train.strategies.graph.operation_graph import Argument, Ref, Size
from whale_train.strategies.independence.call import (
    Answer,
    Call,
    Refused,
    factors_before,
    is_whole_batch,
    only_batch_dim,
)
from whale_train.strategies.independence.states import (
    Fixed,
    Permutation,
    PerSample,
    Reduced,
    RowPosition,
    State,
    added,
    batch_dims,
    equal_rows,
)

SOME = "takes some of the samples of the batch"
_STATISTIC = "gives every sample a statistic of the whole batch"
_TORN = "tears the samples of the batch apart"


def whole(call: Call, state: State) -> Answer:
    """Return the answer for an input without a sample dimension, where the result may have one: the
    rows of the result are then one row of the input, repeated."""
    if isinstance(state, Fixed):
        made = equal_rows(call.shape)
        if not batch_dims(call.shape):
            return state
        if not isinstance(made, PerSample):
            return None
        extent = _extent_before(call, made.dim)
        return replace(made, degree=state.degree) if extent == Size(1) else None
    if isinstance(state, Reduced):
        return Refused(_STATISTIC) if batch_dims(call.shape) else state
    return None


def _extent_before(call: Call, dim: int) -> Size:
    """Return the extent of an input along the dimension that becomes `dim` of the result it is
    broadcast to; 1 for a new dimension."""
    shape = call.shape_of(call.name(0))
    own = dim - len(call.shape) + len(shape)
    return shape[own] if own >= 0 else Size(1)


# --- Views ---------------------------------------------------------------------------------------


def reshape(call: Call) -> Answer:
    """Derive the state of the same elements in the same order, in other dimensions."""
    state = call.state(0)
    shape = call.shape_of(call.name(0))
    if isinstance(state, Permutation):
        return state if shape == call.shape else None
    if not isinstance(state, PerSample | RowPosition):
        return whole(call, state)
    dim = only_batch_dim(call.shape)
    if dim is None:
        return None
    if isinstance(state, RowPosition):
        return RowPosition(dim) if is_whole_batch(call.shape[dim]) else None
    before, now = factors_before(shape, state.dim), factors_before(call.shape, dim)
    if before is None or now is None:
        return None
    had = shape[state.dim].per_sample
    if state.order and had != call.shape[dim].per_sample:
        return None  # rows of several samples become one
    if state.uniform and before == now and had % call.shape[dim].per_sample == 0:
        return replace(state, dim=dim)
    left = before * state.before
    if now == 0 or left % now or call.shape[dim].per_sample % (left // now):
        return Refused(_TORN)
    return replace(state, dim=dim, before=left // now, uniform=False)


def _permuted(call: Call, order: list[int]) -> Answer:
    """Return the state of a value whose dimension i is the input's dimension `order[i]`."""
    state = call.state(0)
    if isinstance(state, PerSample | RowPosition):
        return replace(state, dim=order.index(state.dim))
    return whole(call, state)


def transpose(call: Call) -> Answer:
    """Derive the state of a swap of two dimensions; of the last two where none are named."""
    rank = call.rank_of(0)
    first, second = call.dim(1, "dim0", max(rank - 2, 0)), call.dim(2, "dim1", max(rank - 1, 0))
    if first is None or second is None:
        return None
    order = list(range(rank))
    if order:
        order[first], order[second] = second, first
    return _permuted(call, order)


def reverse(call: Call) -> Answer:
    """Derive the state of all dimensions in reverse order."""
    return _permuted(call, list(reversed(range(call.rank_of(0)))))


def permute(call: Call) -> Answer:
    """Derive the state of dimensions in the order that the second argument lists."""
    order = call.dims(1, "dims")
    return None if order is None else _permuted(call, list(order))


def movedim(call: Call) -> Answer:
    """Derive the state of dimensions that are moved to other places."""
    source, target = call.dims(1, "source"), call.dims(2, "destination")
    if source is None or target is None:
        return None
    rest = [dim for dim in range(call.rank_of(0)) if dim not in source]
    moved = dict(zip(target, source, strict=True))
    order = [moved[i] if i in moved else rest.pop(0) for i in range(call.rank_of(0))]
    return _permuted(call, order)


def squeeze(call: Call) -> Answer:
    """Derive the state of the removal or addition of dimensions of extent 1."""
    state = call.state(0)
    dim = only_batch_dim(call.shape)
    if isinstance(state, PerSample | RowPosition):
        return replace(state, dim=dim) if dim is not None else None
    return state if isinstance(state, Permutation) else whole(call, state)


def expand(call: Call) -> Answer:
    """Derive the state of dimensions of extent 1 that are repeated, with new leading ones."""
    shifted = call.shifted(call.name(0))
    if isinstance(shifted, PerSample | RowPosition):
        return shifted if len(batch_dims(call.shape)) == 1 else None
    return whole(call, shifted)


def repeat(call: Call) -> Answer:
    """Derive the state of a value that is repeated along every dimension."""
    state = call.shifted(call.name(0))
    if isinstance(state, Fixed):
        dim = only_batch_dim(call.shape)
        if dim is None or _extent_before(call, dim) == Size(1):
            return whole(call, state)
        return PerSample(dim, degree=state.degree)  # every sample has all rows
    if not isinstance(state, PerSample):
        return whole(call, state)
    had = call.shape_of(call.name(0))[state.dim - len(call.shape) + call.rank_of(0)]
    now = call.shape[state.dim]
    if len(batch_dims(call.shape)) != 1 or now.fixed or now.per_sample % had.per_sample:
        return None
    return replace(state, before=state.before * (now.per_sample // had.per_sample))


def repeat_interleave(call: Call) -> Answer:
    """Derive the state of the entries of a dimension, each repeated several times in a row."""
    state = call.state(0)
    if isinstance(state, Fixed) and len(call.shape) == call.rank_of(0):
        dim = only_batch_dim(call.shape)
        had = call.shape_of(call.name(0))[dim] if dim is not None else Size(1)
        if dim is not None and had.fixed > 1:  # one row for all samples, then the next
            return PerSample(dim, had.fixed, state.degree)
    if not isinstance(state, PerSample) or len(call.shape) != call.rank_of(0):
        return whole(call, state)
    return state if only_batch_dim(call.shape) == state.dim else None


# --- Parts ---------------------------------------------------------------------------------------


def narrow(call: Call) -> Answer:
    """Derive the state of a range of a dimension."""
    state, dim = call.state(0), call.dim(1)
    if isinstance(state, Fixed) and dim is not None and call.shape[dim].per_sample:
        return Refused("takes rows of a table by the places of samples in their batch")
    if not isinstance(state, PerSample | RowPosition):
        return whole(call, state)
    if state.dim != dim:
        return state
    had, now = call.shape_of(call.name(0))[dim], call.shape[dim]
    step = call.argument(4, "step", 1)
    if had == now and step == 1:
        return state
    if isinstance(state, RowPosition):
        return Refused(SOME)
    if step != 1:
        return _every(call, state, step, had, now)
    return _pieces(call, state, had, now) if call.argument(2, "start") in (0, None) else None


def _every(call: Call, state: PerSample, step: Argument, had: Size, now: Size) -> Answer:
    """Return the state of every `step`-th entry of the sample dimension.

    Every sample keeps equally many entries if the number of consecutive entries of one sample is a
    multiple of `step`. Otherwise only some samples are taken, which is refused.
    """
    start = call.argument(2, "start") or 0
    if not isinstance(step, int) or not isinstance(start, int) or not 0 <= start < step:
        return None
    if had != Size(0, now.per_sample * step):
        return Refused(SOME)
    together = had.per_sample // state.before
    return state if state.uniform or together % step == 0 else Refused(SOME)


def _pieces(call: Call, state: PerSample, had: Size, now: Size) -> Answer:
    """Return the state of one of several equal consecutive pieces of the sample dimension. Each
    piece has all samples if the dimension runs through several whole batches. Otherwise it is
    refused."""
    if state.uniform:
        return state if not now.fixed and now.per_sample else None
    stride = had.per_sample // state.before  # elements per sample between two whole batches
    if (
        now.fixed
        or not now.per_sample
        or now.per_sample % stride
        or had.per_sample % now.per_sample
    ):
        return Refused(SOME)
    return replace(state, before=now.per_sample // stride)


def split(call: Call) -> Answer:
    """Derive the state of consecutive pieces of a dimension, as a tuple. `item` derives the states
    of the parts."""
    state, dim = call.state(0), call.dim(2)
    if isinstance(state, PerSample) and state.dim != dim:
        return state
    return state if isinstance(state, Fixed | Reduced | PerSample) else None


def item(call: Call) -> Answer:
    """Derive the state of one value of an operation that gives several."""
    state, number = call.state(0), call.argument(1)
    source = call.graph[call.name(0)]
    if isinstance(state, PerSample) and state.order == source.name:
        return Permutation(state.order) if number == 1 else state
    if not isinstance(state, PerSample):
        return whole(call, state)
    dim = only_batch_dim(call.shape)
    if dim is None:
        return Refused(SOME) if not batch_dims(call.shape) else None
    pieces = ("split", "chunk", "tensor_split")
    if source.target.removeprefix("aten.").split(".")[0].startswith(pieces) and dim == state.dim:
        had = call.shape_of(source.inputs[0])[dim]
        if had != call.shape[dim]:
            return _pieces(call, state, had, call.shape[dim])
    return replace(state, dim=dim)


def select(call: Call) -> Answer:
    """Derive the state of one entry of a dimension, which the result loses."""
    state, dim = call.state(0), call.dim(1)
    if not isinstance(state, PerSample):
        return whole(call, state)
    if state.dim == dim or dim is None:
        return Refused(SOME)
    return replace(state, dim=state.dim - (dim < state.dim))


def unbind(call: Call) -> Answer:
    """Derive the state of all entries of a dimension as a tuple; the parts lose the dimension."""
    state, dim = call.state(0), call.dim(1)
    if isinstance(state, PerSample) and state.dim == dim:
        return Refused(SOME)
    return state if isinstance(state, Fixed | Reduced | PerSample) else None


def cat(call: Call) -> Answer:
    """Derive the state of values that are concatenated along a dimension."""
    parts = call.argument(0)
    if not isinstance(parts, tuple):
        return None
    names = [x.name for x in parts if isinstance(x, Ref)]
    dim = call.argument(1, "dim", 0)
    rank = len(call.shape)
    if not isinstance(dim, int) or not rank:
        return None
    dim %= rank
    states = [call.states[name] for name in names]
    rows = [x for x in states if isinstance(x, PerSample)]
    if rows and rows[0].dim == dim:
        extents = {call.shape_of(name)[dim] for name in names}
        plain = all(x == rows[0] and x.before == 1 for x in states) and not rows[0].order
        made = replace(rows[0], before=len(names), uniform=False)
        return made if plain and len(extents) == 1 else None
    return _together(call, states)


def stack(call: Call) -> Answer:
    """Derive the state of values that are joined along a new dimension."""
    parts = call.argument(0)
    if not isinstance(parts, tuple):
        return None
    dim = call.argument(1, "dim", 0)
    if not isinstance(dim, int):
        return None
    dim %= len(call.shape)
    states: list[State] = []
    for x in parts:
        state = call.state_of(x)
        if isinstance(state, PerSample) and dim <= state.dim:
            state = replace(state, dim=state.dim + 1)
        states.append(state)
    return _together(call, states)


def _together(call: Call, states: list[State]) -> Answer:
    joined = added(states)
    if joined is not None:
        return joined
    rows = any(isinstance(x, PerSample) for x in states)
    if all(isinstance(x, PerSample) for x in states):
        return Refused("puts different samples beside each other")
    if any(isinstance(x, Reduced) for x in states):
        return Refused(_STATISTIC if rows else "puts a sum over the batch beside a mean")
    return None


def pad(call: Call) -> Answer:
    """Derive the state of a value that is padded along its last dimensions."""
    state, amounts = call.state(0), call.argument(1)
    if not isinstance(amounts, tuple):
        return None
    rank, padded = call.rank_of(0), len(amounts) // 2
    if isinstance(state, PerSample):
        return state if state.dim < rank - padded else Refused("adds samples to the batch")
    if isinstance(state, Reduced):
        return state if not call.argument(3, "value") and not call.argument(2, "mode") else None
    return None
