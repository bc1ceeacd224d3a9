"""Layouts: the types that say how one value of the graph is distributed over a group of ranks.

A value is replicated (R), a partial sum (P) or sharded (S). This file owns these types, the input
and the result of a layout rule, and the arithmetic of pieces. The rule of each operation is in
`rule_table.py`; `propagation.py` lays out a whole graph.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from whale_train.strategies.graph.operation_graph import (
    Argument,
    Operation,
    OperationGraph,
    Ref,
    Shape,
    Size,
)

Interval = tuple[int, int]


@dataclass(frozen=True)
class Replicated:
    """R: every rank holds the full value."""


@dataclass(frozen=True)
class ReplicatedPartialGrad:
    """R whose gradient is a partial sum: the layout of an unsharded input of a sharded
    operation."""


@dataclass(frozen=True)
class PartialSum:
    """P: the value is the sum of the values of all ranks."""


@dataclass(frozen=True)
class PartialByRow(PartialSum):
    """P in which every row (index of the first dimension) is zero on all ranks but the one that
    holds the row's expert.

    axis: the axis that the experts are sharded along.
    rows: the name of the value with the end offsets of each expert's rows.

    An operation that maps zeros to zeros may run before the sum.
    """

    axis: str
    rows: str


# Kinds of casts between DispatchedRows and shards by expert: rows are sent to the experts, row
# counts are exchanged, and rows are sent back.
DISPATCH, EXCHANGE, COMBINE = "dispatch", "exchange", "combine"


@dataclass(frozen=True)
class DispatchedRows:
    """Rows of every member's own samples, sorted by their expert.

    ends: the name of the value with the end offsets of each expert's rows.
    """

    ends: str


@dataclass(frozen=True)
class Shard:
    """S: dimension `dim` is cut along `axis`, whose intervals the plan holds.

    The dimension is `outer` repetitions of `pieces` laid end to end, and every piece is cut: along
    an axis of u units, the rank with units [start, stop) holds [start * e // u, stop * e // u) of a
    piece of extent e. A fused QKV weight [3 * heads * head_dim] cut by heads has outer=3 and one
    piece; a fused weight of unequal parts has a piece for each part. `outer` may depend on the
    batch. An empty `pieces` means one piece with as many elements as the axis has units.
    """

    dim: int
    axis: str
    outer: int | Size = 1
    pieces: tuple[int, ...] = ()


Layout = Replicated | ReplicatedPartialGrad | PartialSum | DispatchedRows | Shard
R, ENTERED, P = Replicated(), ReplicatedPartialGrad(), PartialSum()

# Attentions over positions that a group divides: with gathered keys, by heads, and in a ring. The
# latter two send keys before these are repeated for the queries that share them.
GATHERED, HEADS, RING = "gathered_attention", "heads_attention", "ring_attention"
UNREPEATED = (HEADS, RING)

BATCH = "batch"  # the axis along which replicas divide the samples
SEQUENCE = "sequence."  # in the name of an axis of tokens, before the number of tokens


def shard(dim: int, axis: str, pieces: Sequence[int], outer: int | Size = 1) -> Shard:
    """Return the layout in its unique normal form, in which `outer` counts repeated pieces."""
    count = len(pieces)
    for period in range(1, count):
        if count % period == 0 and all(pieces[i] == pieces[i % period] for i in range(count)):
            return Shard(dim, axis, times(outer, count // period), tuple(pieces[:period]))
    return Shard(dim, axis, outer, tuple(pieces))


def times(outer: int | Size, factor: int) -> int | Size:
    """Return `outer` multiplied by `factor`."""
    if isinstance(outer, Size):
        return Size(outer.fixed * factor, outer.per_sample * factor)
    return outer * factor


def flat_pieces(layout: Shard) -> tuple[int, ...] | None:
    """Return all pieces of the dimension in order; None where their number depends on the batch, or
    their extent on the axis."""
    if isinstance(layout.outer, Size) or not layout.pieces:
        return None
    return layout.pieces * layout.outer


def local_pieces(layout: Shard, intervals: Sequence[Interval], index: int) -> tuple[int, ...]:
    """Return the extents of the pieces of one repetition that member `index` holds. `intervals` are
    the intervals of the axis, in units."""
    units, (start, stop) = intervals[-1][1], intervals[index]
    return tuple(
        stop * extent // units - start * extent // units for extent in layout.pieces or (units,)
    )


def local_extent(layout: Shard, intervals: Sequence[Interval], index: int) -> Size:
    """Return the extent of the sharded dimension on member `index`. `intervals` are the intervals
    of the axis, in units."""
    extent = sum(local_pieces(layout, intervals, index))
    outer = times(layout.outer, extent)
    return outer if isinstance(outer, Size) else Size(outer)


def coarsened(units: int, extents: Iterable[int]) -> int:
    """Return the units of an axis of `units` that can be cut along every one of `extents`: their
    greatest common divisor."""
    return gcd(units, *extents)


class MinUnits:
    """The test that an axis has a unit for each of the `members` of a group.

    It records the range of group sizes for which all its answers would have been the same
    (`alike`).
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self._coarse, self._fine = 0, sys.maxsize  # largest refused, smallest allowed

    def allows(self, units: int) -> bool:
        """Return True if `units` are enough for every member to get at least one."""
        if units >= self.members:
            self._fine = min(self._fine, units)
            return True
        self._coarse = max(self._coarse, units)
        return False

    @property
    def alike(self) -> range:
        """Return the group sizes for which every answer would have been the same."""
        return range(self._coarse + 1, self._fine + 1)


@dataclass(frozen=True)
class Cast:
    """A change of layout of an operation's input.

    user: the operation that reads the value; '' where the value leaves the region.
    value: the name of the value.
    kind: the name of the collective.
    source: the layout that the value has.
    target: the layout that the user reads.
    """

    user: str
    value: str
    kind: str
    source: Layout
    target: Layout


@dataclass(frozen=True)
class RuleResult:
    """The result of a layout rule.

    wants: the layouts in which the operation wants its inputs. An absent input is taken as it is.
    gives: the layout of the result. A list of tensors has the layout of the tensor that it was
        taken from.
    becomes: the distributed operation that replaces this one; '' for none.
    unite: pairs of axes that must be cut alike from here on.
    coarsen: pairs of an axis and an extent that the axis' units must divide.
    """

    wants: Mapping[str, Layout]
    gives: Layout
    becomes: str = ""
    unite: tuple[tuple[str, str], ...] = ()
    coarsen: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RuleInput:
    """The input of a layout rule: an operation and everything that a rule may depend on.

    operation: the operation.
    layouts: the layouts of its inputs, by name.
    graph: the graph, for the shapes of values.
    gradients: the values that have a gradient.
    """

    operation: Operation
    layouts: Mapping[str, Layout]
    graph: OperationGraph
    gradients: frozenset[str] = frozenset()

    def value(self, position: int, name: str = "") -> str:
        """Return the name of the value that is the argument at `position` or the keyword `name`; ''
        for none."""
        argument = self.argument(position, None, name)
        return argument.name if isinstance(argument, Ref) else ""

    def layout(self, position: int, name: str = "") -> Layout:
        """Return the layout of the argument at `position` or the keyword `name`; R for none."""
        value = self.value(position, name)
        return self.layouts[value] if value else R

    def shape(self, position: int, name: str = "") -> Shape:
        """Return the shape of the argument at `position` or the keyword `name`."""
        return self.graph[self.value(position, name)].shape or ()

    def argument(self, position: int, default: Argument = None, name: str = "") -> Argument:
        """Return the argument at `position` or the keyword `name`; `default` if neither is
        given."""
        args = self.operation.args
        if position < len(args):
            return args[position]
        return dict(self.operation.kwargs).get(name, default)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the tensor inputs, by name."""
        shapes = {name: self.graph[name].shape for name in self.layouts}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    @property
    def rank(self) -> int:
        """Return the number of dimensions of the result."""
        return len(self.operation.shape or ())

    @property
    def only(self) -> Layout:
        """Return the layout of the first argument, the only one that most rules depend on."""
        return self.layout(0)


Rule = Callable[[RuleInput], RuleResult | None]


def dimension(argument: Argument, rank: int) -> int:
    """Return the non-negative index of a dimension of a tensor of `rank` dimensions."""
    assert isinstance(argument, int), argument
    return argument % max(rank, 1)


def dimensions(argument: Argument, rank: int) -> tuple[int, ...]:
    """Return the non-negative indices of the dimensions in `argument`: one, a list, or all of
    `rank` (for None and the empty list)."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return (argument % max(rank, 1),)
    if isinstance(argument, tuple) and argument:
        return tuple(dimension(x, rank) for x in argument)
    return tuple(range(rank))


def product(sizes: Iterable[Size]) -> tuple[int, int]:
    """Return the product of sizes as (coefficient, power of the batch), the form in which shapes
    are compared."""
    factors = list(sizes)
    power = sum(1 for size in factors if size.per_sample)
    return prod(size.per_sample or size.fixed for size in factors), power


def elements(shape: Shape, batch: int) -> int:
    """Return the number of elements of a tensor for `batch` samples."""
    return prod(size.at(batch) for size in shape)
