"""States of the search for patterns: each is one way to lay out everything so far, and its cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whale_train.strategies.layouts.propagation import Axes, Cast, Layout, PartialByRow, Shard

# Elements of replicated weights, bytes moved, collectives: compared in this order.
StateCost = tuple[int, float, int]


@dataclass(frozen=True)
class Record:
    """The additions of one operation to a state.

    before: the record before this one.
    name: the name of the operation; '' for a record without an operation.
    layout: the layout of its value.
    casts: the casts of its inputs.
    becomes: the distributed operation that replaces it; '' for none.
    gathered: True if it takes sharded values gathered.
    decisions: the weights that it decides, as their path, pattern and layout. The pattern is '' for
        a parameter without a choice.
    """

    before: "Record | None"
    name: str
    layout: Layout
    casts: tuple[Cast, ...]
    becomes: str
    gathered: bool
    decisions: tuple[tuple[str, str, Layout], ...]


@dataclass(frozen=True)
class State:
    """One way to lay out everything so far.

    layouts: the layouts other than R of values still to be read.
    decided: the layouts of parameters still to be read, by path.
    made: the layouts to which values still to be read have been cast already.
    axes: the axes that values are sharded along.
    cost: the cost so far.
    record: the last record.
    """

    layouts: Mapping[str, Layout]
    decided: Mapping[str, Layout]
    made: Mapping[str, tuple[Layout, ...]]
    axes: Axes
    cost: StateCost
    record: Record | None


def moved(cast: Cast, size: float, gradient: bool, reduced: bool) -> tuple[float, int]:
    """Return the bytes that a cast moves per rank, forward and backward together, and its number of
    collectives.

    size: bytes that a gather moves; an all-reduce moves twice as many.
    gradient: True if the value has a gradient.
    reduced: True if the value has been all-reduced before.
    """
    back = 1.0 if gradient else 0.0
    match cast.kind:
        case "enter":
            return 2 * size, 1
        case "reduce":
            return 2 * size, 1
        case "reduce_enter":
            return (2 if reduced else 4) * size, 1 if reduced else 2
        case "gather":
            return size, 1
        case "slice" | "reduce_slice":
            return back * size, int(gradient)
        case "gather_enter" | "reduce_scatter" | "reshard":
            return (1 + back) * size, 2
        case "once":
            return 0.0, 0
    raise AssertionError(cast.kind)


def signature(state: State) -> Any:
    """Return a key of everything that decides a state's future: all layouts still to be read, with
    axes named by order of appearance, and their units."""
    names: dict[str, int] = {}
    axes = state.axes

    def of(layout: Layout) -> Any:
        if isinstance(layout, Shard):
            axis = axes.root(layout.axis)
            number = names.setdefault(axis, len(names))
            return layout.dim, layout.outer, layout.pieces, number, axes.units.get(axis)
        if isinstance(layout, PartialByRow):
            axis = axes.root(layout.axis)
            return layout.rows, names.setdefault(axis, len(names)), axes.units.get(axis)
        return layout

    return (
        tuple([(name, of(layout)) for name, layout in sorted(state.layouts.items())]),
        tuple([(path, of(layout)) for path, layout in sorted(state.decided.items())]),
        tuple([(name, *map(of, layouts)) for name, layouts in sorted(state.made.items())]),
    )


def plus(cost: StateCost, left_whole: int, sent: float, casts: int) -> StateCost:
    """Return `cost` with `left_whole` elements, `sent` bytes and `casts` collectives added."""
    return cost[0] + left_whole, cost[1] + sent, cost[2] + casts
