"""Slices of a model that are equal but for names, as the blocks of deep models are.

Results for one of them (patterns of weights, seconds, bytes) hold for all (TAP's folding, arXiv
2302.00247). Owns what makes two slices equal, and the renaming of results.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from whale_train.strategies.cost.op_work import Works
from whale_train.strategies.graph.block_paths import block_of, is_repeated
from whale_train.strategies.graph.operation_graph import (
    HELD,
    WEIGHTS,
    Argument,
    ModelProfile,
    Operation,
    OperationGraph,
    Ref,
)
from whale_train.strategies.graph.rewrites import RewriteScope
from whale_train.strategies.graph.saved_tensors import halves
from whale_train.strategies.layouts.propagation import Cast, Layout, PartialByRow, Shard
from whale_train.strategies.partition.pipeline_partition import Slice
from whale_train.strategies.tensor_parallel.candidates import WeightSharding, cuts_of
from whale_train.strategies.tensor_parallel.choose import Sharded
from whale_train.strategies.tensor_parallel.region import block_of_parameter


@dataclass(frozen=True)
class CanonicalSlices:
    """Class numbers for the slices of a model: slices that are equal but for names have the same
    number.

    profile: the model.
    works: the work of the operations of its graph.
    """

    profile: ModelProfile
    works: Works
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _own: dict[str, int] = field(default_factory=dict)

    @property
    def graph(self) -> OperationGraph:
        """Return the graph of the model."""
        return self.works.graph

    def number(self, part: Slice, shared: Collection[str]) -> int:
        """Return the class number of a slice: equal for all slices that are equal but for names.
        `shared` are the paths of parameters that other stages hold as well."""
        position = {name: i for i, name in enumerate(part.operations)}
        position |= {name: -1 - i for i, name in enumerate(part.takes)}
        graph, firsts = self.graph, dict[str, int]()  # first reader, by path and block
        rows: list[Hashable] = []
        run, block = 0, None
        for i, name in enumerate(part.operations):
            operation = graph[name]
            if self._blocks[name] != block:
                run, block = run + 1, self._blocks[name]
            path = ""
            if operation.target in WEIGHTS:
                path = self.paths[operation.path]
            rows.append(
                (
                    self._own_number(operation),
                    tuple(position[x] for x in operation.inputs),
                    tuple(position.get(x) for x in operation.after) if operation.after else (),
                    run,
                    all(x in position for x in graph.users[name]),
                    path
                    and (
                        firsts.setdefault(path, i),
                        firsts.setdefault(f"block {block_of_parameter(path)}", i),
                        path in shared,
                    ),
                )
            )
        roots: dict[str, int] = {}
        for name in part.takes:
            root = graph.memory_of[name]
            same = roots.setdefault(root, len(roots))
            rows.append((self._own_number(graph[name]), graph.num_bytes[root], same))
        rows.append(tuple(position[name] for name in part.gives))
        rows.append((part.flops, part.activation_bytes, part.entering_bytes, part.block_bytes))
        return self._number(tuple(rows))

    def renamed(self, sharded: Sharded, of: Slice, to: Slice, axes: Mapping[str, str]) -> Sharded:
        """Return the layouts `sharded` of slice `of` with the names of slice `to`, which is equal
        but for names. `axes` maps axes that are not named after weights to their new names."""
        if of.operations == to.operations and not axes:
            return sharded
        names = dict(zip((*of.operations, *of.takes), (*to.operations, *to.takes), strict=True))
        paths = {
            self.paths[self.graph[a].path]: self.paths[self.graph[b].path]
            for a, b in names.items()
            if self.graph[a].target in HELD
        }
        return _Renaming(names, {**paths, **axes}).sharded(sharded)

    # --- One operation ---

    @cached_property
    def paths(self) -> Mapping[str, str]:
        """Return the canonical path of each parameter and buffer, by every path that it has."""
        held = {op.path: op.path for op in self.graph if op.target in HELD}
        return held | {name: p.path for name, p in self.profile.weight_by_path.items()}

    @cached_property
    def _blocks(self) -> Mapping[str, str]:
        """Return the block of every operation, by name."""
        return {operation.name: block_of(operation.module) for operation in self.graph}

    @cached_property
    def _of_values(self) -> Sequence[Collection[str]]:
        """Return sets of values that tell operations apart: equal operations have values in the
        same sets."""
        graph = self.graph
        unmade = {name for x in RewriteScope.whole(graph).rms_norms() for name in x.unmade}
        return (graph.trained, self.works.with_gradient, halves(graph), unmade)

    @cached_property
    def cuts(self) -> Mapping[str, tuple[WeightSharding, ...]]:
        """Return the ways to shard the weight that an operation reads, by the operation's name."""
        weight_paths = {op.name: op.path for op in self.graph if op.target in WEIGHTS}
        return {op.name: tuple(cuts_of(self.graph, op, weight_paths)) for op in self.graph}

    def _own_number(self, operation: Operation) -> int:
        """Return the class number of an operation: equal for all operations that do the same to
        their inputs, whatever the inputs are."""
        name = operation.name
        if name not in self._own:
            places = {source: str(i) for i, source in enumerate(operation.inputs)}
            cuts = [(c.pattern, replace(c.layout, axis="")) for c in self.cuts[name]]
            row = (
                operation.target,
                operation.path if operation.target == "graph" else "",
                _skeleton(operation.args, places),
                tuple((key, _skeleton(x, places)) for key, x in operation.kwargs),
                *(operation.shape, operation.dtype, operation.flops),
                *(operation.saved, operation.memory),
                *(name in values for values in self._of_values),
                frozenset(self.works.of([name]).items()),
                is_repeated(self._blocks[name]),
                tuple(cuts),
            )
            self._own[name] = self._number(row)
        return self._own[name]

    def _number(self, row: Hashable) -> int:
        return self._numbers.setdefault(row, len(self._numbers))


def _skeleton(argument: Argument, places: Mapping[str, str]) -> Argument:
    """Return an argument with the names of inputs replaced by their `places`."""
    if isinstance(argument, Ref):
        return Ref(places[argument.name])
    if isinstance(argument, tuple):
        return tuple(_skeleton(part, places) for part in argument)
    return argument


@dataclass(frozen=True)
class _Renaming:
    """New names for the layouts of a slice.

    names: new names of values, by old name.
    paths: new paths of parameters and new names of axes, by old path or name.
    """

    names: Mapping[str, str]
    paths: Mapping[str, str]

    def sharded(self, original: Sharded) -> Sharded:
        """Return the layouts `original` with the new names."""
        laid = original.assignment
        assignment = replace(
            laid,
            layouts={self.names[x]: self.layout(layout) for x, layout in laid.layouts.items()},
            casts=tuple(self.cast(cast) for cast in laid.casts),
            becomes={self.names[x]: target for x, target in laid.becomes.items()},
            gathered=tuple(self.names[x] for x in laid.gathered),
            random={self.names[x]: whose for x, whose in laid.random.items()},
        )
        return Sharded(
            assignment,
            {self.paths[x]: self.shard(cut) for x, cut in original.weights.items()},
            {self.axis(x): units for x, units in original.axes.items()},
            {self.paths[x]: pattern for x, pattern in original.patterns.items()},
            original.groups,
        )

    def axis(self, name: str) -> str:
        """Return the new name of an axis."""
        return self.paths.get(name, name)

    def shard(self, layout: Shard) -> Shard:
        """Return a shard with its axis renamed."""
        return replace(layout, axis=self.axis(layout.axis))

    def layout(self, layout: Layout) -> Layout:
        """Return a layout with its axis and its row value renamed."""
        if isinstance(layout, Shard):
            return self.shard(layout)
        if isinstance(layout, PartialByRow):
            return PartialByRow(self.axis(layout.axis), self.names[layout.rows])
        return layout

    def cast(self, cast: Cast) -> Cast:
        """Return a cast with its reader, value and layouts renamed."""
        user = self.names[cast.user] if cast.user else ""
        ends = self.layout(cast.source), self.layout(cast.target)
        return Cast(user, self.names[cast.value], cast.kind, *ends)
