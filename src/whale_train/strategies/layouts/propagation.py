"""Layouts are types, collectives are casts: the layout of each value of the graph over a group.

A value is replicated (R), a partial sum (P) or sharded (S). A rule for each family of operations
maps the layouts of the inputs to the layouts that the operation wants and the layout of its result.
Where a value does not have the wanted layout, a cast is inserted; each cast is one collective with
its adjoint (`runtime/comms/layout_collectives.py`). An operation without a rule takes its inputs
unsharded: an unknown model is slower, never wrong. After GSPMD (arXiv 2105.04663) and TAP (arXiv
2302.00247), on the graph of `torch.export`.

This file owns the propagation through a graph whose parameters already have layouts, which
`choose.py` chooses. It knows neither torch nor devices.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from whale_train.strategies.graph.operation_graph import Operation, OperationGraph
from whale_train.strategies.layouts.rule_table import CARRIES_SAMPLES, RULES, register_rule
from whale_train.strategies.layouts.rules.pointwise import pointwise
from whale_train.strategies.layouts.rules.views import reshape
from whale_train.strategies.layouts.types import (
    BATCH,
    ENTERED,
    Cast,
    Interval,
    Layout,
    MinUnits,
    P,
    PartialByRow,
    PartialSum,
    R,
    Replicated,
    ReplicatedPartialGrad,
    Rule,
    RuleInput,
    RuleResult,
    Shard,
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
    "Interval",
    "Layout",
    "MinUnits",
    "P",
    "PartialByRow",
    "PartialSum",
    "R",
    "Replicated",
    "ReplicatedPartialGrad",
    "Rule",
    "RuleInput",
    "RuleResult",
    "Shard",
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
]


@dataclass(frozen=True)
class Axes:
    """The axes along which values are sharded, and the units of each, which are divided among
    ranks.

    units: the number of units of every axis. An axis that is absent keeps its given cut, and is
        never united with another.
    parents: for each united axis, the axis that it was united with.
    fineness: the minimum number of units of any axis.

    An axis starts as fine as its weight. Where two axes meet in one operation they become one, and
    a view that keeps only a coarser cut leaves fewer units.
    """

    units: Mapping[str, int] = field(default_factory=dict)
    parents: Mapping[str, str] = field(default_factory=dict)
    fineness: MinUnits = field(default_factory=lambda: MinUnits(1), compare=False)

    def root(self, axis: str) -> str:
        """Return the representative of all axes united with `axis`."""
        while axis in self.parents:
            axis = self.parents[axis]
        return axis

    def laid(self, layout: Layout) -> Layout:
        """Return `layout` with its axis replaced by the representative."""
        if isinstance(layout, Shard) and layout.axis in self.parents:
            return Shard(layout.dim, self.root(layout.axis), layout.outer, layout.pieces)
        if isinstance(layout, PartialByRow) and layout.axis in self.parents:
            return PartialByRow(self.root(layout.axis), layout.rows)
        return layout

    def after(self, typing: RuleResult) -> "Axes | None":
        """Return the axes after an operation with the rule result `typing`; None where an axis
        would have too few units, or would have to change and has no units."""
        units, parents = self.units, self.parents
        for first, second in typing.unite:
            survivor, gone = self.root(first), self.root(second)
            while survivor in parents:
                survivor = parents[survivor]
            while gone in parents:
                gone = parents[gone]
            if survivor == gone:
                continue
            if survivor not in units or gone not in units:
                return None
            parents = {**parents, gone: survivor}
            units = {**units, survivor: coarsened(units[survivor], (units[gone],))}
            if not self.fineness.allows(units[survivor]):
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
        """Return the axes with the axis of the weight's layout added, as fine as its pieces allow;
        None where that leaves too few units."""
        finest = coarsened(0, layout.pieces)
        if not self.fineness.allows(finest):
            return None
        return Axes({**self.units, layout.axis: finest}, self.parents, self.fineness)


@dataclass(frozen=True)
class Assignment:
    """The layouts of a region's values, and the resulting changes to its operations.

    layouts: the layout of every value.
    casts: the changes of layout between operations.
    becomes: the distributed operation that replaces an operation, by name.
    gathered: the operations that take their inputs unsharded because no rule applies. Samples that
        are gathered for the region, such as labels, do not count, since that is the bridge into it.
    random: for each operation that draws random numbers, `shared` (the same on every rank) or `own`
        (each rank its own).
    units: the units of the given axes after all operations.
    """

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
    """Return the layouts of the operations of `region`, in graph order.

    given: the layouts of sharded parameters, and of values from outside. Any other parameter,
        buffer or constant is R.
    wanted: the layouts that values have to leave the region with. The user of such a cast is ''.
    axes: the axes of `given`, where they may be united or coarsened.
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
        if changed := operation.changes:  # later readers read the new value
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
) -> RuleResult | None:
    """Return the rule's result for an operation whose inputs are laid out as `known`.

    Returns None where no rule applies, and where samples are divided among replicas and the
    operation does not keep them apart.
    """
    if all(layout == R for layout in known.values()):
        return RuleResult({}, R)
    samples = any(isinstance(x, Shard) and x.axis == BATCH for x in known.values())
    if samples and operation.target not in CARRIES_SAMPLES:
        return None
    rule = RULES.get(operation.target)
    return rule(RuleInput(operation, known, graph, gradients)) if rule else None


def whole(known: Mapping[str, Layout]) -> RuleResult:
    """Return the rule result of an operation with unsharded inputs and an unsharded result."""
    return RuleResult(dict.fromkeys(known, R), R)


def casts_of(
    user: str,
    wants: Mapping[str, Layout],
    known: Mapping[str, Layout],
    gradients: frozenset[str],
    axes: Axes,
) -> Iterator[Cast]:
    """Yield the casts that bring values laid out as `known` to the layouts `wants` of `user`. A
    value without a gradient stays R instead of ENTERED, since no gradient comes back."""
    for name, wish in wants.items():
        source, target = axes.laid(known[name]), axes.laid(wish)
        if target == ENTERED and name not in gradients:
            target = R
        if source != target and not (target == P and isinstance(source, PartialSum)):
            yield Cast(user, name, cast_kind(source, target), source, target)


def differentiable(graph: OperationGraph) -> frozenset[str]:
    """Return the values that have a gradient: those computed from a parameter that are
    floating-point or no tensor."""
    names = graph.made_of_parameters
    return frozenset(
        name for name in names if "float" in graph[name].dtype or graph[name].shape is None
    )


def cast_kind(source: Layout, target: Layout) -> str:
    """Return the name of the collective, or of the two consecutive ones, that turns one layout into
    another."""
    match source, target:
        case Replicated(), ReplicatedPartialGrad():
            return "enter"
        case PartialSum(), Replicated():
            return "reduce"
        case Shard(), Replicated():
            return "gather"
        case Replicated(), Shard():
            return "slice"
        case Shard(), ReplicatedPartialGrad():
            return "gather_enter"
        case PartialSum(), Shard():
            return "reduce_scatter"
        case Replicated(), PartialSum():
            return "once"
        case Shard(), PartialSum():
            return "gather_once"
        case PartialSum(), ReplicatedPartialGrad():
            return "reduce_enter"
        case Shard(), Shard():
            return "reshard"
        case ReplicatedPartialGrad(), Replicated():
            return "repeated"
        case ReplicatedPartialGrad(), Shard():
            return "repeated_slice"
        case ReplicatedPartialGrad(), PartialSum():
            return "repeated_once"
    raise AssertionError(f"no cast from {source} to {target}")
