"""Dense parts beside a replicated rest: MLPs, attention, tables, whose weights a shard group
divides.

Every member of a shard group runs the model on samples of its own. Operations that a split would
shard over the group (`choose_patterns`) run on the samples of all members; operations that a split
would replicate run on a member's own samples. Where an operation on all samples takes an unsharded
value, rows are all-gathered (and reduce-scattered in the backward). Where it gives partial sums,
they are reduce-scattered to the members whose samples they belong to (and all-gathered in the
backward). These are the bytes of sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.2), along another dimension.

A value that the layouts call whole (R) is a member's own rows outside of the parts (`Shard(dim,
BATCH)`). A weight, or a value made of weights alone, is a replica there (`ENTERED`): equal on all
members, with a gradient that the replicas sum.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale_train.strategies.graph.operation_graph import (
    HELD,
    Operation,
    OperationGraph,
    Ref,
    Size,
)
from whale_train.strategies.independence.states import (
    Fixed,
    Permutation,
    PerSample,
    RowPosition,
    State,
    batch_dims,
)
from whale_train.strategies.layouts.propagation import (
    BATCH,
    ENTERED,
    RULES,
    Cast,
    Layout,
    R,
    Shard,
    cast_kind,
    differentiable,
)
from whale_train.strategies.layouts.rules.reductions import batch_norm
from whale_train.strategies.layouts.rules.views import fresh
from whale_train.strategies.partition.split_parts import SplitParts, SplitRefused
from whale_train.strategies.tensor_parallel.choose import Sharded


def dense_parts(
    graph: OperationGraph,
    operations: Sequence[str],
    gives: Sequence[str],
    states: Mapping[str, State],
    typed: Sharded,
    together: Collection[str] = (),
) -> SplitParts:
    """Return the parts of `operations` that a split of all of them would shard over the group.

    graph: the graph of the model.
    operations: names of the operations of a stage.
    gives: names of the values that other stages take.
    states: dependence of the graph's values on samples, by name.
    typed: layouts of the split.
    together: names of further operations that have to run on the samples of all members.

    Raises SplitRefused where the parts cannot be told apart from the rest.
    """
    return _Parts(graph, operations, gives, states, typed, together).found()


def number_of(graph: OperationGraph, name: str) -> Size | None:
    """Return the size of a value that is a number computed from the batch size; None for any other
    value. Such numbers are read by `sym_size`, and made from others by products and sums."""
    operation = graph[name]
    if operation.shape is not None:
        return None
    if operation.target == "aten.sym_size.int":
        of, dim = operation.args
        shape = graph[of.name].shape if isinstance(of, Ref) else None
        return shape[dim] if shape is not None and isinstance(dim, int) else None
    combine = _NUMBERS.get(operation.target)
    if combine is None or len(operation.args) != 2:
        return None
    terms = [number_of(graph, x.name) if isinstance(x, Ref) else x for x in operation.args]
    sizes = [Size(x) if isinstance(x, int) else x for x in terms]
    first, second = sizes
    if not isinstance(first, Size) or not isinstance(second, Size):
        return None
    return combine(first, second)


def _product(a: Size, b: Size) -> Size | None:
    """Return the product of two sizes; None where it is not linear in the batch."""
    if a.per_sample and b.per_sample:
        return None
    mixed = a.fixed * b.per_sample + a.per_sample * b.fixed
    return Size(a.fixed * b.fixed, mixed)


def _sum(a: Size, b: Size) -> Size:
    return Size(a.fixed + b.fixed, a.per_sample + b.per_sample)


_NUMBERS = {"<built-in function mul>": _product, "<built-in function add>": _sum}


@dataclass(frozen=True)
class _Parts:
    """The parts of `operations` that a split `typed` shards over a shard group, with the casts at
    their inputs and outputs. The fields are the parameters of `dense_parts`."""

    graph: OperationGraph
    operations: Sequence[str]
    gives: Sequence[str]
    states: Mapping[str, State]
    typed: Sharded
    together: Collection[str]

    def found(self) -> SplitParts:
        """Return the parts with the layouts of their values. Raises SplitRefused."""
        self._refuse_meetings()
        laid = self.typed.assignment
        assignment = replace(
            laid,
            layouts={name: laid.layouts[name] for name in laid.layouts if name in self._together},
            casts=tuple(self._casts()),
            random={name: whose for name, whose in laid.random.items() if name in self.inside},
        )
        return SplitParts(self.inside, replace(self.typed, assignment=assignment))

    @cached_property
    def inside(self) -> frozenset[str]:
        """Return the operations that run on the samples of all members.

        These are the operations on samples whose values `typed` shards, and those in `together`.
        Further operations are added that read from inside, or give to it, a value without rows for
        each sample: such a value cannot pass between the samples of all members and those of one.
        Numbers made from numbers inside are inside too.
        """
        laid, inside = self.typed.assignment, set[str]()
        for operation in self._listed:
            name = operation.name
            cut = laid.layouts.get(name, R) != R or name in laid.becomes
            if (cut or name in self.together) and name in self._samples:
                inside.add(name)
        before = -1
        while before < len(inside):
            before = len(inside)
            inside |= {op.name for op in self._listed if self._joins(op, inside)}
        return frozenset(inside)

    def _joins(self, operation: Operation, inside: Collection[str]) -> bool:
        """Return True if an operation has to be inside because other operations are."""
        name = operation.name
        if self._is_number(name):
            return any(x in inside for x in operation.inputs)
        if name not in self._samples:
            return False
        layouts = self.typed.assignment.layouts
        reads = any(
            x in inside and layouts.get(x, R) == R and not self._is_number(x) and not self._cut(x)
            for x in operation.inputs
        )
        return reads or (not self._cut(name) and any(x in inside for x in self.graph.users[name]))

    @cached_property
    def _together(self) -> Collection[str]:
        """Return the values that keep the layouts of the split: those inside, and shards of weights
        and of values made of weights alone. Every member holds a replica, or its own rows, of any
        other value."""
        laid = self.typed.assignment.layouts.items()
        return self.inside | {x for x, layout in laid if layout != R and x not in self._samples}

    @cached_property
    def _listed(self) -> Sequence[Operation]:
        """Return the operations of the stage, in order, without inputs, outputs, weights and
        buffers."""
        chosen = set(self.operations)
        held = ("input", "graph", "output", *HELD)
        return [op for op in self.graph if op.name in chosen and op.target not in held]

    @cached_property
    def _samples(self) -> Collection[str]:
        """Return the values that depend on the batch. All others are the same for every batch."""
        made = self.graph.descendants({op.name for op in self.graph if op.target == "input"})
        return {
            name
            for name in made
            if not isinstance(self.states.get(name), Fixed)
            or batch_dims(self.graph[name].shape or ())
        }

    @property
    def _loss(self) -> str:
        return self.graph.operations[-1].inputs[0]

    @cached_property
    def _gradients(self) -> frozenset[str]:
        return differentiable(self.graph)

    def _is_number(self, name: str) -> bool:
        """Return True if a value is a number: a size read by `sym_size`, or a product or sum."""
        operation = self.graph[name]
        return operation.target == "aten.sym_size.int" or operation.target in _NUMBERS

    def _refuse_meetings(self) -> None:
        """Raise SplitRefused where a part would normalise over the samples of all members instead
        of one replica's, and where an operation changes a value in place across the border of the
        parts."""
        for operation in self._listed:
            name, changed = operation.name, operation.changes
            if changed and (name in self.inside) != (changed in self.inside):
                raise SplitRefused(f"{name} ({operation.target}) changes {changed} in place")
            if name in self.inside and RULES.get(operation.target) is batch_norm:
                raise SplitRefused(f"{name} ({operation.target}) normalises over the batch")

    # --- Casts ---

    def _casts(self) -> Iterator[Cast]:
        """Yield the casts of the values that operations of the stage, and other stages, read."""
        known = {(cast.user, cast.value): cast for cast in self.typed.assignment.casts}
        readers = [(op.name, op.inputs) for op in self._listed]
        for user, values in (*readers, ("", tuple(self.gives))):
            for value in values:
                cast = known.get((user, value))
                if (user in self._together) == (value in self._together):
                    yield from (cast,) if cast is not None else ()
                elif user in self._together:
                    yield from self._entering(user, value, cast)
                else:
                    yield from self._leaving(user, value, cast)

    def _entering(self, user: str, value: str, cast: Cast | None) -> Iterator[Cast]:
        """Yield the cast of a value that an operation of the parts reads from outside, if it needs
        one. `cast` is the cast that the split has for the value."""
        if self._is_number(value):
            self._refuse_unknown_number(user, value)
            yield Cast(user, value, "gather", Shard(0, BATCH), R)
            return
        target = cast.target if cast is not None else R
        source: Layout | None = self._rows(user, value)
        if source is None:
            source = ENTERED if value in self._gradients else R
        if source != target and (source, target) != (R, ENTERED):
            yield Cast(user, value, cast_kind(source, target), source, target)

    def _leaving(self, user: str, value: str, cast: Cast | None) -> Iterator[Cast]:
        """Yield the cast of a value of the parts that is read outside, if it needs one. The user ''
        is another stage. `cast` is the cast that the split has for the value."""
        if self._is_number(value):
            self._refuse_unknown_number(user, value)
            yield Cast(user, value, "slice", R, Shard(0, BATCH))
            return
        if value == self._loss and not user:  # the loss of all samples is equal on all members
            yield from (cast,) if cast is not None else ()
            return
        if cast is None and self._reads_no_element(user, value):
            return
        source = cast.source if cast is not None else self.typed.assignment.layouts[value]
        target: Layout = self._rows(user, value) or ENTERED
        kind = cast_kind(source, target)
        if kind == "reduce_scatter" and value in self._summed:
            kind = "reduce_slice"
        yield Cast(user, value, kind, source, target)

    @cached_property
    def _summed(self) -> Collection[str]:
        """Return the values whose partial sums are all-reduced for a reader inside."""
        sums = ("reduce", "reduce_enter", "reduce_slice")
        casts = self.typed.assignment.casts
        return {x.value for x in casts if x.user in self._together and x.kind in sums}

    def _reads_no_element(self, user: str, value: str) -> bool:
        """Return True if an operation reads only the shape and dtype of `value`, as in a new tensor
        like it."""
        operation = self.graph[user] if user else None
        if operation is None:
            return False
        return RULES.get(operation.target) is fresh or (
            operation.target == "aten.type_as.default" and operation.inputs[0] != value
        )

    def _rows(self, user: str, value: str) -> Shard | None:
        """Return the layout of a value by the members' own rows, at the border between all samples
        and one member's; None for a value that does not depend on samples. Raises SplitRefused for
        a value without adjacent rows for each sample."""
        if value not in self._samples:
            return None
        cut = self._cut(value)
        if cut is None:
            value_name = f"{value} ({self.graph[value].target})"
            reader = f"{user} reads" if user else "another stage takes"
            rule = "has no rows for each sample next to each other"
            raise SplitRefused(f"{reader} {value_name}, which {rule}")
        return cut

    def _cut(self, value: str) -> Shard | None:
        """Return the layout of a value sharded by samples, along the dimension that holds each
        sample's rows adjacent and in the batch's order; None if no dimension does."""
        shape, state = self.graph[value].shape, self.states.get(value)
        dims = batch_dims(shape) if shape is not None else []
        if shape is None or len(dims) != 1 or shape[dims[0]].fixed:
            return None
        (dim,) = dims
        in_order = isinstance(state, PerSample) and not state.order and state.before == 1
        if in_order or (
            shape[dim] == Size(0, 1) and not isinstance(state, RowPosition | Permutation)
        ):
            return Shard(dim, BATCH)
        return None

    def _refuse_unknown_number(self, user: str, value: str) -> None:
        """Raise SplitRefused for a number whose dependence on the batch size is unknown."""
        if number_of(self.graph, value) is None:
            raise SplitRefused(f"{user} reads {value}, a number that follows the batch")
