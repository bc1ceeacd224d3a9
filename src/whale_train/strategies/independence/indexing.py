"""Rules for operations that read or write entries at places given by other values."""

from dataclasses import replace

from whale_train.strategies.graph.operation_graph import Ref, Size
from whale_train.strategies.independence.call import Answer, Call, Refused, is_whole_batch
from whale_train.strategies.independence.moving import SOME
from whale_train.strategies.independence.states import (
    FIXED,
    Fixed,
    Permutation,
    PerSample,
    Reduced,
    RowPosition,
    State,
    added,
)


def index(call: Call) -> Answer:
    """Derive the state of entries at the places that index tensors give, one for each dimension."""
    picks = call.argument(1)
    if not isinstance(picks, tuple) or not call.name(0):
        return None
    state, indices = call.state(0), [x for x in picks if isinstance(x, Ref)]
    if len(indices) == 1 and picks[0] == indices[0]:
        reordered = _reordered(call, state, call.states[indices[0].name])
        if reordered is not None:
            return reordered
    places = [i for i, x in enumerate(picks) if isinstance(x, Ref)]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None  # the indexed dimensions come first, then
    if any(call.graph[x.name].dtype == "bool" for x in indices):
        return None
    rank = max(len(call.shape_of(x.name)) for x in indices)
    # The indices are broadcast against each other, and replace the first indexed dimension.
    among: list[PerSample] = []
    for place, x in zip(places, indices, strict=True):
        of = call.states[x.name]
        offset = places[0] + rank - len(call.shape_of(x.name))
        if isinstance(of, RowPosition) and isinstance(state, PerSample) and state.dim == place:
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
                return Refused(SOME)
        else:
            return None
    if isinstance(state, PerSample) and state.dim not in places:
        after = state.dim - len(places) + rank if state.dim > places[-1] else state.dim
        among.append(replace(state, dim=after))
    elif state != FIXED and not isinstance(state, PerSample):
        return state if isinstance(state, Reduced) and not among else None
    degree = state.degree if isinstance(state, PerSample) else 0
    made = added([replace(x, degree=degree) for x in among])
    if made is None:
        return Refused("looks up different samples beside each other") if among else None
    return made


def _reordered(call: Call, state: State, by: State) -> Answer:
    """Return the state of all rows of a value in the order `by`; None where `by` is no order of
    them."""
    if not isinstance(by, Permutation) or not isinstance(state, PerSample) or state.dim:
        return None
    extent, rows = call.shape_of(call.name(0))[0], call.shape[0]
    if by.inverse:
        return replace(state, order="") if state.order == by.order and extent == rows else None
    fits = Size(extent.fixed * by.unit, extent.per_sample * by.unit) == rows
    return replace(state, order=by.order) if fits and not state.order else None


def index_put(call: Call) -> Answer:
    """Derive the state of values that are written at places. Row numbers 0, 1, ... written at the
    places of an order give the inverse of the order."""
    picks = call.argument(1)
    by = picks[0] if isinstance(picks, tuple) and len(picks) == 1 else None
    places = call.state_of(by) if isinstance(by, Ref) else None
    numbers = call.graph[call.name(2)].target if call.name(2) else ""
    if isinstance(places, Permutation) and places.unit == 1 and not places.inverse:
        is_full = call.shape_of(call.name(2)) == call.shape
        counts = numbers == "aten.arange.default" and is_full
        return replace(places, inverse=True) if counts else None
    return None


def gather(call: Call) -> Answer:
    """Derive the state of entries along a dimension that are read or written at the places given by
    a tensor of equal rank."""
    dim, rows = call.dim(1), call.rows()
    if isinstance(rows, PerSample) and rows.dim == dim:
        return Refused("takes samples of the batch by number")
    shapes = [call.shape_of(name) for name in call.operation.inputs]
    if isinstance(rows, PerSample) and len({shape[rows.dim] for shape in shapes if shape}) > 1:
        return Refused(SOME)
    return rows


def index_select(call: Call) -> Answer:
    """Derive the state of the entries along a dimension at the places that a vector gives."""
    state, dim = call.state(0), call.dim(1)
    if call.state(2) != FIXED or not isinstance(state, PerSample):
        return None
    return Refused(SOME) if state.dim == dim else state


def scattered(call: Call) -> Answer:
    """Derive the state of a value in which another value replaces one entry, or a range, of a
    dimension."""
    state, source = call.state(0), call.state(1)
    narrower = call.rank_of(1) < call.rank_of(0)
    dim = call.dim(2)
    if isinstance(source, PerSample) and narrower and dim is not None:
        source = replace(source, dim=source.dim + (dim <= source.dim))
    merged = added([state, source])
    if isinstance(merged, PerSample):
        if merged.dim != dim:
            return merged
        return Refused(SOME) if narrower or call.shape_of(call.name(1)) != call.shape else merged
    if isinstance(merged, Reduced | Fixed):
        return merged
    rows = isinstance(state, PerSample) and isinstance(source, PerSample)
    return Refused("puts different samples beside each other") if rows else None


def one_hot(call: Call) -> Answer:
    """Derive the state of one-hot rows, one for every number."""
    state = call.state(0)
    return state if isinstance(state, PerSample) and not state.degree else None


def searchsorted(call: Call) -> Answer:
    """Derive the state of the number of the batch's sorted entries that precede each of some
    constants: a sum over the samples."""
    entries = call.state(0)
    counted = isinstance(entries, PerSample) and entries.order and len(call.shape_of(call.name(0)))
    return Reduced(0) if counted == 1 and call.state(1) == FIXED else None
