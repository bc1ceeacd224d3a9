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
from whale_train.strategies.layouts.rules.reductions import batch_norm, embedding
from whale_train.strategies.tensor_parallel.candidates import Weight, WeightSharding, find_weights

SEQUENCE = "sequence."  # prefix of the name of an axis of tokens; their number follows
_SMALL = 100  # a weight of less than 1/100 of its block may stay whole without being counted


@dataclass(frozen=True)
class Region:
    """Operations to be laid over a group of ranks.

    graph: the graph of the operations.
    operations: the operations, in order.
    parameters: from the region's parameter operations to canonical paths (a tied parameter has
        one).
    held: from those paths to their elements.
    fineness: decides whether an axis has units enough for the ranks.
    given: the layouts of values from outside.
    wanted: the layouts in which values are handed on.
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
        """Return the weights that have a choice, by path."""
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
    def counted(self) -> dict[str, int]:
        """Return the elements of each weight that count where it is left whole."""
        return _counted_elements(self.weights, self.held)

    @cached_property
    def weight_of(self) -> dict[str, str]:
        """Return the paths of the weights by the names of their operations, and by those of their
        transposes and copies."""
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
        """Return the buffers that a batch norm updates in place, with their paths. They are cut
        with its input, and never sliced from a whole copy."""
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
        """Return the position of each value's last reader. A parameter has that of the last reader
        of all its aliases."""
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
    """Return the cut by tokens of a value [batch, tokens, width], along an axis of all values with
    as many tokens; None for a value of another shape."""
    shape = operation.shape or ()
    if len(shape) != 3 or not shape[0].per_sample or shape[1].per_sample or shape[1].fixed < 2:
        return None
    return Shard(1, f"{SEQUENCE}{shape[1].fixed}", 1, (shape[1].fixed,))


def matches(names: Iterable[str], glob: str) -> bool:
    """Return whether `glob` matches one of a weight's `names`, or the module of one."""
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
    kept = tuple(c for c in weight.candidates if allowed(c))
    return replace(
        weight, candidates=kept, follows=weight.follows and dim in ("tensor", "sequence")
    )


def _counted_elements(weights: Mapping[str, Weight], held: Mapping[str, int]) -> dict[str, int]:
    """Return the elements of each weight that count where it is left whole. They are all its
    elements, but 0 for a weight that is small beside the others of its block (the module path up to
    its first number)."""
    blocks: dict[str, int] = {}
    for path in weights:
        blocks[block_of_parameter(path)] = blocks.get(block_of_parameter(path), 0) + held[path]
    return {p: held[p] if held[p] * _SMALL >= blocks[block_of_parameter(p)] else 0 for p in weights}


def block_of_parameter(path: str) -> str:
    """Return the path of the block of a parameter: its path up to the first number; '' where there
    is none."""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""
