"""A region whose patterns are searched: the request, and facts about its weights."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from whale_train.strategies.graph.operation_graph import Operation, OperationGraph
from whale_train.strategies.layouts.propagation import (
    RULES,
    Layout,
    MinUnits,
    Shard,
    differentiable,
)
from whale_train.strategies.layouts.rules.pointwise import pointwise
from whale_train.strategies.layouts.rules.reductions import batch_norm, embedding
from whale_train.strategies.layouts.types import SEQUENCE
from whale_train.strategies.tensor_parallel.candidates import Weight, WeightSharding, find_weights

_SMALL = 100  # a weight of less than 1/100 of its block may be replicated at no cost


@dataclass(frozen=True)
class Region:
    """Operations to be sharded over a group of ranks.

    graph: the graph of the operations.
    operations: the operations, in order.
    parameters: canonical paths by the names of the region's parameter operations (a tied parameter
        has one path).
    held: elements of the parameters, by canonical path.
    fineness: decides whether an axis has enough units for the ranks.
    given: the layouts of values from outside.
    wanted: the layouts that values have to leave the region with.
    dim: limits the choice, as `split.dim` does.
    """

    graph: OperationGraph
    operations: tuple[Operation, ...]
    parameters: Mapping[str, str]
    held: Mapping[str, int]
    fineness: MinUnits
    given: Mapping[str, Layout]
    wanted: Mapping[str, Layout]
    dim: str

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Return the weights with a choice of patterns, by path."""
        names = {operation.name for operation in self.operations}
        weights = find_weights(self.graph, names, self.parameters, self.fineness)
        return {path: _limited(weight, self.dim) for path, weight in weights.items()}

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Return the names of the values that have a gradient."""
        return differentiable(self.graph)

    @cached_property
    def tables(self) -> Set[str]:
        """Return the paths of the weights that an embedding reads."""
        readers = {path: self.graph[weight.reader] for path, weight in self.weights.items()}
        return {path for path, reader in readers.items() if RULES.get(reader.target) is embedding}

    @cached_property
    def tied_tables(self) -> Set[str]:
        """Return the paths of the tables that an operation other than an embedding reads too, as a
        head that is tied to them does."""
        return {
            self.parameters[name]
            for operation in self.operations
            if RULES.get(operation.target) is not embedding
            for name in operation.inputs
            if self.parameters.get(name) in self.tables
        }

    @cached_property
    def table_values(self) -> Set[str]:
        """Return the names of lookups in tables, and of what is made of them element by element: a
        sum of words and positions, its dropout."""
        values = set[str]()
        for operation in self.operations:
            rule = RULES.get(operation.target)
            made = [name for name in operation.inputs if name in self.gradients]
            if rule is embedding or (rule is pointwise and made and values.issuperset(made)):
                values.add(operation.name)
        return values

    @cached_property
    def counted(self) -> dict[str, int]:
        """Return the elements of each weight that count as a cost if it is replicated."""
        return _counted_elements(self.weights, self.held)

    @cached_property
    def weight_of(self) -> dict[str, str]:
        """Return the paths of the weights, by the names of their operations and of their transposes
        and copies."""
        paths = {name: path for name, path in self.parameters.items() if path in self.weights}
        for operation in self.graph:
            if len(operation.inputs) == 1 and operation.inputs[0] in paths:
                paths[operation.name] = paths[operation.inputs[0]]
        return paths

    @cached_property
    def made_by_weight(self) -> Set[str]:
        """Return the names of the products of a weight with another value."""
        return {
            op.name for op in self.operations
            if len(op.inputs) > 1 and not self.weight_of.keys().isdisjoint(op.inputs)
        }  # fmt: skip

    @cached_property
    def statistics(self) -> dict[str, str]:
        """Return the paths of the buffers that a batch norm updates in place, by name. They are
        sharded with its input, and never sliced from a full copy."""
        buffers = {op.name: op.path for op in self.operations if op.target == "buffer"}
        return {
            name: buffers[name]
            for op in self.operations
            if RULES.get(op.target) is batch_norm
            for name in op.inputs
            if name in buffers
        }

    @cached_property
    def last_use(self) -> dict[str, int]:
        """Return the position of each value's last reader; for a parameter, the last reader of any
        of its aliases."""
        by_path: dict[str, int] = {}
        positions: dict[str, int] = {}
        for position, operation in enumerate(self.operations):
            for name in operation.inputs:
                positions[name] = position
                if path := self.parameter_path(name):
                    by_path[path] = position
        for name in positions:
            if path := self.parameter_path(name):
                positions[name] = by_path[path]
        end = len(self.operations)
        return positions | dict.fromkeys(self.wanted, end)

    @cached_property
    def uses(self) -> dict[str, int]:
        """Return the number of operations that read each parameter, by path."""
        counts: dict[str, int] = {}
        for operation in self.operations:
            for name in operation.inputs:
                if path := self.parameter_path(name):
                    counts[path] = counts.get(path, 0) + 1
        return counts

    def parameter_path(self, name: str) -> str:
        """Return the path of a parameter, or of a batch norm's statistics; '' for any other
        value."""
        return self.parameters.get(name) or self.statistics.get(name, "")


def by_token(operation: Operation) -> Shard | None:
    """Return the layout that shards a value [batch, tokens, width] by tokens, along an axis common
    to all values with as many tokens; None for a value of another shape."""
    shape = operation.shape or ()
    if len(shape) != 3 or not shape[0].per_sample or shape[1].per_sample or shape[1].fixed < 2:
        return None
    return Shard(1, f"{SEQUENCE}{shape[1].fixed}", 1, (shape[1].fixed,))


def matches(names: Iterable[str], glob: str) -> bool:
    """Return True if `glob` matches one of a weight's `names`, or the module of one."""
    return any(fnmatchcase(x, glob) or fnmatchcase(x.rpartition(".")[0], glob) for x in names)


def _limited(weight: Weight, dim: str) -> Weight:
    """Return the weight with the candidates that `dim` allows."""
    if dim == "auto":
        return weight
    allowed: Callable[[WeightSharding], bool] = {
        "tensor": lambda c: c.pattern != "experts",
        "sequence": lambda c: c.pattern != "experts",
        "vocabulary": lambda c: c.pattern == "vocabulary",
        "experts": lambda c: c.pattern == "experts",
    }[dim]
    candidates = tuple(c for c in weight.candidates if allowed(c))
    return replace(
        weight, candidates=candidates, follows=weight.follows and dim in ("tensor", "sequence")
    )


def _counted_elements(weights: Mapping[str, Weight], held: Mapping[str, int]) -> dict[str, int]:
    """Return the elements of each weight that count as a cost if it is replicated: all of them, but
    0 for a weight that is small compared to its block (the module path up to its first number)."""
    blocks: dict[str, int] = {}
    for path in weights:
        blocks[block_of_parameter(path)] = blocks.get(block_of_parameter(path), 0) + held[path]
    return {p: held[p] if held[p] * _SMALL >= blocks[block_of_parameter(p)] else 0 for p in weights}


def block_of_parameter(path: str) -> str:
    """Return the path of a parameter's block, which is the path up to the first number; '' where
    there is no number."""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""
