"""Runs a hand-written operation graph in NumPy: whole, and cut over ranks as its plan says.

An independent reading of what layouts mean: a shard is an index range, a partial sum is summed, a
replicated value is the same everywhere. Values of a cut graph are one array a rank; every cast is
carried out on those arrays, every operation on one rank's at a time. Only what
`operation_graphs.py` uses is implemented, and forward only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale_train.strategies.graph.operation_graph import Operation, OperationGraph, Ref
from whale_train.strategies.layouts.propagation import (
    Layout,
    PartialSum,
    Replicated,
    ReplicatedPartialGrad,
    Shard,
)
from whale_train.strategies.layouts.segment import Segment
from whale_train.strategies.partition.split_parts import SplitParts
from whale_train.strategies.schedule.apportion import tile

Array = NDArray[Any]
IGNORED = -100


def cross_entropy(logits: Array, target: Array, *rest: Any) -> Array:
    """[rows, classes] or [rows, classes, ...]; the mean over the targets that are not -100."""
    rows = np.moveaxis(logits, 1, -1).reshape(-1, logits.shape[1]).astype(np.float64)
    wanted = target.reshape(-1)
    kept = wanted != IGNORED
    log_sum = np.log(np.exp(rows).sum(axis=1))
    chosen = rows[np.arange(len(rows)), np.where(kept, wanted, 0)]
    return np.asarray((log_sum - chosen)[kept].mean())


def layer_norm(x: Array, shape: Sequence[int], weight: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    normed: Array = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    return normed


def softmax(x: Array, dim: int) -> Array:
    powers = np.exp(x)
    shares: Array = powers / powers.sum(axis=dim, keepdims=True)
    return shares


def flatten(x: Array, first: int = 0, last: int = -1) -> Array:
    last %= x.ndim
    return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])


def pad(x: Array, sizes: Sequence[int], mode: str, value: float) -> Array:
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [tuple(sizes)], constant_values=value)


def cut_slice(x: Array, dim: int = 0, start: int = 0, stop: int = 2**63 - 1) -> Array:
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, stop),)]


def affine_norm(x: Array, weight: Array, bias: Array, *rest: Any) -> Array:
    """BatchNorm in evaluation mode with statistics 0 and 1: samples do not see each other."""
    return x * weight + bias


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "linear.default": lambda x, w, b=0.0: x @ w.T + b,
    "addmm.default": lambda b, x, w: x @ w + b,
    "matmul.default": lambda x, w: x @ w,
    "mm.default": lambda x, w: x @ w,
    "embedding.default": lambda table, rows, *rest: table[rows],
    "add.Tensor": lambda x, y: x + y,
    "sub.Tensor": lambda x, y: x - y,
    "mul.Tensor": lambda x, y: x * y,
    "relu.default": lambda x: np.maximum(x, 0),
    "to.dtype": lambda x, dtype: x,
    "type_as.default": lambda x, other: x,
    "view.default": lambda x, shape: x.reshape(shape),
    "reshape.default": lambda x, shape: x.reshape(shape),
    "flatten.using_ints": flatten,
    "t.default": lambda x: x.T,
    "transpose.int": lambda x, i, j: np.swapaxes(x, i, j),
    "permute.default": lambda x, order: np.transpose(x, order),
    "slice.Tensor": cut_slice,
    "select.int": lambda x, dim, index: np.take(x, index, axis=dim),
    "unsqueeze.default": lambda x, dim: np.expand_dims(x, dim),
    "pad.default": pad,
    "mean.default": lambda x: np.asarray(x.mean()),
    "mean.dim": lambda x, dims: x.mean(dims),
    "norm.default": lambda x: np.asarray(np.linalg.norm(x)),
    "argmax.default": lambda x, dim: x.argmax(dim),
    "softmax.int": softmax,
    "layer_norm.default": layer_norm,
    "batch_norm.default": affine_norm,
    "cross_entropy_loss.default": cross_entropy,
}


def call(operation: Operation, values: Mapping[str, Array], **replaced: Any) -> Array:
    """One operation on whole arrays or on one rank's; `replaced` are arguments by position."""
    args = [values[x.name] if isinstance(x, Ref) else x for x in operation.args]
    for position, value in replaced.items():
        args[int(position[1:])] = value
    return FUNCTIONS[operation.target.removeprefix("aten.")](*args)


def run_whole(graph: OperationGraph, given: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of the graph, from its inputs, parameters and buffers by name."""
    values = dict(given)
    for operation in graph:
        if operation.target.startswith("aten.") and operation.name != "counted":
            values[operation.name] = call(operation, values)
    return values


@dataclass(frozen=True)
class Ranks:
    """How many members of each axis every rank has."""

    axes: dict[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.axes.values())))

    def indices(self, layout: Shard, extent: int) -> list[list[int]]:
        """Which indices of a dimension of `extent` each rank holds."""
        counts = self.axes[layout.axis]
        units = sum(counts)
        # Rows of samples, of which each may have several, are next to each other.
        pieces = layout.pieces or (extent if layout.axis == "batch" else units,)
        owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
        held: list[list[int]] = [[] for _ in counts]
        position = 0
        while position < extent:
            for piece in pieces:
                for i in range(piece):
                    held[owner[i * units // piece]].append(position + i)
                position += piece
        assert position == extent, (extent, counts, layout)
        return held

    def lay(self, value: Array, layout: Layout) -> list[Array]:
        """A whole value as each rank holds it."""
        if isinstance(layout, Shard):
            held = self.indices(layout, value.shape[layout.dim])
            return [np.take(value, mine, axis=layout.dim) for mine in held]
        if isinstance(layout, PartialSum):
            return [value, *(np.zeros_like(value) for _ in range(len(self) - 1))]
        assert isinstance(layout, Replicated | ReplicatedPartialGrad)
        return [value] * len(self)

    def join(self, parts: Sequence[Array], layout: Layout) -> Array:
        """The whole value that `parts` stand for. Replicas must agree."""
        if isinstance(layout, PartialSum):
            total: Array = np.sum(parts, axis=0)
            return total
        if isinstance(layout, Shard):
            extent = sum(part.shape[layout.dim] for part in parts)
            order = np.argsort(np.concatenate(self.indices(layout, extent)))
            return np.take(np.concatenate(parts, axis=layout.dim), order, axis=layout.dim)
        for part in parts:
            np.testing.assert_allclose(part, parts[0], rtol=1e-9)
        return parts[0]


def run_region(
    graph: OperationGraph, segment: Segment, given: Mapping[str, list[Array]], ranks: Ranks
) -> dict[str, list[Array]]:
    """A typed segment on every rank: `given` are inputs, parameters and what it takes, one array
    a rank in the layout the assignment has for them."""
    typed = segment.assignment
    assert typed is not None
    casts = {(cast.user, cast.value): cast for cast in typed.casts}
    values = dict(given)

    def read(user: str, name: str) -> list[Array]:
        cast = casts.get((user, name))
        if cast is None:
            return values[name]
        return ranks.lay(ranks.join(values[name], cast.source), cast.target)

    for name in segment.operations:
        operation = graph[name]
        if not operation.target.startswith("aten."):
            continue
        inputs = {value: read(name, value) for value in operation.inputs}
        mine = [{value: parts[r] for value, parts in inputs.items()} for r in range(len(ranks))]
        values[name] = _on_ranks(operation, typed.becomes.get(name, ""), typed.layouts, mine, ranks)
    return values | {name: read("", name) for name in segment.gives}


def _on_ranks(
    operation: Operation,
    becomes: str,
    layouts: Mapping[str, Layout],
    mine: list[dict[str, Array]],
    ranks: Ranks,
) -> list[Array]:
    first = operation.inputs[0]
    if becomes == "split_cross_entropy":
        logits = ranks.join([values[first] for values in mine], layouts[first])
        return [call(operation, values, _0=logits) for values in mine]
    if becomes == "split_embedding":
        layout = layouts[first]
        assert isinstance(layout, Shard)
        found = []
        for values, (start, stop) in zip(mine, _intervals(ranks, layout), strict=True):
            rows = values[operation.inputs[1]]
            here = (rows >= start) & (rows < stop)
            local = np.where(here, rows - start, 0)
            table = values[first] if stop > start else np.zeros((1, values[first].shape[1]))
            found.append(table[local] * here[..., None])
        return found
    assert not becomes, becomes
    layout = layouts[operation.name]
    found = []
    for rank, values in enumerate(mine):
        replaced = {}
        if isinstance(layout, Shard) and operation.target in (
            "aten.view.default",
            "aten.reshape.default",
        ):
            sizes = operation.args[1]
            assert isinstance(sizes, tuple)
            whole = (operation.shape or ())[layout.dim]
            # What follows the batch is known on the whole batch only.
            extent = -1 if whole.per_sample else len(ranks.indices(layout, whole.fixed)[rank])
            replaced["_1"] = tuple(extent if i == layout.dim else x for i, x in enumerate(sizes))
        found.append(call(operation, values, **replaced))
    return found


def _intervals(ranks: Ranks, layout: Shard) -> tuple[tuple[int, int], ...]:
    counts = ranks.axes[layout.axis]
    return tile(sum(counts), counts)


def run_parts(
    graph: OperationGraph, parts: SplitParts, given: Mapping[str, Array], ranks: Ranks
) -> dict[str, Array]:
    """Every value that there is of all samples, put together: those of `parts` as their layouts
    say, of all others what the ranks make of their own samples. Sums over a rank's samples are
    left out."""
    typed = parts.sharded.assignment
    layouts: dict[str, Layout] = {op.name: typed.layouts.get(op.name, Replicated()) for op in graph}
    casts = {(cast.user, cast.value): cast for cast in typed.casts}
    values: dict[str, list[Array]] = {}
    joined: dict[str, Array] = {}

    def read(user: str, name: str) -> list[Array]:
        cast = casts.get((user, name))
        if cast is None:
            return values[name]
        source = Replicated() if isinstance(cast.source, ReplicatedPartialGrad) else cast.source
        return ranks.lay(ranks.join(values[name], source), cast.target)

    for operation in graph:
        name, shape = operation.name, operation.shape or ()
        own = Shard(0, "batch") if shape and shape[0].per_sample else Replicated()
        if operation.target == "input":
            values[name] = ranks.lay(given[name], own)
        elif operation.target in ("parameter", "buffer"):
            values[name] = ranks.lay(given[name], layouts[name])
        elif operation.target.startswith("aten."):
            inputs = {value: read(name, value) for value in operation.inputs}
            mine = [{value: x[r] for value, x in inputs.items()} for r in range(len(ranks))]
            inside = name in parts.operations
            becomes = typed.becomes.get(name, "") if inside else ""
            values[name] = _on_ranks(operation, becomes, layouts, mine, ranks)
            layout = layouts[name] if inside or name in typed.layouts else own
            if inside or own != Replicated():
                joined[name] = ranks.join(values[name], layout)
    return joined


def drawn(graph: OperationGraph, samples: int) -> dict[str, Array]:
    """Inputs, parameters and buffers, from one seed; every label is below any number of classes."""
    generator = np.random.default_rng(0)
    values: dict[str, Array] = {}
    for op in graph:
        if op.target in ("input", "parameter", "buffer"):
            shape = [size.at(samples) for size in op.shape or ()]
            values[op.name] = (
                generator.integers(0, 6, shape)
                if op.dtype == "int64"
                else generator.standard_normal(shape)
            )
    if "labels" in values and values["labels"].ndim == 2:
        values["labels"][0, :2] = -100  # unmasked targets are unlike samples
    return values
