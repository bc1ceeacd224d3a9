"""Rewrites: groups of operations that a rank which runs the exported graph runs as one.

This file finds them on the operation graph, once. The plan names their operations
(`PlannedSegment.rewrites`), ranks put other functions in their place
(`runtime/graph/shard_graph.py`), and the memory model counts what these keep (`saved_tensors.py`).
"""

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from whale_train.strategies.graph.operation_graph import Argument, Operation, OperationGraph, Ref

RMS_NORM = "rms_norm"
GROUPED_KEYS = "grouped_keys"


@dataclass(frozen=True)
class Rewrite:
    """Operations that run as one.

    kind: what they compute: `rms_norm`, weight * (x * rsqrt(mean(x ** 2, -1) + eps)), or
        `grouped_keys`, an attention with fewer keys than queries.
    operations: their names in the order they run. Those of an RMSNorm are the square, its mean, the
        sum with eps, the inverse root, the product with x, casts of it to fp32, and the product
        with the weight. Those of grouped keys are the new dimension, its expansion and the reshape
        of the keys, the same three of the values, and the attention.
    """

    kind: str
    operations: tuple[str, ...]

    @property
    def unmade(self) -> tuple[str, ...]:
        """Return the large values that the operations, run as one, do not make: the normed x, and
        keys and values that are repeated."""
        return self.operations[4:-1] if self.kind == RMS_NORM else self.operations[2:-1:3]

    def repeated(self, graph: OperationGraph) -> dict[str, str]:
        """Return the keys and values that the operations, which are of `graph`, repeat, by the name
        of the repeated value."""
        if self.kind != GROUPED_KEYS:
            return {}
        sources = (graph[name].inputs[0] for name in self.operations[:-1:3])
        return dict(zip(self.unmade, sources, strict=True))


@dataclass(frozen=True)
class RewriteScope:
    """Operations that a rank runs in one go, and what stands between them.

    graph: the graph that they are of.
    operations: their names.
    gives: the values that others read.
    casts: from an operation and a value to the change of layout in which it reads the value.
        Operations that read a value in equal changes share the changed value.
    replaced: the operations in whose place other ones stand.
    cut: the dimension along which a value is cut.
    """

    graph: OperationGraph
    operations: Collection[str]
    gives: Collection[str] = ()
    casts: Mapping[tuple[str, str], Hashable] = field(default_factory=dict)
    replaced: Collection[str] = ()
    cut: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def whole(cls, graph: OperationGraph) -> "RewriteScope":
        """Return all operations of `graph`, with nothing between them."""
        return cls(graph, graph.by_name.keys())

    def rms_norms(self) -> Iterator[Rewrite]:
        """Yield the RMSNorms among the operations."""
        for name in self.operations:
            if self.graph[name].target == _TIMES:
                operations = self._norm_ending_in(self.graph[name])
                if operations and not self._changes_between(operations[0], operations[-1]):
                    yield Rewrite(RMS_NORM, operations)

    def grouped_keys(self) -> Iterator[Rewrite]:
        """Yield the attentions among the operations whose keys and values are repeated for the
        queries that share them. Keys and values that are cut by heads are repeated on each rank."""
        for name in self.operations:
            attention = self.graph[name]
            if attention.target != _ATTENTION or name in self.replaced:
                continue
            if dict(attention.kwargs).get("enable_gqa"):
                continue
            repetitions = [self._repetition(attention, value) for value in attention.args[1:3]]
            times = {number for number, _ in repetitions}
            if len(times) == 1 and times != {0}:
                operations = (x for _, names in repetitions for x in names)
                yield Rewrite(GROUPED_KEYS, (*operations, name))

    def _repetition(self, attention: Operation, value: Argument) -> tuple[int, tuple[str, ...]]:
        """Return the number of times that the heads of `value`, which `attention` reads, are
        repeated, and the operations that repeat them: a new dimension, its expansion, and a
        reshape. Return 0 and no operations for other values."""
        merged = self._made_by(attention, value, "aten.reshape.default")
        expanded = self._made_by(merged, merged.args[0], "aten.expand.default") if merged else None
        if merged is None or expanded is None or self.cut.get(expanded.name) in (1, 2):
            return 0, ()
        new, wide, sizes = expanded.args[0], expanded.args[1], merged.args[1]
        if not isinstance(new, Ref) or new.name not in self._names:
            return 0, ()
        if self.graph[new.name].target != "aten.unsqueeze.default":
            return 0, ()
        if self.graph[new.name].args[1] != 2 or not isinstance(wide, tuple) or len(wide) != 5:
            return 0, ()
        groups, times = wide[1:3]
        if not isinstance(groups, int) or not isinstance(times, int):
            return 0, ()
        if not isinstance(sizes, tuple) or len(sizes) != 4 or sizes[1] != groups * times:
            return 0, ()
        return times, (new.name, expanded.name, merged.name)

    def _made_by(self, reader: Operation, value: Argument, target: str) -> Operation | None:
        """Return the operation that makes `value`, where it is one of `target` in the scope and
        `reader` reads its value as it is; None for any other."""
        if not isinstance(value, Ref) or self.graph[value.name].target != target:
            return None
        is_plain = (reader.name, value.name) not in self.casts and value.name not in self.replaced
        return self.graph[value.name] if is_plain and value.name in self._names else None

    def _norm_ending_in(self, last: Operation) -> tuple[str, ...]:
        """Return the operations of the norm whose product with a weight is `last`, or nothing."""
        for weight, normed in (last.args, last.args[::-1]):
            casts: list[str] = []
            reader = last
            while cast := self._read_alone(reader, normed, "aten.to.dtype"):
                if cast.args[1] != "torch.float32":
                    break
                casts.insert(0, cast.name)
                reader, normed = cast, cast.args[0]
            product = self._read_alone(reader, normed, _TIMES)
            if product is None or not isinstance(weight, Ref) or weight == normed:
                continue
            for x, inverse in (product.args, product.args[::-1]):
                root = self._root_of_mean(product, x, inverse)
                if root:
                    return (*root, product.name, *casts, last.name)
        return ()

    def _root_of_mean(self, product: Operation, x: Argument, inverse: Argument) -> tuple[str, ...]:
        """Return the operations of `inverse`, which `product` reads, if it is rsqrt(mean(x ** 2,
        -1) + eps); nothing for anything else."""
        names: list[str] = []
        reader, value = product, inverse
        for target, accepts in _ROOT:
            operation = self._read_alone(reader, value, target)
            if operation is None or operation.kwargs or not accepts(operation.args[1:]):
                return ()
            names.insert(0, operation.name)
            reader, value = operation, operation.args[0]
        if value != x or not isinstance(x, Ref):
            return ()
        # Both must read x in one layout.
        read = {self.casts.get((name, x.name)) for name in (reader.name, product.name)}
        return tuple(names) if len(read) == 1 else ()

    def _read_alone(self, reader: Operation, value: Argument, target: str) -> Operation | None:
        """Return the operation that makes `value`, as `_made_by` does, where `reader` alone reads
        its value; else None."""
        maker = self._made_by(reader, value, target)
        if maker is None or maker.name in self.gives:
            return None
        users = [user for user in self.graph.users[maker.name] if user in self._names]
        return maker if users == [reader.name] else None

    def _changes_between(self, first: str, last: str) -> bool:
        """Return True if an operation from `first` to `last` writes into any value."""
        if not self._writers:
            return False
        place = self.graph.places
        return any(place[first] <= place[name] < place[last] for name in self._writers)

    @cached_property
    def _names(self) -> Collection[str]:
        return frozenset(self.operations)

    @cached_property
    def _writers(self) -> list[str]:
        """Return the operations that write into a value or a buffer."""
        operations = (self.graph[name] for name in self.operations)
        return [x.name for x in operations if x.changes or x.writes]


_TIMES = "aten.mul.Tensor"
_ATTENTION = "aten.scaled_dot_product_attention.default"
# The operations of the inverse root of a mean square, last first, and the arguments that follow
# the value that each reads.
_ROOT = (
    ("aten.rsqrt.default", lambda rest: rest == ()),
    ("aten.add.Tensor", lambda rest: len(rest) == 1 and isinstance(rest[0], float)),
    ("aten.mean.dim", lambda rest: rest == ((-1,), True)),
    ("aten.pow.Tensor_Scalar", lambda rest: rest == (2,)),
)
