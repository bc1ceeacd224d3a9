"""Parts of a model that are split while the rest is replicated, of any kind.

Members of a shard group run the model on samples of their own. A split part runs on rows of other
members as well, with a shard of its weights. `routed_experts.py` and `dense_parts.py` decide which
rows, and how they get there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whale_train.strategies.graph.operation_graph import OperationGraph
from whale_train.strategies.layouts.propagation import BATCH, Assignment, Cast, Shard, cast_kind
from whale_train.strategies.tensor_parallel.candidates import sees_otherwise
from whale_train.strategies.tensor_parallel.choose import Sharded


class SplitRefused(Exception):
    """The parts cannot be told apart from the rest of the model; the text is the reason."""


@dataclass(frozen=True)
class SplitParts:
    """Split parts of a model over a shard group.

    operations: names of the operations that run on rows of other members as well. All others run on
        a member's own samples.
    sharded: layouts of these operations, and of their weights.
    """

    operations: frozenset[str]
    sharded: Sharded


def together(parts: Sequence[SplitParts]) -> SplitParts:
    """Return several parts joined into one, with a direct cast for each value that passes from one
    part to another. Raises SplitRefused where two parts have the same weight or operation, and
    where a value has no direct cast."""
    if len(parts) == 1:
        return parts[0]
    operations, weights = set[str](), set[str]()
    casts: dict[tuple[str, str], Cast] = {}
    for part in parts:
        if both := sorted(weights & part.sharded.weights.keys()):
            raise SplitRefused(f"two parts have {both[0]}")
        if twice := sorted(operations & part.operations):
            raise SplitRefused(f"two parts run {twice[0]}")
        operations |= part.operations
        weights |= part.sharded.weights.keys()
        for cast in part.sharded.assignment.casts:
            key = (cast.user, cast.value)
            casts[key] = _through(casts[key], cast) if key in casts else cast
    all_typed = [part.sharded.assignment for part in parts]
    groups = [part.sharded.groups for part in parts]
    joined = Assignment(
        {name: layout for typed in all_typed for name, layout in typed.layouts.items()},
        tuple(cast for cast in casts.values() if cast.source != cast.target),
        {name: target for typed in all_typed for name, target in typed.becomes.items()},
        tuple(name for typed in all_typed for name in typed.gathered),
        {name: whose for typed in all_typed for name, whose in typed.random.items()},
    )
    sharded = Sharded(
        joined,
        {path: cut for part in parts for path, cut in part.sharded.weights.items()},
        {axis: units for part in parts for axis, units in part.sharded.axes.items()},
        {path: pattern for part in parts for path, pattern in part.sharded.patterns.items()},
        range(max(x.start for x in groups), min(x.stop for x in groups)),
    )
    return SplitParts(frozenset(operations), sharded)


def _through(first: Cast, second: Cast) -> Cast:
    """Return the direct cast of a value from one part to another, composed of `first` and `second`:
    one casts the value to a member's own rows, the other from there. Raises SplitRefused where they
    do not."""
    for out, into in ((first, second), (second, first)):
        own = out.target
        if isinstance(own, Shard) and own.axis == BATCH and own == into.source:
            if out.source == into.target:
                return Cast(out.user, out.value, out.kind, out.source, out.source)
            kind = cast_kind(out.source, into.target)
            return Cast(out.user, out.value, kind, out.source, into.target)
    raise SplitRefused(f"{first.user} reads {first.value} of one part in another")


def seen_weights(graph: OperationGraph, parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the paths of weights by operation: `parameters`, and every operation that gives one of
    them transposed, cast or copied."""
    paths = dict(parameters)
    for operation in graph:
        if sees_otherwise(operation) and operation.inputs[0] in paths:
            paths[operation.name] = paths[operation.inputs[0]]
    return paths
