"""One operation of the exported graph, called on a rank's part of its operands.

Most operations are called on shards as on whole tensors. Owns the others: those that name
extents, positions or numbers of groups among their arguments.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from whale_train.strategies.plan.program import PlannedShard

aten = torch.ops.aten
Laid = PlannedShard
Extents = Callable[[Laid], tuple[int, ...]]  # my part of each piece of one repetition

_VIEWS = ("view.default", "reshape.default", "_unsafe_view.default")
_EXPANDS = ("expand.default", "broadcast_to.default")
_SPLITS = ("split.Tensor", "split_with_sizes.default", "chunk.default", "tensor_split.sections")


def local_call(
    node: fx.Node,
    args: list[Any],
    kwargs: dict[str, Any],
    laid: Laid | None,
    source: Laid | None,
    mine: Extents,
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the function and arguments that do on this rank what `node` does on whole tensors.

    `laid` is how the result is cut, `source` how the first operand is when it gets here (None:
    not at all); `args` and `kwargs` are those of the graph, with its operands replaced by this
    rank's.
    """
    kind = str(node.target).removeprefix("aten.")
    given = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if laid is not None and kind in _VIEWS:
        return aten.reshape.default, [args[0], _sizes(args[1], _shape(node), laid, mine)], kwargs
    if laid is not None and kind in _EXPANDS:
        sizes = [args[0], _expanded(args[1], laid)]
        return node.target, sizes, kwargs
    if laid is not None and kind == "unflatten.int":
        first = args[1] % len(_shape(given))
        inside, whole = replace(laid, dim=laid.dim - first), _shape(node)[first:]
        return node.target, [args[0], args[1], _sizes(args[2], whole, inside, mine)], kwargs
    if source is not None and kind in _SPLITS:
        return _split(node, args, kwargs, source, mine)
    if source is not None and kind == "slice.Tensor":
        return _sliced(node, args, kwargs, source, mine)
    if source is not None and kind.startswith("squeeze"):
        return _squeezed(node, args, kwargs)
    if source is not None and kind == "repeat_interleave.self_int":
        return node.target, args, {k: v for k, v in kwargs.items() if k != "output_size"}
    if laid is not None and kind.startswith("conv") and len(args) > 6 and args[6] != 1:
        total = _shape(node)[1]
        return node.target, [*args[:6], args[6] * _extent(laid, mine) // total, *args[7:]], kwargs
    if laid is not None and kind == "group_norm.default":
        total = _shape(node)[1]
        return node.target, [args[0], args[1] * _extent(laid, mine) // total, *args[2:]], kwargs
    if kind == "histc.default":  # exported for another device, where it takes integers
        return _histc, args, kwargs
    return node.target, args, kwargs


def _shape(node: fx.Node | None) -> tuple[Any, ...]:
    """Return the whole value's shape; extents that follow the batch are symbols."""
    assert node is not None
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return tuple(value.shape)


def _extent(laid: Laid, mine: Extents) -> int:
    """Return my extent of the cut dimension; 0 where the batch decides."""
    return laid.outer * sum(mine(laid))


def _sizes(sizes: list[Any], whole: tuple[Any, ...], laid: Laid, mine: Extents) -> list[Any]:
    """Return the extents a view names, with mine of the cut dimension. Where the batch decides it,
    it is inferred, and what was inferred before is said."""
    extent = _extent(laid, mine) or -1
    if extent == -1:
        sizes = [whole[i] if x == -1 and type(x) is int else x for i, x in enumerate(sizes)]
    known = [extent if i == laid.dim else x for i, x in enumerate(sizes)]
    assert all(isinstance(x, int | fx.Node) for x in known), (known, laid)
    return known


def _expanded(sizes: list[Any], laid: Laid) -> list[Any]:
    """Return the extents of an expansion, whose cut dimension is never one that is repeated: it
    stays as it is."""
    return [-1 if i == laid.dim else x for i, x in enumerate(sizes)]


def _split(
    node: fx.Node, args: list[Any], kwargs: dict[str, Any], source: Laid, mine: Extents
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Parts of a cut dimension are whole pieces: each as long as mine of it."""
    whole = _shape(node.args[0])  # type: ignore[arg-type]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(whole)
    if dim != source.dim:
        return node.target, args, kwargs
    parts = [value.shape[dim] for value in node.meta["val"]]
    edges = [sum(parts[:i]) for i in range(len(parts) + 1)]
    local = [_before(source, edge, mine) for edge in edges]
    sizes = [b - a for a, b in pairwise(local)]
    return aten.split_with_sizes.default, [args[0], sizes, dim], {}


def _sliced(
    node: fx.Node, args: list[Any], kwargs: dict[str, Any], source: Laid, mine: Extents
) -> tuple[Any, list[Any], dict[str, Any]]:
    whole = _shape(node.args[0])  # type: ignore[arg-type]
    dim = (args[1] if len(args) > 1 else 0) % len(whole)
    if dim != source.dim:
        return node.target, args, kwargs
    length, extent = _shape(node)[dim], whole[dim]
    if length == extent:
        return aten.alias.default, [args[0]], {}
    start = args[2] if args[2] >= 0 else args[2] + extent
    bounds = [_before(source, edge, mine) for edge in (start, start + length)]
    return node.target, [args[0], dim, *bounds], {}


def _before(source: Laid, edge: int, mine: Extents) -> int:
    """Return how much of mine lies before `edge` of the whole dimension, an end of a piece."""
    pieces, held = source.pieces, mine(source)
    if not pieces:
        pieces = (edge,) if edge else (1,)
    position = found = 0
    for number in range(source.outer * len(pieces)):
        if position >= edge:
            break
        position += pieces[number % len(pieces)]
        found += held[number % len(held)]
    assert position == edge, (source, edge)
    return found


def _squeezed(
    node: fx.Node, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Only what is one long in the whole tensor goes away; my part of another may be."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    whole = _shape(source)
    asked = args[1] if len(args) > 1 else list(range(len(whole)))
    listed = [x % len(whole) for x in (asked if isinstance(asked, list | tuple) else [asked])]
    ones = [dim for dim in listed if isinstance(whole[dim], int) and whole[dim] == 1]
    return aten.squeeze.dims, [args[0], ones], {}


def _histc(x: Tensor, *rest: Any) -> Tensor:
    """Counts, also of integers on the CPU, whose kernel takes none."""
    if x.is_floating_point() or x.device.type != "cpu":
        return torch.histc(x, *rest)
    return torch.histc(x.double(), *rest).to(x.dtype)
