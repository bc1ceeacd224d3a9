"""What is known of a region before its patterns are searched: its weights, and what they count."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from whale_train.strategies.layouts import RULES, Shard
from whale_train.strategies.operations import Operation, OperationGraph
from whale_train.strategies.rules.rows import batch_norm
from whale_train.strategies.weight_cuts import Candidate, Weight

_SMALL = 100  # a weight of less than 1/100 of its block may stay whole without being counted


def limited(weight: Weight, dim: str) -> Weight:
    """With the candidates that `dim` leaves."""
    if dim == "auto":
        return weight
    allowed: Callable[[Candidate], bool] = {
        "tensor": lambda c: c.pattern != "experts",
        "sequence": lambda c: c.pattern != "experts",
        "vocabulary": lambda c: c.pattern == "vocabulary",
        "experts": lambda c: c.pattern == "experts",
    }[dim]
    kept = tuple(c for c in weight.candidates if allowed(c))
    return replace(
        weight, candidates=kept, follows=weight.follows and dim in ("tensor", "sequence")
    )


def counted_elements(weights: Mapping[str, Weight], held: Mapping[str, int]) -> dict[str, int]:
    """The elements of each weight that count as left whole: all, but of weights that are small
    beside the others of their block (the module path up to its first number)."""
    blocks: dict[str, int] = {}
    for path in weights:
        blocks[_block(path)] = blocks.get(_block(path), 0) + held[path]
    return {p: held[p] if held[p] * _SMALL >= blocks[_block(p)] else 0 for p in weights}


def transposes(
    graph: OperationGraph, weights: Mapping[str, Weight], parameters: Mapping[str, str]
) -> dict[str, str]:
    """The paths of the weights, and under the names of their transposes and copies as well."""
    found = {name: path for name, path in parameters.items() if path in weights}
    for operation in graph:
        if len(operation.inputs) == 1 and operation.inputs[0] in found:
            found[operation.name] = found[operation.inputs[0]]
    return found


def statistics(region: Sequence[Operation]) -> dict[str, str]:
    """Buffers that a batch norm updates where they stand, with their paths: cut with its input,
    never sliced from a whole copy."""
    buffers = {op.name: op.path for op in region if op.target == "buffer"}
    return {
        name: buffers[name]
        for op in region
        if RULES.get(op.target) is batch_norm
        for name in op.inputs
        if name in buffers
    }


def by_token(operation: Operation) -> Shard | None:
    """[batch, tokens, width] cut by tokens, along an axis of all values that long."""
    shape = operation.shape or ()
    if len(shape) != 3 or not shape[0].per_sample or shape[1].per_sample or shape[1].fixed < 2:
        return None
    return Shard(1, f"sequence.{shape[1].fixed}", 1, (shape[1].fixed,))


def matches(path: str, glob: str) -> bool:
    return fnmatchcase(path, glob) or fnmatchcase(path.rpartition(".")[0], glob)


def _block(path: str) -> str:
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""
