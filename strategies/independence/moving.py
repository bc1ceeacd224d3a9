"""Rules for what moves values, views, parts and indexing, and for what a forward makes itself."""

from dataclasses import replace

from whale_train.strategies.independence.call import (
    Call,
    Refused,
    factors_before,
    is_whole_batch,
    only_batch_dim,
)
from whale_train.strategies.independence.states import (
    FIXED,
    Fixed,
    Permutation,
    PerSample,
    Pooled,
    Position,
    State,
    added,
    batch_dims,
    equal_rows,
)
from whale_train.strategies.operations import Argument, Ref, Size

Answer = State | Refused | None

_SOME = "takes some of the samples of the batch"
_STATISTIC = "gives every sample a statistic of the whole batch"
_TORN = "tears the samples of the batch apart"


def whole(call: Call, state: State) -> Answer:
    """Return the answer for an input without a sample dimension of its own."""
    if isinstance(state, Fixed):
        made = equal_rows(call.shape)
        if batch_dims(call.shape):
            return replace(made, degree=state.degree) if isinstance(made, PerSample) else None
        return state
    if isinstance(state, Pooled):
        return Refused(_STATISTIC) if batch_dims(call.shape) else state
    return None


# --- Views ---------------------------------------------------------------------------------------


def reshape(call: Call) -> Answer:
    """The same elements in the same order, in other dimensions."""
    state = call.state(0)
    if not isinstance(state, PerSample | Position):
        return state if isinstance(state, Permutation) else whole(call, state)
    dim = only_batch_dim(call.shape)
    if dim is None:
        return None
    shape = call.shape_of(call.name(0))
    if isinstance(state, Position):
        return Position(dim) if is_whole_batch(call.shape[dim]) else None
    before, now = factors_before(shape, state.dim), factors_before(call.shape, dim)
    if before is None or now is None:
        return None
    if state.uniform:
        return replace(state, dim=dim)
    left = before * state.before
    if now == 0 or left % now or call.shape[dim].per_sample % (left // now):
        return Refused(_TORN)
    return replace(state, dim=dim, before=left // now)


def _permuted(call: Call, order: list[int]) -> Answer:
    """Return the state of a value whose dimension i is the input's dimension `order[i]`."""
    state = call.state(0)
    if isinstance(state, PerSample | Position):
        return replace(state, dim=order.index(state.dim))
    return whole(call, state)


def transpose(call: Call) -> Answer:
    """Two dimensions swapped: the last two of a matrix where none are named."""
    rank = call.rank_of(0)
    first, second = call.dim(1, "dim0", max(rank - 2, 0)), call.dim(2, "dim1", max(rank - 1, 0))
    if first is None or second is None:
        return None
    order = list(range(rank))
    if order:
        order[first], order[second] = second, first
    return _permuted(call, order)


def reverse(call: Call) -> Answer:
    """All dimensions in reverse."""
    return _permuted(call, list(reversed(range(call.rank_of(0)))))


def permute(call: Call) -> Answer:
    """Dimensions in the order that the second argument lists."""
    order = call.dims(1, "dims")
    return None if order is None else _permuted(call, list(order))


def movedim(call: Call) -> Answer:
    """Some dimensions moved to other places."""
    source, target = call.dims(1, "source"), call.dims(2, "destination")
    if source is None or target is None:
        return None
    rest = [dim for dim in range(call.rank_of(0)) if dim not in source]
    moved = dict(zip(target, source, strict=True))
    order = [moved[i] if i in moved else rest.pop(0) for i in range(call.rank_of(0))]
    return _permuted(call, order)


def squeeze(call: Call) -> Answer:
    """Dimensions of extent 1 taken away or put in."""
    state = call.state(0)
    dim = only_batch_dim(call.shape)
    if isinstance(state, PerSample | Position):
        return replace(state, dim=dim) if dim is not None else None
    return state if isinstance(state, Permutation) else whole(call, state)


def expand(call: Call) -> Answer:
    """Dimensions of extent 1 repeated, and new ones before."""
    shifted = call.shifted(call.name(0))
    if isinstance(shifted, PerSample | Position):
        return shifted if len(batch_dims(call.shape)) == 1 else None
    return whole(call, shifted)


def repeat(call: Call) -> Answer:
    """The whole value several times, along every dimension."""
    state = call.shifted(call.name(0))
    if not isinstance(state, PerSample):
        return whole(call, state)
    had = call.shape_of(call.name(0))[state.dim - len(call.shape) + call.rank_of(0)]
    now = call.shape[state.dim]
    if len(batch_dims(call.shape)) != 1 or now.fixed or now.per_sample % had.per_sample:
        return None
    return replace(state, before=state.before * (now.per_sample // had.per_sample))


def repeat_interleave(call: Call) -> Answer:
    """Every entry of a dimension several times, one after another."""
    state = call.state(0)
    if not isinstance(state, PerSample) or len(call.shape) != call.rank_of(0):
        return whole(call, state)
    return state if only_batch_dim(call.shape) == state.dim else None


# --- Parts ---------------------------------------------------------------------------------------


def narrow(call: Call) -> Answer:
    """A range of a dimension."""
    state, dim = call.state(0), call.dim(1)
    if not isinstance(state, PerSample | Position):
        return whole(call, state)
    if state.dim != dim:
        return state
    had, now = call.shape_of(call.name(0))[dim], call.shape[dim]
    if had == now and call.argument(4, "step", 1) == 1:
        return state
    if isinstance(state, Position):
        return Refused(_SOME)
    return _pieces(call, state, had, now) if call.argument(2, "start") in (0, None) else None


def _pieces(call: Call, state: PerSample, had: Size, now: Size) -> Answer:
    """Return the state of one of several equal pieces, end to end, of the sample dimension: each
    has all samples where the dimension counts through whole batches."""
    if state.uniform:
        return state if not now.fixed and now.per_sample else None
    whole = had.per_sample // state.before  # elements per sample between two whole batches
    if now.fixed or not now.per_sample or now.per_sample % whole or had.per_sample % now.per_sample:
        return Refused(_SOME)
    return replace(state, before=now.per_sample // whole)


def split(call: Call) -> Answer:
    """Pieces of a dimension, one after another: a tuple, whose items `item` looks at."""
    state, dim = call.state(0), call.dim(2)
    if isinstance(state, PerSample) and state.dim != dim:
        return state
    return state if isinstance(state, Fixed | Pooled | PerSample) else None


def item(call: Call) -> Answer:
    """One of the values that an operation made together."""
    state, number = call.state(0), call.argument(1)
    source = call.graph[call.name(0)]
    if isinstance(state, PerSample) and state.order == source.name:
        return Permutation(state.order) if number == 1 else state
    if not isinstance(state, PerSample):
        return whole(call, state)
    dim = only_batch_dim(call.shape)
    if dim is None:
        return Refused(_SOME) if not batch_dims(call.shape) else None
    pieces = ("split", "chunk", "tensor_split")
    if source.target.removeprefix("aten.").split(".")[0].startswith(pieces) and dim == state.dim:
        had = call.shape_of(source.inputs[0])[dim]
        if had != call.shape[dim]:
            return _pieces(call, state, had, call.shape[dim])
    return replace(state, dim=dim)


def select(call: Call) -> Answer:
    """One entry of a dimension, which goes."""
    state, dim = call.state(0), call.dim(1)
    if not isinstance(state, PerSample):
        return whole(call, state)
    if state.dim == dim or dim is None:
        return Refused(_SOME)
    return replace(state, dim=state.dim - (dim < state.dim))


def unbind(call: Call) -> Answer:
    """All entries of a dimension, which goes."""
    state, dim = call.state(0), call.dim(1)
    if isinstance(state, PerSample) and state.dim == dim:
        return Refused(_SOME)
    return state if isinstance(state, Fixed | Pooled | PerSample) else None


def cat(call: Call) -> Answer:
    """Values end to end along a dimension."""
    listed = call.argument(0)
    if not isinstance(listed, tuple):
        return None
    names = [x.name for x in listed if isinstance(x, Ref)]
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
        return replace(rows[0], before=len(names)) if plain and len(extents) == 1 else None
    return _together(call, states)


def stack(call: Call) -> Answer:
    """Values beside each other in a new dimension."""
    listed = call.argument(0)
    if not isinstance(listed, tuple):
        return None
    dim = call.argument(1, "dim", 0)
    if not isinstance(dim, int):
        return None
    dim %= len(call.shape)
    states: list[State] = []
    for x in listed:
        state = call.state_of(x)
        if isinstance(state, PerSample) and dim <= state.dim:
            state = replace(state, dim=state.dim + 1)
        states.append(state)
    return _together(call, states)


def _together(call: Call, states: list[State]) -> Answer:
    found = added(states)
    if found is not None:
        return found
    rows = any(isinstance(x, PerSample) for x in states)
    if all(isinstance(x, PerSample) for x in states):
        return Refused("puts different samples beside each other")
    if any(isinstance(x, Pooled) for x in states):
        return Refused(_STATISTIC if rows else "puts a sum over the batch beside a mean")
    return None


def pad(call: Call) -> Answer:
    """A number put before and after the entries of the last dimensions."""
    state, amounts = call.state(0), call.argument(1)
    if not isinstance(amounts, tuple):
        return None
    rank, padded = call.rank_of(0), len(amounts) // 2
    if isinstance(state, PerSample):
        return state if state.dim < rank - padded else Refused("adds samples to the batch")
    if isinstance(state, Pooled):
        return state if not call.argument(3, "value") and not call.argument(2, "mode") else None
    return None


# --- Indexing ------------------------------------------------------------------------------------


def index(call: Call) -> Answer:
    """Entries at places that tensors say, dimension by dimension."""
    listed = call.argument(1)
    if not isinstance(listed, tuple) or not call.name(0):
        return None
    state, indices = call.state(0), [x for x in listed if isinstance(x, Ref)]
    if len(indices) == 1 and listed[0] == indices[0]:
        found = _reordered(call, state, call.states[indices[0].name])
        if found is not None:
            return found
    places = [i for i, x in enumerate(listed) if isinstance(x, Ref)]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None  # the indexed dimensions come first, then
    if any(call.graph[x.name].dtype == "bool" for x in indices):
        return None
    rank = max(len(call.shape_of(x.name)) for x in indices)
    # The indices are broadcast to each other, and stand where the first of them does.
    among: list[PerSample] = []
    for place, x in zip(places, indices, strict=True):
        of = call.states[x.name]
        offset = places[0] + rank - len(call.shape_of(x.name))
        if isinstance(of, Position) and isinstance(state, PerSample) and state.dim == place:
            natural = state.before == 1 and not state.order
            extents = call.shape_of(call.name(0))[place], call.shape_of(x.name)[of.dim]
            if not natural or not all(map(is_whole_batch, extents)):
                return None
            among.append(PerSample(of.dim + offset))
        elif isinstance(of, PerSample) and not of.degree:
            if isinstance(state, PerSample) and state.dim == place:
                return Refused("takes samples of the batch by number")
            among.append(replace(of, dim=of.dim + offset))
        elif of == FIXED:
            if isinstance(state, PerSample) and state.dim == place:
                return Refused(_SOME)
        else:
            return None
    if isinstance(state, PerSample) and state.dim not in places:
        after = state.dim - len(places) + rank if state.dim > places[-1] else state.dim
        among.append(replace(state, dim=after))
    elif state != FIXED and not isinstance(state, PerSample):
        return state if isinstance(state, Pooled) and not among else None
    degree = state.degree if isinstance(state, PerSample) else 0
    made = added([replace(x, degree=degree) for x in among])
    if made is None:
        return Refused("looks up different samples beside each other") if among else None
    return made


def _reordered(call: Call, state: State, by: State) -> Answer:
    """Return all rows of a value in another order, where `by` is one."""
    if not isinstance(by, Permutation) or not isinstance(state, PerSample) or state.dim:
        return None
    extent, rows = call.shape_of(call.name(0))[0], call.shape[0]
    if by.inverse:
        return replace(state, order="") if state.order == by.order and extent == rows else None
    fits = Size(extent.fixed * by.unit, extent.per_sample * by.unit) == rows
    return replace(state, order=by.order) if fits and not state.order else None


def index_put(call: Call) -> Answer:
    """Values written at places: an order's inverse, where every place of a row is its number."""
    (by,) = (
        listed if isinstance(listed := call.argument(1), tuple) and len(listed) == 1 else (None,)
    )
    places = call.state_of(by) if isinstance(by, Ref) else None
    numbers = call.graph[call.name(2)].target if call.name(2) else ""
    if isinstance(places, Permutation) and places.unit == 1 and not places.inverse:
        whole = call.shape_of(call.name(2)) == call.shape
        counts = numbers == "aten.arange.default" and whole
        return replace(places, inverse=True) if counts else None
    return None


def gather(call: Call) -> Answer:
    """Entries of a dimension picked, or written, at places that a tensor of equal rank says."""
    dim, rows = call.dim(1), call.rows()
    if isinstance(rows, PerSample) and rows.dim == dim:
        return Refused("takes samples of the batch by number")
    return rows


def index_select(call: Call) -> Answer:
    """Entries of a dimension at places that a vector says."""
    state, dim = call.state(0), call.dim(1)
    if call.state(2) != FIXED or not isinstance(state, PerSample):
        return None
    return Refused(_SOME) if state.dim == dim else state


def scattered(call: Call) -> Answer:
    """One entry, or a range, of a dimension replaced by another value."""
    state, source = call.state(0), call.state(1)
    narrower = call.rank_of(1) < call.rank_of(0)
    dim = call.dim(2)
    if isinstance(source, PerSample) and narrower and dim is not None:
        source = replace(source, dim=source.dim + (dim <= source.dim))
    found = added([state, source])
    if isinstance(found, PerSample):
        if found.dim != dim:
            return found
        return Refused(_SOME) if narrower or call.shape_of(call.name(1)) != call.shape else found
    if isinstance(found, Pooled | Fixed):
        return found
    rows = isinstance(state, PerSample) and isinstance(source, PerSample)
    return Refused("puts different samples beside each other") if rows else None


def one_hot(call: Call) -> Answer:
    """A row of zeros and a one for every number."""
    state = call.state(0)
    return state if isinstance(state, PerSample) and not state.degree else None


# --- What a forward makes itself -----------------------------------------------------------------


def fresh(call: Call) -> Answer:
    """A value that only knows a shape."""
    if any(call.states[x] != FIXED and call.graph[x].shape == () for x in call.operation.inputs):
        return None  # filled with it
    return equal_rows(call.shape)


def drawn(call: Call) -> Answer:
    """Random numbers, of each sample its own or the same for all."""
    made = equal_rows(call.shape)
    return replace(made, uniform=False) if isinstance(made, PerSample) else made


def arange(call: Call) -> Answer:
    """Numbers from 0 up: the places of samples, where there are as many."""
    if call.shape and call.shape[0].per_sample:
        return Position(0) if call.kind == "arange.default" and not call.shape[0].fixed else None
    return FIXED


def extent(call: Call) -> Answer:
    """The extent of a dimension, as a number."""
    dim: Argument = call.argument(1, "dim", 0)
    shape = call.shape_of(call.name(0))
    if not isinstance(dim, int) or not shape:
        return None
    size = shape[dim]
    if not size.per_sample:
        return FIXED
    return Fixed(1) if not size.fixed else None
