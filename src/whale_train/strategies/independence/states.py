"""Dependence of a graph's values on the samples of a batch: the states and their algebra.

Let a batch of n samples be cut into parts of n_r samples. A state says how the value computed from
the whole batch follows from the values computed from the parts. `degree` counts factors of the
batch's size: a value of degree k is n^k times one that does not depend on n.

| state | the whole batch's value |
|---|---|
| Fixed(k) | n^k times a constant |
| PerSample(dim, k) | the parts' values, each over n_r^k, end to end along `dim`, times n^k |
| Reduced(k) | the sum of the parts' values, each over n_r^k, times n^k: 0 is a sum, -1 a mean |
| RowPosition | the place of every sample in its batch |
| Permutation | an order of all samples' rows, by some value of theirs |
| CrossSample | proven to be none of these |
| Unknown | nothing is known of it |
"""

from dataclasses import dataclass, replace

from whale_train.strategies.graph.operation_graph import Shape


@dataclass(frozen=True)
class Fixed:
    """A constant, times the batch's size to the power of `degree`."""

    degree: int = 0


@dataclass(frozen=True)
class PerSample:
    """Rows that each belong to one sample.

    dim: the dimension of the rows, whose extent is `before` x batch x the rows of a sample.
    before: the number of whole batches that `dim` runs through.
    degree: the power of the batch's size that is a factor of the rows.
    uniform: True if all rows are equal, so that they fit with any others.
    order: the operation that sorted the rows; '' for rows in the batch's order.
    """

    dim: int
    before: int = 1
    degree: int = 0
    uniform: bool = False
    order: str = ""


@dataclass(frozen=True)
class Reduced:
    """A sum over the samples of the batch, times the batch's size to the power of `degree`.

    degree: 0 for a sum, -1 for a mean.
    targets: True if it contains a mean over targets. The runtime normalises it by the whole batch's
        targets (`runtime/loss/global_mean.py`), where the parts are weighted as means are.
    """

    degree: int = 0
    targets: bool = False


@dataclass(frozen=True)
class RowPosition:
    """The place of every sample in its batch, along `dim`."""

    dim: int


@dataclass(frozen=True)
class Permutation:
    """Numbers of entries, or of their rows, in sorted order.

    order: the operation that sorted the entries.
    unit: the number of sorted entries in each row. An entry's number divided by `unit` is the
        number of its row.
    inverse: True if the value is instead the position of every entry in the order.
    """

    order: str
    unit: int = 1
    inverse: bool = False


@dataclass(frozen=True)
class CrossSample:
    """Proof that samples meet in the operation `name`.

    because: completes the sentence "the operation ...".
    """

    name: str
    because: str


@dataclass(frozen=True)
class Unknown:
    """State of a value that depends on the operation `name`, which no rule decides."""

    name: str


State = Fixed | PerSample | Reduced | RowPosition | Permutation | CrossSample | Unknown
FIXED = Fixed()


def batch_dims(shape: Shape) -> list[int]:
    """Return the dimensions of `shape` that depend on the batch."""
    return [dim for dim, size in enumerate(shape) if size.per_sample]


def equal_rows(shape: Shape) -> State | None:
    """Return the state of a value that is one constant everywhere; None where two dimensions, or a
    part of one, depend on the batch."""
    dims = batch_dims(shape)
    if not dims:
        return FIXED
    if len(dims) > 1 or shape[dims[0]].fixed:
        return None
    return PerSample(dims[0], uniform=True)


def beside(states: list[PerSample]) -> PerSample | None:
    """Return the common state of rows, with degree 0, of all `states`; None where rows of different
    samples would be combined. The `dim` of `states` is already an index into the result's shape."""
    distinct = {replace(x, degree=0) for x in states if not x.uniform}
    if len({x.dim for x in states}) > 1 or len(distinct) > 1:
        return None
    return distinct.pop() if distinct else replace(states[0], degree=0)


def added(states: list[State]) -> State | None:
    """Return the state of a sum of values of one shape in `states`; None where no state describes
    it."""
    rows = [x for x in states if isinstance(x, PerSample)]
    if rows:
        degrees = {x.degree for x in states if isinstance(x, PerSample | Fixed)}
        one = beside(rows)
        mixed = any(not isinstance(x, PerSample | Fixed) for x in states)
        if one is None or mixed or len(degrees) > 1:
            return None
        return replace(one, degree=degrees.pop())
    if not all(isinstance(x, Fixed | Reduced) for x in states):
        return None
    if all(isinstance(x, Fixed) for x in states):
        degrees = {x.degree for x in states if isinstance(x, Fixed)}
        return Fixed(degrees.pop()) if len(degrees) == 1 else None
    # n^k c is the sum over n samples of n^(k-1) c.
    degrees = {x.degree if isinstance(x, Reduced) else x.degree - 1 for x in states}  # type: ignore[union-attr]
    targets = any(isinstance(x, Reduced) and x.targets for x in states)
    return Reduced(degrees.pop(), targets) if len(degrees) == 1 else None


def multiplied(states: list[State], powers: list[int]) -> State | None:
    """Return the state of the product of values in `states`, each to its power of 1 or -1; None
    where no state describes it."""
    if not all(isinstance(x, Fixed | PerSample | Reduced) for x in states):
        return None
    known = [x for x in states if isinstance(x, Fixed | PerSample | Reduced)]
    degree = sum([x.degree * power for x, power in zip(known, powers, strict=True)])
    rows = [x for x in states if isinstance(x, PerSample)]
    pooled = [i for i, x in enumerate(states) if isinstance(x, Reduced)]
    if rows:
        one = beside(rows)
        return replace(one, degree=degree) if one is not None and not pooled else None
    if not pooled:
        return Fixed(degree)
    if len(pooled) > 1 or powers[pooled[0]] != 1:
        return None
    return replace(states[pooled[0]], degree=degree)  # type: ignore[arg-type]
