"""Rules for operations that compute: elementwise, reductions, along a dimension, products, losses.

Each says how the result depends on the samples of the batch, given how its inputs do. A rule
answers `Refused` where it proves that samples meet, and None where it cannot say.
"""

from dataclasses import replace

from whale_train.strategies.independence.call import Call, Refused, only_batch_dim
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
    multiplied,
)
from whale_train.strategies.operations import Ref

Answer = State | Refused | None

_STATISTIC = "is not linear in a statistic of the whole batch"
_BESIDE = "combines each sample with a statistic of the whole batch"


def elementwise(call: Call) -> Answer:
    """Any function of one element of each input."""
    states = [call.shifted(name) for name in call.operation.inputs]
    if any(isinstance(x, Pooled) for x in states):
        rows = any(isinstance(x, PerSample) and not x.uniform for x in states)
        return Refused(_BESIDE if rows else _STATISTIC)
    if all(x == FIXED for x in states) and not batch_dims(call.shape):
        return FIXED  # numbers drawn for all samples alike, as a dropout of weights
    return call.rows()


def copying(call: Call) -> Answer:
    """What changes no value, or its sign alone. A conversion to integers rounds."""
    state = call.state(0)
    rounds = "int" in call.operation.dtype and "float" in call.graph[call.name(0)].dtype
    if isinstance(state, Permutation | Position):
        return state
    to_bool = call.operation.dtype == "bool" and call.graph[call.name(0)].dtype != "bool"
    if (rounds or to_bool) and isinstance(state, Pooled):
        return Refused(_STATISTIC)
    if (rounds or to_bool) and state != FIXED and not isinstance(state, PerSample):
        return None
    return state


def adding(call: Call) -> Answer:
    """A sum or difference."""
    states = [call.shifted(name) for name in call.operation.inputs if not _is_zero(call, name)]
    if any(call.numbers()) or not states:
        states.append(FIXED)
    found = added(states)
    if found is not None:
        return found
    pooled = any(isinstance(x, Pooled) for x in states)
    if pooled and any(isinstance(x, PerSample) for x in states):
        return Refused(_BESIDE)
    if pooled and all(isinstance(x, Pooled | Fixed) for x in states):
        return Refused("adds a sum over the samples of the batch to a mean, or to a constant")
    return elementwise(call)


def _is_zero(call: Call, name: str) -> bool:
    """Whether a value is made as zeros, as what sums begin with are."""
    of = call.graph[name]
    return of.target == "aten.zeros.default" and not batch_dims(of.shape or ())


def multiplying(call: Call) -> Answer:
    """A product."""
    states = [call.shifted(x.name) for x in call.operation.args if isinstance(x, Ref)]
    found = multiplied(states, [1] * len(states))
    return found if found is not None else elementwise(call)


def dividing(call: Call) -> Answer:
    """A quotient."""
    powers = [1 if i == 0 else -1 for i, x in enumerate(call.operation.args) if isinstance(x, Ref)]
    states = [call.shifted(x.name) for x in call.operation.args if isinstance(x, Ref)]
    found = multiplied(states, powers)
    if found is not None:
        return found
    if isinstance(states[-1], Pooled) and powers[-1] == -1:
        return Refused("divides by a statistic of the whole batch")
    return elementwise(call)


def dividing_numbers(call: Call) -> Answer:
    """Rounding division: of row numbers by the entries of a row, or of anything elementwise."""
    state, by = call.state(0), call.argument(1)
    if isinstance(state, Permutation) and isinstance(by, int) and not state.inverse:
        return replace(state, unit=state.unit * by)
    return elementwise(call)


# --- Reductions ----------------------------------------------------------------------------------


def _left(call: Call, dims: tuple[int, ...], state: PerSample) -> PerSample:
    """Return `state` after a reduction of other dimensions."""
    if call.operation.shape is None:  # a tuple: `only_batch_dim` of its items says where
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
        return Pooled(state.degree - (1 if mean else 0))
    return state if isinstance(state, Fixed | Pooled) else None


def summing(call: Call) -> Answer:
    """A sum over dimensions."""
    return _reduced(call, call.dims(1), mean=False)


def averaging(call: Call) -> Answer:
    """A mean over dimensions."""
    return _reduced(call, call.dims(1), mean=True)


def counting(call: Call) -> Answer:
    """How many of all elements are of each kind: additive, whatever the order of rows."""
    state = call.state(0)
    dims = call.dims(1) if call.kind.startswith("count_nonzero") else (0,)
    if isinstance(state, PerSample) and not state.degree:
        return _reduced(call, dims, mean=False)
    return Refused(_STATISTIC) if isinstance(state, Pooled) else None


def histogram(call: Call) -> Answer:
    """Counts between fixed ends; the ends are the data's own where both are 0."""
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
    return Refused(_STATISTIC) if isinstance(state, Pooled) else None


def reducing(call: Call) -> Answer:
    """Any other reduction over the dimensions that are the second argument."""
    return _other_reduction(call, call.dims(1))


def norm(call: Call) -> Answer:
    """A norm, whose second argument is its order."""
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
    if isinstance(state, Pooled):
        return state if linear else Refused(_STATISTIC)
    return None


def along(call: Call) -> Answer:
    """What works along one dimension, the second argument."""
    return _along(call, call.dims(1))


def along_last(call: Call) -> Answer:
    """What works along one dimension, the second argument, or the last."""
    dim = call.dim(1, default=-1)
    return _along(call, None if dim is None else (dim,))


def along_third(call: Call) -> Answer:
    """What works along one dimension, the third argument, or the last."""
    dim = call.dim(2, default=-1)
    return _along(call, None if dim is None else (dim,))


def running_sum(call: Call) -> Answer:
    """A cumulative sum, or another linear function along a dimension."""
    return _along(call, call.dims(1), linear=True)


def rolling(call: Call) -> Answer:
    """Values moved along the dimensions that are the third argument."""
    return _along(call, call.dims(2, "dims"), linear=True)


def sorting(call: Call) -> Answer:
    """Rows sorted: of the whole batch where there is no other dimension, as mixtures of experts
    sort what they hand out."""
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
    """What normalises over the last dimensions, as many as its second argument lists."""
    shape = call.argument(1, "normalized_shape")
    state, count = call.state(0), len(shape) if isinstance(shape, tuple) else 1
    if any(call.states[x] != FIXED for x in call.operation.inputs[1:]):
        return None
    rank = call.rank_of(0)
    return _along(call, tuple(range(rank - count, rank))) if state != FIXED else FIXED


def triangle(call: Call) -> Answer:
    """What works on the matrices of the last two dimensions."""
    rank = call.rank_of(0)
    return _along(call, (rank - 2, rank - 1), linear=True)


def per_image(call: Call) -> Answer:
    """What works on the channels and places of each sample, dimension 0 being the samples'."""
    state = call.state(0)
    if any(call.states[x] != FIXED for x in call.operation.inputs if x != call.name(0)):
        return None
    if isinstance(state, PerSample) and not state.degree and call.rank_of(0) > 1:
        return state if state.dim == 0 else None
    return None


def batch_norm(call: Call) -> Answer:
    """The runtime takes the statistics of torch's own modules over the whole batch."""
    training = call.argument(5, "training")
    state = call.state(0)
    if not training or call.operation.module in call.batch_norms:
        return per_image(call)
    if isinstance(state, PerSample):
        return Refused("normalises by the statistics of the batch, outside of torch's BatchNorm")
    return None


def recurrent(call: Call) -> Answer:
    """An LSTM, a GRU or a plain RNN: outputs and states, the samples where the inputs have them."""
    batch_first = call.operation.args[-1]
    state, rank = call.state(0), call.rank_of(0)
    others = [call.states[x] for x in call.operation.inputs[1:]]
    known = all(x == FIXED or isinstance(x, PerSample) for x in others)
    if not isinstance(state, PerSample) or state.degree or state.before != 1 or not known:
        return None
    if rank != 3 or state.dim != (0 if batch_first is True else 1):
        return Refused("runs along the samples of the batch") if rank in (2, 3) else None
    return replace(state, uniform=False)


# --- Products ------------------------------------------------------------------------------------


def _product(call: Call, first: int, second: int) -> Answer:
    """A matrix product of the arguments at two places."""
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
        elif not isinstance(state, Fixed | Pooled):
            return None
    if not rows:
        return multiplied([left, right], [1, 1]) or Refused(_STATISTIC)
    if any(isinstance(x, Pooled) for x in (left, right)):
        return Refused(_BESIDE)
    degree = sum(x.degree for x in (left, right) if isinstance(x, Fixed | PerSample))
    if all(summed):
        same = len({(x.before, x.order) for x in rows if not x.uniform}) <= 1
        return Pooled(degree) if same and len(rows) == 2 else None
    if any(summed):
        return Refused("sums over the samples of the batch beside those of another input")
    found = multiplied(list(rows), [1] * len(rows))
    if found is None:
        return Refused("multiplies different samples with each other")
    return replace(found, degree=degree) if isinstance(found, PerSample) else None


def matmul(call: Call) -> Answer:
    """A matrix product of two tensors."""
    return _product(call, 0, 1)


def added_product(call: Call) -> Answer:
    """A matrix product of the second and third argument, added to the first."""
    made = _product(call, 1, 2)
    if made is None or isinstance(made, Refused):
        return made
    found = added([call.shifted(call.name(0)), made])
    return found if found is not None else Refused(_STATISTIC)


def linear(call: Call) -> Answer:
    """Every row times a weight, plus a bias."""
    state, rank = call.state(0), call.rank_of(0)
    if any(call.states[x] != FIXED for x in call.operation.inputs[1:]):
        return None
    if isinstance(state, PerSample):
        if state.dim == rank - 1:
            return Refused("multiplies the samples of the batch with a weight of their number")
        return state if not state.degree else None
    biased = len(call.operation.inputs) > 2
    if isinstance(state, Pooled) and biased:
        return added([state, FIXED]) or Refused(_STATISTIC)
    return state if isinstance(state, Pooled) else None


def einsum(call: Call) -> Answer:
    """A sum of products, as its equation says."""
    equation, operands = call.argument(0), call.argument(1)
    if not isinstance(equation, str) or not isinstance(operands, tuple) or "." in equation:
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    labels, degree = set(), 0
    for term, operand in zip(inputs.split(","), operands, strict=False):
        state = call.state_of(operand)
        if isinstance(state, PerSample):
            labels.add((term[state.dim], state.before, state.order))
        elif not isinstance(state, Fixed | Pooled):
            return None
        degree += state.degree
    states = [call.state_of(operand) for operand in operands]
    if not labels:
        return multiplied(states, [1] * len(states)) or Refused(_STATISTIC)
    if any(isinstance(x, Pooled) for x in states):
        return Refused(_BESIDE)
    if len(labels) > 1:
        return Refused("multiplies different samples with each other")
    ((label, before, order),) = labels
    if label not in result:
        return Pooled(degree)
    return PerSample(result.index(label), before, degree, order=order)


def convolution(call: Call) -> Answer:
    """Every sample convolved with one weight."""
    if call.rank_of(0) != call.rank_of(1):
        return None  # without a dimension of samples
    return per_image(call)


def attention(call: Call) -> Answer:
    """Attention of each sample's queries to the same sample's keys."""
    rows = call.rows()
    if isinstance(rows, PerSample) and rows.dim >= len(call.shape) - 2:
        return Refused("attends from one sample to another")
    return rows


def grouped_product(call: Call) -> Answer:
    """The rows that each expert takes times that expert's weight: rows sorted by expert, the ends
    of experts counted from the same rows."""
    state, offsets = call.state(0), call.argument(2, "offs")
    if not isinstance(state, PerSample) or state.degree or not state.order:
        return None
    if call.state(1) != FIXED or not isinstance(offsets, Ref):
        return None
    ends = call.graph[offsets.name]
    if "cumsum" not in ends.target:
        return None
    counted = call.graph[ends.inputs[0]]
    while counted.target.startswith(("aten.to.", "aten._to_copy.")):
        counted = call.graph[counted.inputs[0]]
    of = call.states.get(counted.inputs[0]) if counted.inputs else None
    counts = counted.target.startswith(("aten.histc.", "aten.bincount."))
    same = isinstance(of, PerSample) and of.order == state.order
    return state if counts and same else None


def lookup(call: Call) -> Answer:
    """Rows of a table, by number."""
    table, numbers = call.state(0), call.state(1)
    if table != FIXED or not isinstance(numbers, PerSample) or numbers.degree:
        return None
    return numbers


# --- Losses --------------------------------------------------------------------------------------


def _loss(call: Call, reduction: object, rows: State | Refused | None) -> Answer:
    if isinstance(rows, Refused) or not isinstance(rows, PerSample):
        pooled = any(isinstance(x, Pooled) for x in call.tensors().values())
        return Refused(_STATISTIC) if pooled else rows
    if reduction in (1, 2):
        return Pooled(-1 if reduction == 1 else 0)
    dim = only_batch_dim(call.shape)
    return replace(rows, dim=dim) if reduction == 0 and dim is not None else None


def elementwise_loss(call: Call, position: int) -> Answer:
    """A loss of elements of inputs broadcast to each other; its reduction is at `position`."""
    rows = broadcast_rows(call)
    return _loss(call, call.argument(position, "reduction", 1), rows)


def row_loss(call: Call, position: int) -> Answer:
    """A loss of rows, the first dimension being the samples'; its reduction is at `position`."""
    states = [call.states[name] for name in call.operation.inputs]
    rows = [x for x in states if isinstance(x, PerSample)]
    others = any(x != FIXED and not isinstance(x, PerSample) for x in states)
    if others or any(x.dim or x.degree for x in rows):
        return _loss(call, None, None)
    one = added(list(rows)) if rows else None
    if rows and one is None:
        return Refused("compares different samples with each other")
    return _loss(call, call.argument(position, "reduction", 1), one)


def broadcast_rows(call: Call) -> Answer:
    """Inputs broadcast to each other, whatever is then made of them."""
    rank = max(len(call.shape_of(name)) for name in call.operation.inputs)
    found: list[State] = []
    for name in call.operation.inputs:
        state = call.states[name]
        if isinstance(state, PerSample) and not state.degree:
            found.append(replace(state, dim=state.dim + rank - len(call.shape_of(name))))
        elif state != FIXED:
            return None
    one = added(found or [FIXED])
    return one if one is not None else Refused("compares different samples with each other")


def target_mean(call: Call) -> Answer:
    """A cross-entropy or negative log-likelihood. A mean over targets is what the runtime makes of
    it: over the targets of the whole batch."""
    logits, targets = call.state(0), call.state(1)
    reduction = call.argument(3, "reduction", 1)
    weight = call.argument(2, "weight")
    if isinstance(weight, Ref) and call.states[weight.name] != FIXED:
        return None
    if isinstance(logits, Pooled) or isinstance(targets, Pooled):
        return Refused(_STATISTIC)
    if not isinstance(logits, PerSample) or logits.degree:
        return None
    if logits.dim != 0 or call.rank_of(0) < 2:
        return Refused("takes the samples of the batch for classes") if logits.dim == 1 else None
    if targets != FIXED and not isinstance(targets, PerSample):
        return Refused("compares the samples of the batch with each other")
    if isinstance(targets, PerSample) and added([logits, replace(targets, degree=0)]) is None:
        return Refused("compares different samples with each other")
    if reduction == 1:
        return Pooled(-1, targets=True)
    return _loss(call, reduction, replace(logits, uniform=False))
