"""Rewrites: groups of operations that a rank which runs the exported graph executes differently.

This file finds them on the operation graph, once. The plan names their operations
(`PlannedSegment.rewrites`), ranks replace them with other functions (`runtime/graph/passes.py`),
and the models of memory and time account for the replacements.
"""

from collections.abc import Collection, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from whale_train.strategies.graph.block_paths import block_of
from whale_train.strategies.graph.operation_graph import (
    HELD,
    LOOKUP,
    LOWERED,
    PRODUCTS,
    WEIGHTS,
    Argument,
    Operation,
    OperationGraph,
    Ref,
    kind_of,
)

RMS_NORM = "rms_norm"
GROUPED_KEYS = "grouped_keys"
JOINED_PRODUCTS = "joined_products"
GATHERED_PRODUCTS = "gathered_products"
OWN_GRADIENTS = "own_gradients"
OVERLAPPED_ROWS = "overlapped_rows"
SCALED_PRODUCTS = "scaled_products"


@dataclass(frozen=True)
class Rewrite:
    """Operations that are executed differently than one by one with autograd's backward.

    kind: the kind of the rewrite.
    operations: the names of the operations, in the order they run.

    `rms_norm`: the square, its mean, the sum with eps, the inverse root, the product with x, casts
    of it to fp32, and the product with the weight. They run as one, weight * (x * rsqrt(mean(x **
    2, -1) + eps)).

    `grouped_keys`: the new dimension, its expansion and the reshape of the keys, the same three of
    the values, and the attention, which then reads keys and values unrepeated.

    `joined_products`: the only readers of a value that enters sharded work, all of them products.
    They run as one, whose backward computes weight gradients while it reduces the value's gradient.

    `gathered_products`: the only readers of a value that is sharded along the sequence and gathered
    for them, all of them products. They run as one, which gathers the value again in its backward.

    `own_gradients`: products and lookups. Each computes the gradient of its weight itself, and
    accumulates it in place or defers it.

    `scaled_products`: products that round their factors to 8 bits. They may be part of another
    rewrite of products.

    `overlapped_rows`: the operation whose rows return from their experts, and operations that run
    meanwhile.
    """

    kind: str
    operations: tuple[str, ...]

    @property
    def unmade(self) -> tuple[str, ...]:
        """Return the large values that the fused operations do not materialise: the normalised x,
        and repeated keys and values."""
        if self.kind == RMS_NORM:
            return self.operations[4:-1]
        return self.operations[2:-1:3] if self.kind == GROUPED_KEYS else ()

    def repeated(self, graph: OperationGraph) -> dict[str, str]:
        """Return the source of each repeated key or value, by the name of the repeated value.
        `graph` is the graph of the operations."""
        if self.kind != GROUPED_KEYS:
            return {}
        sources = (graph[name].inputs[0] for name in self.operations[:-1:3])
        return dict(zip(self.unmade, sources, strict=True))

    def reads_as_one(self, graph: OperationGraph) -> frozenset[tuple[str, str]]:
        """Return pairs (operation, value) in which the operation shares one cast copy of the value
        with the other operations. `graph` is the graph of the operations."""
        return self._readings(graph, JOINED_PRODUCTS, GATHERED_PRODUCTS)

    def gathers_again(self, graph: OperationGraph) -> frozenset[tuple[str, str]]:
        """Return pairs (operation, value) in which the operation saves the rank's shard of the
        value that it reads gathered. `graph` is the graph of the operations."""
        return self._readings(graph, GATHERED_PRODUCTS)

    def _readings(self, graph: OperationGraph, *kinds: str) -> frozenset[tuple[str, str]]:
        """Return the pairs of each product and the value that all products read, in a rewrite of
        one of `kinds`."""
        if self.kind not in kinds:
            return frozenset()
        value = _operands(graph[self.operations[0]])[0]
        assert isinstance(value, Ref)
        return frozenset((name, value.name) for name in self.operations)


@dataclass(frozen=True)
class RewriteScope:
    """Operations that a rank runs without interruption, and the changes between them.

    graph: the graph of the operations.
    operations: their names.
    gives: the values that others read.
    casts: the change of layout in which an operation reads a value, by (operation, value): its
        kind, source and target. Operations that read a value in equal changes share the changed
        value. The operation is '' for values that others read.
    replaced: the operations that are already replaced by others.
    cut: the dimension along which a value is sharded, by name.
    gathered: the changes, by (operation, value), that gather a value along the sequence for sharded
        work.
    unrepeated: replaced attentions that read keys before these are repeated, on any device.
    """

    graph: OperationGraph
    operations: Collection[str]
    gives: Collection[str] = ()
    casts: Mapping[tuple[str, str], tuple[str, Hashable, Hashable]] = field(default_factory=dict)
    replaced: Collection[str] = ()
    cut: Mapping[str, int] = field(default_factory=dict)
    gathered: Collection[tuple[str, str]] = ()
    unrepeated: Collection[str] = ()

    @classmethod
    def whole(cls, graph: OperationGraph) -> "RewriteScope":
        """Return the scope of all operations of `graph`, without changes between them."""
        return cls(graph, graph.by_name.keys())

    def rms_norms(self) -> Iterator[Rewrite]:
        """Yield the RMSNorms among the operations."""
        for name in self.operations:
            if self.graph[name].target == _TIMES:
                operations = self._norm_ending_in(self.graph[name])
                if operations and not self._changes_between(operations[0], operations[-1]):
                    yield Rewrite(RMS_NORM, operations)

    def grouped_keys(self) -> Iterator[Rewrite]:
        """Yield the attentions whose keys and values are repeated for the queries that share them
        (grouped-query attention). Keys and values that are sharded by heads stay repeated on each
        rank."""
        for name in self.operations:
            attention = self.graph[name]
            replaced = name in self.replaced and name not in self.unrepeated
            if attention.target != _ATTENTION or replaced:
                continue
            if dict(attention.kwargs).get("enable_gqa"):
                continue
            repetitions = [self._repetition(attention, value) for value in attention.args[1:3]]
            times = {number for number, _ in repetitions}
            if len(times) == 1 and times != {0}:
                operations = (x for _, names in repetitions for x in names)
                yield Rewrite(GROUPED_KEYS, (*operations, name))

    def joined_products(self) -> Iterator[Rewrite]:
        """Yield groups of products that are the only readers of a value which enters sharded work,
        or is gathered along the sequence for it."""
        readers: dict[tuple[str, str], list[str]] = {}
        for (user, value), (kind, *_) in self.casts.items():
            joins = kind in _ENTERS or (user, value) in self.gathered
            if joins and (user in self._names or not user):
                readers.setdefault((value, kind), []).append(user)
        changed = {self.graph[name].changes for name in self._writers}
        for (value, kind), users in readers.items():
            if value not in changed and all(self._reads_weights(user, value) for user in users):
                in_order = sorted(users, key=self.graph.places.__getitem__)
                name = JOINED_PRODUCTS if kind in _ENTERS else GATHERED_PRODUCTS
                yield Rewrite(name, tuple(in_order))

    def own_gradients(self) -> Iterator[str]:
        """Yield the products and lookups among the operations that read a weight directly."""
        for name in self.operations:
            operation = self.graph[name]
            if name in self.replaced or operation.kwargs:
                continue
            if operation.target in PRODUCTS:
                weight: Argument = _operands(operation)[1]
            elif operation.target == LOOKUP and not any(operation.args[3:]):
                weight = operation.args[0]
            else:
                continue
            if self._is_weight(name, weight):
                yield name

    def scaled_products(self, weights: Container[str]) -> Iterator[str]:
        """Yield the products among the operations that read one of `weights`, by path."""
        for name in self.operations:
            operation = self.graph[name]
            if operation.target not in PRODUCTS or operation.kwargs or name in self.replaced:
                continue
            weight = _operands(operation)[1]
            if isinstance(weight, Ref) and self.graph[weight.name].path in weights:
                yield name

    def overlapped_rows(self) -> Iterator[Rewrite]:
        """Yield the operations of the same block that can run while rows return from their experts:
        products, and operations computed from them, that the rows neither depend on nor lead to.
        A shared expert has such operations (DeepSeek-V3, Qwen2-MoE).

        There are none where no operation of the block reads both, or where an operation before it
        writes into a value, which fixes the order.
        """
        values = dict.fromkeys(x for (_, x), (kind, *_) in self.casts.items() if kind == _COMBINE)
        for value in values:
            names = tuple(self._beside_rows(value)) if value in self._names else ()
            if names:
                yield Rewrite(OVERLAPPED_ROWS, (value, *names))

    def _beside_rows(self, value: str) -> Iterator[str]:
        """Yield the names of the operations that can run while the rows of `value`, computed by
        experts, return to their members."""
        readers = (name for name in self.operations if (name, value) in self.casts)
        reader = next(readers, None)
        if reader is None:
            return
        path = block_of(self.graph[reader].module)
        names = [x for x in self.operations if block_of(self.graph[x].module) == path]
        block = [x for x in (self.graph[name] for name in names) if x.target not in HELD]
        leads, made, beside = self._leads(value, block[0].name), {value}, dict[str, None]()
        for place, operation in enumerate(block):
            is_of_beside = not beside.keys().isdisjoint(operation.inputs)
            if not made.isdisjoint(operation.inputs):
                if is_of_beside:  # this operation needs both
                    writes = any(x.changes for x in block[:place])
                    yield from () if writes or self._are_read_before(reader, beside) else beside
                    return
                made.add(operation.name)
            elif operation.name not in leads and (is_of_beside or kind_of(operation) in LOWERED):
                beside[operation.name] = None

    def _leads(self, value: str, first: str) -> Collection[str]:
        """Return the names of the operations from `first` on that `value` depends on, `value`
        included."""
        reached, place = {value}, self.graph.places
        for operation in reversed(self.graph.operations[place[first] : place[value] + 1]):
            if operation.name in reached:
                reached.update(operation.inputs)
                reached.update(operation.after)
        return reached

    def _are_read_before(self, reader: str, names: Collection[str]) -> bool:
        """Return True if an operation other than `names` reads one of `names` before `reader`
        runs."""
        place, users = self.graph.places, self.graph.users
        read = (user for name in names for user in users[name] if user not in names)
        return any(place[user] < place[reader] for user in read)

    def _reads_weights(self, name: str, value: str) -> bool:
        """Return True if the operation `name` is a product of `value` and a weight, with an
        optional bias, and reads the weight and the bias directly."""
        if not name or self.graph[name].target not in PRODUCTS or self.graph[name].kwargs:
            return False
        x, weight, bias = _operands(self.graph[name])
        if x != Ref(value) or name in self.replaced or not self._is_weight(name, weight):
            return False
        return bias is None or self._is_weight(name, bias)

    def _is_weight(self, reader: str, value: Argument) -> bool:
        """Return True if `value` is a weight that `reader` reads directly, without a cast."""
        if not isinstance(value, Ref) or self.graph[value.name].target not in WEIGHTS:
            return False
        return (reader, value.name) not in self.casts

    def _repetition(self, attention: Operation, value: Argument) -> tuple[int, tuple[str, ...]]:
        """Return the number of times that the heads of `value`, which `attention` reads, are
        repeated, and the operations that repeat them: a new dimension, its expansion, and a
        reshape. Return 0 and () for other values."""
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
        """Return the operation that makes `value`, if it is one of `target` in the scope and
        `reader` reads it without a cast; else None."""
        if not isinstance(value, Ref) or self.graph[value.name].target != target:
            return None
        is_plain = (reader.name, value.name) not in self.casts and value.name not in self.replaced
        return self.graph[value.name] if is_plain and value.name in self._names else None

    def _norm_ending_in(self, last: Operation) -> tuple[str, ...]:
        """Return the operations of the norm whose product with a weight is `last`; () for none."""
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
        -1) + eps); () for anything else."""
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
        """Return the operation that makes `value`, as `_made_by` does, if `reader` is the only
        reader; else None."""
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


def run_order(
    graph: OperationGraph, operations: Sequence[str], rewrites: Collection[Rewrite]
) -> tuple[str, ...]:
    """Return `operations`, which are of `graph`, in the order in which ranks run them: overlapped
    operations come between the start and the end of the rows' return."""
    order = list(operations)
    for rewrite in rewrites:
        if rewrite.kind == OVERLAPPED_ROWS:
            value, *beside = rewrite.operations
            made = {value}
            for name in order:
                if not made.isdisjoint(graph[name].inputs):
                    made.add(name)
            reader = next(place for place, name in enumerate(order) if name in made - {value})
            last = max(reader - 1, *(order.index(name) for name in beside))
            between = order[reader : last + 1]
            order[reader : last + 1] = [x for x in between if x not in made] + [
                x for x in between if x in made
            ]
            early = [x for x in order[: order.index(value)] if x in beside]
            order = [x for x in order if x not in early]
            after = order.index(value) + 1
            order[after:after] = early
    return tuple(order)


def _operands(product: Operation) -> tuple[Argument, Argument, Argument]:
    """Return the input, the weight and the bias (or None) of a product."""
    args = (*product.args, None)
    x, weight, bias = PRODUCTS[product.target]
    return args[x], args[weight], args[bias]


# Changes of layout whose backward all-reduces the gradient of all readers over the group.
_ENTERS = ("enter", "reduce_enter")
_COMBINE = "combine"  # the cast that returns rows from their experts
_TIMES = "aten.mul.Tensor"
_ATTENTION = "aten.scaled_dot_product_attention.default"
# The operations of the inverse root of a mean square, last first, each with a test of the arguments
# after its input.
_ROOT = (
    ("aten.rsqrt.default", lambda rest: rest == ()),
    ("aten.add.Tensor", lambda rest: len(rest) == 1 and isinstance(rest[0], float)),
    ("aten.mean.dim", lambda rest: rest == ((-1,), True)),
    ("aten.pow.Tensor_Scalar", lambda rest: rest == (2,)),
)
