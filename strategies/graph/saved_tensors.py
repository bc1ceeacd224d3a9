"""What autograd keeps of a graph's values, on one rank and in its precision.

Bytes are per sample; a value without a batch counts with every sample. A value is known by the
operation in whose memory it lies, so that views of one are one. Which part of a value a rank holds
is the caller's; when anything is let go of, `liveness.py`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from whale_train.strategies.graph.operation_graph import (
    INSIDE,
    LOWERED,
    OWN,
    WEIGHTS,
    Operation,
    OperationGraph,
    kind_of,
    value_bytes,
)


def whole(name: str) -> float:
    """Return the part of a value that one holds who holds all of it."""
    return 1.0


@dataclass(frozen=True)
class View:
    """How much of every value of `graph` one rank has, as a part of its bytes in fp32: `part_of`
    it, and half of those of `halves`. Where `casts`, products make halves of what they read, each
    its own, but for those that read one value as one (`reads_as_one`: operations and values). The
    values `joined` are not there at all: what makes and reads them runs as one. `read_as` gives, by
    an operation and a value that is put together or cut for it, the part of the value that it
    reads. Of the values `repeated`, attention reads in their place what they repeat."""

    graph: OperationGraph
    part_of: Callable[[str], float] = whole
    halves: frozenset[str] = frozenset()
    casts: bool = False
    joined: frozenset[str] = frozenset()
    read_as: Mapping[tuple[str, str], float] = field(default_factory=dict)
    reads_as_one: frozenset[tuple[str, str]] = frozenset()
    repeated: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, graph: OperationGraph, precision: str) -> "View":
        """Return the view of a rank that trains in `precision`, of which 16 bits are autocast."""
        if precision == "fp32":
            return cls(graph)
        return cls(graph, halves=halves(graph), casts=True)

    def held_by(
        self,
        part_of: Callable[[str], float],
        read_as: Mapping[tuple[str, str], float] = MappingProxyType({}),
        reads_as_one: frozenset[tuple[str, str]] = frozenset(),
    ) -> "View":
        """Return the view of a rank that has a `part_of` every value, and reads some otherwise."""
        return replace(self, part_of=part_of, read_as=read_as, reads_as_one=reads_as_one)

    def rewritten(self) -> "View":
        """Return the view of ranks that rewrite the graph, which joins the operations of
        RMSNorms."""
        return replace(self, joined=joined_norms(self.graph))

    def grouped(self) -> "View":
        """Return the view of GPUs, whose attention takes keys and values that queries share without
        repeating them (`runtime/kernels/grouped_attention.py`)."""
        found = repeated_keys(self.graph)
        return replace(self, joined=self.joined | found.keys(), repeated=found)

    def part(self, name: str) -> float:
        if name in self.joined:
            return 0.0
        return self.part_of(name) * (0.5 if name in self.halves else 1.0)

    def read_bytes(self, operation: Operation, name: str) -> float:
        """Return the bytes of a value as `operation` reads it, if not as it lies; 0 if so."""
        part = self.read_as.get((operation.name, name), 0.0)
        return self.graph.num_bytes[name] * part * (0.5 if name in self.halves else 1.0)

    def put_together(self, operation: Operation, name: str) -> tuple[str, float] | None:
        """Return the value that was put together or cut for `operation` to read `name`, itself or a
        value that `name` is a view of, and the part of it that there is; None where it lies in the
        memory that it was made in."""
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
        return self.graph.num_bytes[name] * self.part(name)

    def crossing_bytes(self, name: str, samples: float) -> float:
        """Return the bytes of all of a value, or of its gradient, where it crosses to another part
        of the model: it is sent, or gathered for a split head, in the dtype it was made in."""
        return value_bytes(self.graph[name], samples) * (0.5 if name in self.halves else 1.0)

    def inside(self, operation: Operation) -> float:
        """Return the part it has of what an operation makes on the way: as cut as the most cut
        value it reads or gives."""
        names = (operation.name, *(x for x in operation.inputs if x in self.graph.trained))
        return min(self.part_of(x) for x in names) * (0.5 if operation.name in self.halves else 1)


def halves(graph: OperationGraph) -> frozenset[str]:
    """Return the values that are of 16 bits under autocast: those of products, and what is computed
    of such values alone."""
    found: set[str] = set()
    for operation in graph:
        kind = kind_of(operation)
        if operation.name not in graph.trained or operation.target == "parameter":
            continue
        if kind in _WIDE:
            continue
        read = [x for x in operation.inputs if x in graph.trained]
        values = [x for x in read if graph[x].target != "parameter"]
        if kind in LOWERED or (values and found.issuperset(values)):
            found.add(operation.name)
    return frozenset(found)


def joined_norms(graph: OperationGraph) -> frozenset[str]:
    """Return, of every weight * (x * rsqrt(..)), the product in brackets, which is not made where
    it runs as one (`runtime/kernels/rms_norm.py`)."""
    found: set[str] = set()
    for operation in graph:
        if operation.target == _TIMES and any(graph[x].target in WEIGHTS for x in operation.inputs):
            normed = (graph[memory_of(graph, x)] for x in operation.inputs)
            found |= {
                each.name
                for each in normed
                if each.target == _TIMES
                and any(graph[x].target == "aten.rsqrt.default" for x in each.inputs)
            }
    return frozenset(found)


def repeated_keys(graph: OperationGraph) -> dict[str, str]:
    """Return the keys and values that attentions read repeated, for the queries that share them,
    with what they repeat."""
    found: dict[str, str] = {}
    for operation in graph:
        if operation.target != "aten.scaled_dot_product_attention.default":
            continue
        pairs = {x: _before_repeating(graph, x) for x in operation.inputs[1:3]}
        if len(pairs) == 2 and None not in pairs.values():
            found |= {name: source for name, source in pairs.items() if source is not None}
    return found


def _before_repeating(graph: OperationGraph, name: str) -> str | None:
    """Return the value that `name` repeats along its second dimension, or None."""
    merged = graph[name]
    for target in ("aten.reshape.default", "aten.expand.default", "aten.unsqueeze.default"):
        if graph[name].target != target or not graph[name].inputs:
            return None
        name = graph[name].inputs[0]
    before = graph[name]
    if merged.shape is None or before.shape is None or len(merged.shape) != 4:
        return None
    same = [a == b for a, b in zip(merged.shape, before.shape, strict=False)]
    return name if len(before.shape) == 4 and same == [True, False, True, True] else None


_TIMES = "aten.mul.Tensor"
# What autocast, or a model that is careful, runs in fp32.
_WIDE = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
_CAST = -3  # of `kept`: the 16-bit copy that a product has made of a wider value


def memory_of(graph: OperationGraph, name: str) -> str:
    """Return the operation whose memory a value lies in."""
    while graph[name].memory != OWN:
        name = graph[name].inputs[graph[name].memory]
    return name


def kept(view: View, operations: Iterable[str]) -> dict[tuple[str, int], float]:
    """Return the bytes of a sample that autograd keeps of `operations`, in their order, each
    once: by the operation in whose memory they are (`OWN`) or inside of which they were made
    (`INSIDE`)."""
    found: dict[tuple[str, int], float] = {}
    for name in operations:
        for key, num_bytes in saved_by(view, view.graph[name]):
            found.setdefault(key, num_bytes)
    return found


def saved_by(view: View, operation: Operation) -> Iterator[tuple[tuple[str, int], float]]:
    """Yield what `operation` has autograd keep, as `kept` names it, and the bytes of a sample."""
    lowers = view.casts and kind_of(operation) in LOWERED
    for place, num_bytes in operation.saved:
        if place == INSIDE:
            yield (operation.name, INSIDE), num_bytes * view.inside(operation)
            continue
        read = source = operation.name if place == OWN else operation.inputs[place]
        if source in view.repeated:
            source = view.repeated[source]
            num_bytes = view.graph.num_bytes[source]
        put_together = view.put_together(operation, source)
        source = memory_of(view.graph, source)
        # A copy is for all that read it as one, or for this operation alone.
        reader = "" if (operation.name, read) in view.reads_as_one else f" for {operation.name}"
        if put_together is not None:
            made_of, part = put_together
            casts = lowers and made_of not in view.halves
            name = f"{made_of} as {part}{reader if casts else ''}"
            is_half = lowers or made_of in view.halves
            yield (name, OWN), num_bytes * part * (0.5 if is_half else 1.0)
            continue
        if lowers and place != OWN and source not in view.halves:
            yield (source + reader, _CAST), num_bytes * view.part(source) / 2
        else:
            yield (source, OWN), num_bytes * view.part(source)
