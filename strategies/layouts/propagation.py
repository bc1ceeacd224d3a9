"""Layouts are types, collectives are casts: how each value of the graph lies over a group.

A value is replicated (R), a partial sum (P) or sharded (S). A rule per operation family says,
from the layouts that come in, which layouts the operation wants and which one comes out. Where a
value does not have the layout wanted, a cast is inserted; each cast is one collective with its
adjoint (`runtime/comms/layout_collectives.py`). An operation without a rule is given whole tensors:
an unknown model is slower, never wrong. After GSPMD (arXiv 2105.04663) and TAP (arXiv 2302.00247),
on the graph of `torch.export`.

This file owns the propagation through a graph whose parameters are laid out already; finding how
to lay them is `choose.py`'s. It knows neither torch nor devices.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from whale_train.strategies.graph.operation_graph import Operation, OperationGraph, Ref
from whale_train.strategies.layouts.rule_table import CARRIES_SAMPLES, RULES, register_rule
from whale_train.strategies.layouts.rules.pointwise import pointwise
from whale_train.strategies.layouts.rules.views import reshape
from whale_train.strategies.layouts.types import (
    BATCH,
    ENTERED,
    Cast,
    Entered,
    Fineness,
    Interval,
    Layout,
    Owned,
    P,
    PartialSum,
    R,
    Replicated,
    Rule,
    Shard,
    Typed,
    Typing,
    coarsened,
    local_extent,
    local_pieces,
)

__all__ = [
    "BATCH",
    "ENTERED",
    "RULES",
    "Assignment",
    "Axes",
    "Cast",
    "Entered",
    "Fineness",
    "Interval",
    "Layout",
    "Owned",
    "P",
    "PartialSum",
    "R",
    "Replicated",
    "Rule",
    "Shard",
    "Typed",
    "Typing",
    "assign",
    "cast_kind",
    "casts_of",
    "differentiable",
    "local_extent",
    "local_pieces",
    "pointwise",
    "register_rule",
    "reshape",
    "typing_of",
    "whole",
    "written_value",
]


@dataclass(frozen=True)
class Axes:
    """The axes along which values are cut and the units of each: what is dealt out to ranks.

    An axis starts as fine as its weight. Where two meet in one operation they become one, and a
    view that keeps only a coarser cut leaves fewer units. None may have fewer than `fineness`
    allows. Axes that are not in `units` are as they are given and meet no other.
    """

    units: Mapping[str, int] = field(default_factory=dict)
    parents: Mapping[str, str] = field(default_factory=dict)
    fineness: Fineness = field(default_factory=lambda: Fineness(1), compare=False)

    def root(self, axis: str) -> str:
        """Return the name that stands for all axes united with it."""
        while axis in self.parents:
            axis = self.parents[axis]
        return axis

    def laid(self, layout: Layout) -> Layout:
        """`layout` under its axis' one name."""
        if isinstance(layout, Shard) and layout.axis in self.parents:
            return Shard(layout.dim, self.root(layout.axis), layout.outer, layout.pieces)
        if isinstance(layout, Owned) and layout.axis in self.parents:
            return Owned(self.root(layout.axis), layout.rows)
        return layout

    def after(self, typing: Typing) -> "Axes | None":
        """Return the axes once an operation typed so has run; None where one would be too
        coarse."""
        units, parents = self.units, self.parents
        for first, second in typing.unite:
            kept, gone = self.root(first), self.root(second)
            while kept in parents:
                kept = parents[kept]
            while gone in parents:
                gone = parents[gone]
            if kept == gone:
                continue
            if kept not in units or gone not in units:
                return None
            parents = {**parents, gone: kept}
            units = {**units, kept: coarsened(units[kept], (units[gone],))}
            if not self.fineness.allows(units[kept]):
                return None
        for axis, extent in typing.coarsen:
            while axis in parents:
                axis = parents[axis]
            if axis not in units:
                return None
            if units[axis] and extent % units[axis]:
                units = {**units, axis: coarsened(units[axis], (extent,))}
            if not self.fineness.allows(units[axis]):
                return None
        if units is self.units and parents is self.parents:
            return self
        return Axes(units, parents, self.fineness)

    def added(self, layout: Shard) -> "Axes | None":
        """Return the axes with that of a weight cut so, as fine as its pieces allow."""
        finest = coarsened(0, layout.pieces)
        if not self.fineness.allows(finest):
            return None
        return Axes({**self.units, layout.axis: finest}, self.parents, self.fineness)


@dataclass(frozen=True)
class Assignment:
    """The whole region typed: each value's layout, the casts, and what was replaced. `gathered`
    are the operations given whole tensors for want of a rule (samples brought together for the
    region, such as labels, are the bridge into it and not counted). `random` are the operations
    that draw random numbers: `shared`, the same on every rank, or each rank its `own`. `units` are
    those of the axes that were given, as they are in the end."""

    layouts: dict[str, Layout]
    casts: tuple[Cast, ...]
    becomes: dict[str, str]
    gathered: tuple[str, ...]
    random: dict[str, str] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)


def assign(
    graph: OperationGraph,
    region: Iterable[str],
    given: Mapping[str, Layout],
    wanted: Mapping[str, Layout] | None = None,
    axes: Axes | None = None,
) -> Assignment:
    """Type the operations of `region` (in graph order).

    `given` are the layouts of parameters that are sharded and of values that come from outside;
    any other parameter, buffer or constant is R. Values named in `wanted` are cast to that layout
    for whoever takes them from the region (the cast's user is '').
    """
    axes = axes or Axes()
    gradients = differentiable(graph)
    layouts: dict[str, Layout] = dict(given)
    casts: list[Cast] = []
    becomes: dict[str, str] = {}
    gathered: list[str] = []
    random: dict[str, str] = {}
    chosen = set(region)
    for operation in graph:
        if operation.name not in chosen or operation.name in layouts:
            continue
        known = {name: axes.laid(layouts.get(name, R)) for name in operation.inputs}
        typing = typing_of(graph, operation, known, gradients)
        after = axes.after(typing) if typing else None
        if typing is None or after is None:
            if any(isinstance(x, Shard) and x != Shard(0, BATCH) for x in known.values()):
                gathered.append(operation.name)
            typing, after = whole(known), axes
        axes = after
        casts += casts_of(operation.name, typing.wants, known, gradients, axes)
        layouts[operation.name] = axes.laid(typing.gives)
        if changed := written_value(operation):  # whoever reads it next reads the new value
            layouts[changed] = layouts[operation.name]
        if typing.becomes:
            becomes[operation.name] = typing.becomes
        if operation.random:
            random[operation.name] = "shared" if layouts[operation.name] == R else "own"
    known = {name: layouts[name] for name in wanted or {}}
    casts += casts_of("", wanted or {}, known, gradients, axes)
    laid = {name: axes.laid(layout) for name, layout in layouts.items()}
    units = {axis: units for axis, units in axes.units.items() if axis not in axes.parents}
    return Assignment(laid, tuple(casts), becomes, tuple(gathered), random, units)


def typing_of(
    graph: OperationGraph,
    operation: Operation,
    known: Mapping[str, Layout],
    gradients: frozenset[str],
) -> Typing | None:
    """Return what the table says of an operation whose inputs are laid as `known`; None without a
    rule that applies, and where a value would be changed in place that has another layout."""
    if all(layout == R for layout in known.values()):
        return Typing({}, R)
    samples = any(isinstance(x, Shard) and x.axis == BATCH for x in known.values())
    if samples and operation.target not in CARRIES_SAMPLES:
        return None
    rule = RULES.get(operation.target)
    return rule(Typed(operation, known, graph, gradients)) if rule else None


def whole(known: Mapping[str, Layout]) -> Typing:
    """Whole tensors in, a whole tensor out."""
    return Typing(dict.fromkeys(known, R), R)


def casts_of(
    user: str,
    wants: Mapping[str, Layout],
    known: Mapping[str, Layout],
    gradients: frozenset[str],
    axes: Axes,
) -> Iterator[Cast]:
    """Yield the casts that bring values laid as `known` to what `user` wants. A value without a
    gradient need not enter: nothing comes back."""
    for name, wish in wants.items():
        source, target = axes.laid(known[name]), axes.laid(wish)
        if target == ENTERED and name not in gradients:
            target = R
        if source != target and not (target == P and isinstance(source, PartialSum)):
            yield Cast(user, name, cast_kind(source, target), source, target)


def differentiable(graph: OperationGraph) -> frozenset[str]:
    """Return the values that a gradient comes back to: floating point, and made from a
    parameter."""
    found = graph.made_of_parameters
    return frozenset(
        name for name in found if "float" in graph[name].dtype or graph[name].shape is None
    )


def written_value(operation: Operation) -> str:
    """Return the value that an operation changes in place ('' for none)."""
    name = operation.target.removeprefix("aten.").split(".")[0]
    in_place = operation.target.startswith("aten.") and name.endswith("_")
    first = operation.args[0] if operation.args else None
    return first.name if in_place and name[-2:] != "__" and isinstance(first, Ref) else ""


def cast_kind(source: Layout, target: Layout) -> str:
    """Return the collective that turns one layout into another (design §7's table), or the two of
    them that do it one after the other."""
    match source, target:
        case Replicated(), Entered():
            return "enter"
        case PartialSum(), Replicated():
            return "reduce"
        case Shard(), Replicated():
            return "gather"
        case Replicated(), Shard():
            return "slice"
        case Shard(), Entered():
            return "gather_enter"
        case PartialSum(), Shard():
            return "reduce_scatter"
        case Replicated(), PartialSum():
            return "once"
        case Shard(), PartialSum():
            return "gather_once"
        case PartialSum(), Entered():
            return "reduce_enter"
        case Shard(), Shard():
            return "reshard"
        case Entered(), Replicated():
            return "repeated"
        case Entered(), Shard():
            return "repeated_slice"
        case Entered(), PartialSum():
            return "repeated_once"
    raise AssertionError(f"no cast from {source} to {target}")
