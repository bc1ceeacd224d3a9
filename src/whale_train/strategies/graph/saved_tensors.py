"""Bytes of the tensors that autograd saves, on one rank and in its precision.

Bytes are per sample; a value without a batch dimension counts with every sample. A value is
identified by the operation that owns its storage, so that all views of a value are one. The caller
gives the fraction of a value that a rank holds. `liveness.py` owns when values are freed.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

from whale_train.strategies.graph.operation_graph import (
    GIVEN,
    INSIDE,
    LOWERED,
    OWN,
    ModelProfile,
    Operation,
    OperationGraph,
    kind_of,
    value_bytes,
)
from whale_train.strategies.graph.rewrites import Rewrite


def whole_value(name: str) -> float:
    """Return 1.0, the fraction of a value on a rank that holds all of it."""
    return 1.0


@dataclass(frozen=True)
class View:
    """The values of a graph as one rank holds them.

    graph: the operations.
    part_of: function that returns the fraction of a value that the rank holds.
    halves: the values that are 16-bit, with half the bytes of fp32.
    casts: True if products make 16-bit copies of the wider values that they read.
    joined: the values that are not materialised, since the operation that makes them is fused with
        its readers.
    read_as: the fraction of a value that an operation reads, by (operation, value), where the value
        is gathered or sliced for it.
    reads_as_one: pairs (operation, value) of operations that share one copy of the value. Any other
        operation has a copy of its own.
    repeated: the source of each repeated value, which attention reads in its place.
    gathers_again: pairs (operation, value) of operations that save the rank's shard of the value,
        and gather it again in their backward.
    divides_positions: True if the ranks of a group hold whole weights, and divide positions.
    exchanged: the operations that save their result as they compute it, and give another copy, in
        which the members' positions lie as before.
    """

    graph: OperationGraph
    part_of: Callable[[str], float] = whole_value
    halves: frozenset[str] = frozenset()
    casts: bool = False
    joined: frozenset[str] = frozenset()
    read_as: Mapping[tuple[str, str], float] = field(default_factory=dict)
    reads_as_one: frozenset[tuple[str, str]] = frozenset()
    repeated: Mapping[str, str] = field(default_factory=dict)
    gathers_again: frozenset[tuple[str, str]] = frozenset()
    divides_positions: bool = False
    exchanged: frozenset[str] = frozenset()

    @classmethod
    def at(cls, graph: OperationGraph, precision: str) -> "View":
        """Return the view of a rank that holds full values and trains in `precision`, where 16 bits
        are autocast."""
        if precision == "fp32":
            return cls(graph)
        return cls(graph, halves=halves(graph), casts=True)

    def held_by(
        self,
        part_of: Callable[[str], float],
        read_as: Mapping[tuple[str, str], float] = MappingProxyType({}),
    ) -> "View":
        """Return this view for a rank that holds the fraction `part_of` of every value, and reads
        some values in the fractions `read_as`."""
        return replace(self, part_of=cache(part_of), read_as=read_as)

    def rewritten(self, rewrites: Collection[Rewrite]) -> "View":
        """Return this view for ranks that apply all `rewrites`."""
        repeated = (pair for x in rewrites for pair in x.repeated(self.graph).items())
        return replace(
            self,
            joined=self.joined.union(*(x.unmade for x in rewrites)),
            repeated={**self.repeated, **dict(repeated)},
            reads_as_one=self.reads_as_one.union(*(x.reads_as_one(self.graph) for x in rewrites)),
            gathers_again=self.gathers_again.union(
                *(x.gathers_again(self.graph) for x in rewrites)
            ),
        )

    def part(self, name: str) -> float:
        """Return the bytes of `name` on the rank, as a fraction of its bytes in fp32."""
        if name in self.joined:
            return 0.0
        return self.part_of(name) * (0.5 if name in self.halves else 1.0)

    def read_bytes(self, operation: Operation, name: str) -> float:
        """Return the bytes per sample of `name` as `operation` reads it, if it is gathered or
        sliced for that; else 0."""
        part = self.read_as.get((operation.name, name), 0.0)
        is_cast = self.casts and (operation.name, name) in self.gathers_again
        is_half = is_cast or name in self.halves
        return self.graph.num_bytes[name] * part * (0.5 if is_half else 1.0)

    def widened_bytes(self, operation: Operation, name: str) -> float:
        """Return the bytes per sample of the fp32 copy of `name`, a value of 16 bits, that
        `operation` reads where autocast runs it in fp32; else 0."""
        is_widened = self.casts and name in self.halves and kind_of(operation) in _WIDE
        return 2 * self.num_bytes(name) if is_widened else 0.0

    def put_together(self, operation: Operation, name: str) -> tuple[str, float] | None:
        """Return the value that is gathered or sliced for `operation` to read `name`, and the
        fraction of it that results.

        The value is `name`, or one that `name` is a view of. Returns None where the operation reads
        the original storage of the value.
        """
        if not self.read_as:
            return None
        reader = operation
        while (reader.name, name) not in self.read_as:
            reader = self.graph[name]
            if reader.memory == OWN:
                return None
            name = reader.inputs[reader.memory]
        return name, self.read_as[reader.name, name]

    def num_bytes(self, name: str) -> float:
        """Return the bytes per sample of `name` on the rank."""
        return self.graph.num_bytes[name] * self.part(name)

    def crossing_bytes(self, name: str, samples: float) -> float:
        """Return the bytes of a full value, or of its gradient, for `samples` samples, where it
        crosses to another part of the model. It is sent, or gathered for a split head, in its
        original dtype."""
        return value_bytes(self.graph[name], samples) * (0.5 if name in self.halves else 1.0)

    def inside(self, operation: Operation) -> float:
        """Return the bytes of an operation's intermediate values on the rank, as a fraction of
        their bytes in fp32. They are sharded like the most sharded value that the operation reads
        or gives."""
        names = (operation.name, *(x for x in operation.inputs if x in self.graph.trained))
        return min(self.part_of(x) for x in names) * (0.5 if operation.name in self.halves else 1)


def halves(graph: OperationGraph) -> frozenset[str]:
    """Return the values that are 16-bit under autocast: the results of products, and values
    computed from such values alone."""
    names: set[str] = set()
    for operation in graph:
        kind = kind_of(operation)
        if operation.name not in graph.trained or operation.target == "parameter":
            continue
        if kind in _WIDE:
            continue
        read = [x for x in operation.inputs if x in graph.trained]
        values = [x for x in read if graph[x].target != "parameter"]
        if kind in LOWERED or (values and names.issuperset(values)):
            names.add(operation.name)
    return frozenset(names)


# Operations that autocast, or a careful model, runs in fp32.
_WIDE = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
# The smallest tensor that is sent to the host: 83 us at the 12 GB/s of a nominal link, well above
# what it takes to begin a copy.
SENT_BYTES = 1_000_000
_EXCHANGED = -4  # in keys of `kept`: a result before members exchange its positions
_CAST = -3  # in keys of `kept`: the 16-bit copy that a product has made of a wider value


def kept(view: View, operations: Iterable[str]) -> dict[tuple[str, int], float]:
    """Return the bytes per sample that autograd saves for `operations`, in their order, each tensor
    once.

    The key is the operation that owns the tensor's storage, with `OWN`, or the operation that made
    an intermediate tensor, with `INSIDE`. A 16-bit copy that a product made has a key of its own.
    """
    saved: dict[tuple[str, int], float] = {}
    for name in operations:
        for key, num_bytes in saved_by(view, view.graph[name]):
            saved.setdefault(key, num_bytes)
    return saved


def _apart(
    view: View, operation: Operation, lowers: bool
) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the saved inputs that are gathered or sliced for `operation`, and in the model share
    their storage with another saved input, as queries, keys and values of one product do."""
    if not view.read_as:
        return
    memory_of = view.graph.memory_of
    places = [place for place, _ in operation.saved if place >= 0]
    shared = {memory_of[operation.inputs[place]] for place in places}
    for place, name in enumerate(operation.inputs):
        if place in places or memory_of[name] not in shared:
            continue
        put_together = view.put_together(operation, name)
        if put_together is not None and (operation.name, name) not in view.gathers_again:
            num_bytes = view.graph.num_bytes[put_together[0]]
            yield _made(view, put_together, num_bytes, _reader(view, operation, name), lowers)


def _reader(view: View, operation: Operation, name: str) -> str:
    """Return the end of the key of a copy of `name` that `operation` reads: '' where operations in
    `reads_as_one` share the copy; any other has its own."""
    return "" if (operation.name, name) in view.reads_as_one else f" for {operation.name}"


def _made(
    view: View, put_together: tuple[str, float], num_bytes: float, reader: str, lowers: bool
) -> tuple[tuple[str, int], float]:
    """Return the key in `kept` and the bytes per sample of a value that is gathered or sliced, of
    `num_bytes` in fp32 as a whole. A cast copy has the `reader` in its key."""
    made_of, part = put_together
    casts = lowers and made_of not in view.halves
    is_half = lowers or made_of in view.halves
    name = f"{made_of} as {part}{reader if casts else ''}"
    return (name, OWN), num_bytes * part * (0.5 if is_half else 1.0)


def on_cpus(profile: ModelProfile) -> ModelProfile:
    """Return `profile` for ranks on CPUs: with what autograd saves there."""
    graph = profile.graph
    if graph is None or not any(operation.saved_on_cpu for operation in graph):
        return profile
    there = OperationGraph(
        tuple(replace(x, saved=x.saved_on_cpu) if x.saved_on_cpu else x for x in graph)
    )
    num_bytes = sum(kept(View(there), [operation.name for operation in there]).values())
    return replace(profile, graph=there, activation_bytes=num_bytes)


def entering_values(graph: OperationGraph, operations: Collection[str]) -> set[str]:
    """Return the values that `operations` read and others compute, each by the name of the
    operation that owns its storage."""
    read = {graph.memory_of[x] for name in operations for x in graph[name].inputs}
    return {x for x in read.difference(operations) if graph[x].target not in GIVEN}


def saved_by(view: View, operation: Operation) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield the tensors that autograd saves for `operation`, each as its key in `kept` and its
    bytes per sample."""
    lowers = view.casts and kind_of(operation) in LOWERED
    for place, num_bytes in operation.saved:
        if place == INSIDE:
            yield (operation.name, INSIDE), num_bytes * view.inside(operation)
            continue
        if place == OWN and operation.name in view.exchanged:
            yield (operation.name, _EXCHANGED), num_bytes * view.part(operation.name)
        read = source = operation.name if place == OWN else operation.inputs[place]
        if source in view.repeated:
            source = view.repeated[source]
            num_bytes = view.graph.num_bytes[source]
        again = (operation.name, read) in view.gathers_again
        put_together = None if again else view.put_together(operation, source)
        source = view.graph.memory_of[source]
        reader = _reader(view, operation, read)
        if put_together is not None:
            yield _made(view, put_together, num_bytes, reader, lowers)
            continue
        is_cast = lowers and "float" in view.graph[source].dtype  # a mask of bools is not
        if is_cast and place != OWN and source not in view.halves:
            yield (source + reader, _CAST), num_bytes * view.part(source) / 2
        else:
            yield (source, OWN), num_bytes * view.part(source)
    yield from _apart(view, operation, lowers)
