"""Lay out a stage's values over a group whose members divide the positions of a sequence.

Every member holds all weights, and computes its own range of positions. What is whole is equal on
all members, and its gradient is a partial sum (`ENTERED`): the engine that sums the gradients of
weights over all its ranks completes it, so no weight has a cast. The loss is a partial sum as well,
and the members' losses add up to that of the samples.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from whale_train.strategies.context_parallel.rules import ContextRules
from whale_train.strategies.graph.operation_graph import GIVEN, Operation, OperationGraph
from whale_train.strategies.layouts.propagation import (
    Assignment,
    Axes,
    cast_kind,
    differentiable,
    whole,
)
from whale_train.strategies.layouts.types import (
    ENTERED,
    Cast,
    Layout,
    MinUnits,
    P,
    PartialSum,
    R,
    RuleInput,
    RuleResult,
    Shard,
)
from whale_train.strategies.tensor_parallel.choose import Sharded


def context_layouts(
    graph: OperationGraph,
    region: Sequence[str],
    takes: Sequence[str],
    gives: Sequence[str],
    rules: ContextRules,
) -> Sharded:
    """Return the layouts of the operations `region` of `graph` over a group.

    takes: values of other stages. They arrive whole on every member.
    gives: values for other stages, which leave whole, or the loss, which leaves as a partial sum.
    rules: the rules of the group.
    """
    return _Laying(graph, region, frozenset(takes), tuple(gives), rules).found()


@dataclass
class _Laying:
    """The layouts of a region, found operation by operation. The fields up to `rules` are the
    parameters of `context_layouts`. A value that is whole has the layout R while rules are asked.
    """

    graph: OperationGraph
    region: Sequence[str]
    takes: Set[str]
    gives: Sequence[str]
    rules: ContextRules
    layouts: dict[str, Layout] = field(default_factory=dict)
    casts: list[Cast] = field(default_factory=list)
    becomes: dict[str, str] = field(default_factory=dict)
    gathered: list[str] = field(default_factory=list)
    random: dict[str, str] = field(default_factory=dict)
    axes: Axes = field(default_factory=Axes)

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Return the values that have a gradient."""
        return differentiable(self.graph)

    def found(self) -> Sharded:
        """Return the layouts of all operations, with the casts between them."""
        self.axes = Axes(fineness=MinUnits(self.rules.members))
        chosen = set(self.region)
        for operation in self.graph:
            if operation.name in chosen and operation.target not in GIVEN:
                self._lay(operation)
        self.casts += self._leaving()
        laid = {name: self.axes.laid(layout) for name, layout in self.layouts.items()}
        casts = tuple(
            Cast(x.user, x.value, x.kind, self.axes.laid(x.source), self.axes.laid(x.target))
            for x in self.casts
        )
        used = {x.axis for x in laid.values() if isinstance(x, Shard)}
        used |= {x.target.axis for x in casts if isinstance(x.target, Shard)}
        units = {axis: n for axis, n in self.axes.units.items() if axis in used}
        members = self.rules.members
        assignment = Assignment(laid, casts, self.becomes, tuple(self.gathered), self.random, units)
        return Sharded(assignment, {}, units, {}, range(members, members + 1))

    def _lay(self, operation: Operation) -> None:
        """Lay out one operation, after all of its inputs."""
        known = {name: self._arriving(name) for name in operation.inputs}
        result = self.rules.result(RuleInput(operation, known, self.graph, self.gradients))
        after = self._axes_after(known, result) if result else None
        if result is None or after is None:
            if any(isinstance(layout, Shard) for layout in known.values()):
                self.gathered.append(operation.name)
            result, after = whole(known), self.axes
        self.axes, name = after, operation.name
        for value, layout in known.items():
            wanted = result.wants.get(value, layout)
            self.casts += self._cast(name, value, self._whole(wanted, value))
        self.layouts[name] = self.axes.laid(result.gives)
        if self.layouts[name] == ENTERED:
            self.layouts[name] = R
        if changed := operation.changes:  # later readers read the new value
            self.layouts[changed] = self.layouts[name]
        if result.becomes:
            self.becomes[name] = result.becomes
        if operation.random:
            self.random[name] = "shared" if self.layouts[name] == R else "own"

    def _arriving(self, value: str) -> Layout:
        """Return the layout in which a rule sees a value. One of another stage with positions is
        divided by each of its readers."""
        if value in self.takes and value in self.gradients and value not in self.layouts:
            return self.rules.by_position(self.graph[value].shape) or R
        return self.axes.laid(self.layouts.get(value, R))

    def _axes_after(self, known: Mapping[str, Layout], result: RuleResult) -> Axes | None:
        """Return the axes after an operation; None where an axis would have too few units."""
        axes = self.axes
        for layout in (*known.values(), *result.wants.values()):
            if isinstance(layout, Shard) and axes.root(layout.axis) not in axes.units:
                grown = axes.added(layout)
                if grown is None:
                    return None
                axes = grown
        return axes.after(result)

    def _whole(self, layout: Layout, value: str) -> Layout:
        """Return a layout that a reader wants, in which whole values that have a gradient have a
        partial one."""
        if layout in (R, ENTERED):
            return ENTERED if value in self.gradients else R
        return layout

    def _held(self, value: str) -> Layout:
        """Return the layout that a value has. A value of another stage is whole, and so is the
        gradient that the stage expects."""
        layout = self.axes.laid(self.layouts.get(value, R))
        if value in self.takes and value not in self.layouts:
            return R
        return self._whole(layout, value)

    def _cast(self, user: str, value: str, target: Layout) -> Iterator[Cast]:
        """Yield the cast of a value that `user` reads as `target`, if it needs one."""
        source, target = self._held(value), self.axes.laid(target)
        if source != target and not (target == P and isinstance(source, PartialSum)):
            yield Cast(user, value, cast_kind(source, target), source, target)

    def _leaving(self) -> Iterator[Cast]:
        """Yield the casts of the values that other stages take, and of the loss."""
        loss = self.graph.operations[-1].inputs[0]
        for value in self.gives:
            yield from self._cast("", value, P if value == loss else R)
