"""Call one operation of the exported graph on a rank's shards of its operands.

Most operations are called on shards as on whole tensors. This file owns the operations that have
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
Extents = Callable[[Laid], tuple[int, ...]]  # this rank's extent of each piece of a repetition

_VIEWS = ("view.default", "reshape.default", "_unsafe_view.default")
_EXPANDS = ("expand.default", "broadcast_to.default")
_SPLITS = ("split.Tensor", "split_with_sizes.default", "chunk.default", "tensor_split.sections")


def local_call(
    node: fx.Node,
    args: list[Any],
    kwargs: dict[str, Any],
    laid: Laid | None,
    source: Laid | None,
    extents: Extents,
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the function, arguments and keyword arguments that do on this rank what `node` does.

    `args` and `kwargs` are the arguments of `node`, with this rank's operands in place of the
    graph's. `laid` is the layout of the result and `source` the layout of the first operand on
    arrival (None: not sharded). `extents` returns this rank's extent of each piece of a layout.
    """
    kind = str(node.target).removeprefix("aten.")
    given = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if laid is not None and kind in _VIEWS:
        return aten.reshape.default, [args[0], _sizes(args[1], _shape(node), laid, extents)], kwargs
    if laid is not None and kind in _EXPANDS:
        sizes = [args[0], _expanded(args[1], laid)]
        return node.target, sizes, kwargs
    if laid is not None and kind == "unflatten.int":
        first = args[1] % len(_shape(given))
        inside, full_shape = replace(laid, dim=laid.dim - first), _shape(node)[first:]
        return node.target, [args[0], args[1], _sizes(args[2], full_shape, inside, extents)], kwargs
    if source is not None and kind in _SPLITS:
        return _split(node, args, kwargs, source, extents)
    if source is not None and kind == "slice.Tensor":
        return _sliced(node, args, kwargs, source, extents)
    if source is not None and kind.startswith("squeeze"):
        return _squeezed(node, args, kwargs)
    if source is not None and kind == "repeat_interleave.self_int":
        return node.target, args, {k: v for k, v in kwargs.items() if k != "output_size"}
    if laid is not None and kind.startswith("conv") and len(args) > 6 and args[6] != 1:
        total = _shape(node)[1]
        return (
            node.target,
            [*args[:6], args[6] * _extent(laid, extents) // total, *args[7:]],
            kwargs,
        )
    if laid is not None and kind == "group_norm.default":
        total = _shape(node)[1]
        return node.target, [args[0], args[1] * _extent(laid, extents) // total, *args[2:]], kwargs
    if kind == "histc.default":  # exported for another device, on which histc takes integers
        return _histc, args, kwargs
    return node.target, args, kwargs


def _shape(node: fx.Node | None) -> tuple[Any, ...]:
    """Return the shape of the unsharded value; extents that depend on the batch size are
    symbols."""
    assert node is not None
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return tuple(value.shape)


def _extent(laid: Laid, extents: Extents) -> int:
    """Return this rank's extent of the sharded dimension, or 0 where it depends on the batch
    size."""
    return laid.outer * sum(extents(laid))


def _sizes(sizes: list[Any], shape: tuple[Any, ...], laid: Laid, extents: Extents) -> list[Any]:
    """Return the extents of a view, with this rank's extent of the sharded dimension.

    Where the extent depends on the batch size, it becomes -1 (inferred), and an extent that was -1
    before is filled in from the unsharded `shape`.
    """
    extent = _extent(laid, extents) or -1
    if extent == -1:
        sizes = [shape[i] if x == -1 and type(x) is int else x for i, x in enumerate(sizes)]
    known = [extent if i == laid.dim else x for i, x in enumerate(sizes)]
    assert all(isinstance(x, int | fx.Node) for x in known), (known, laid)
    return known


def _expanded(sizes: list[Any], laid: Laid) -> list[Any]:
    """Return the extents of an expansion, with -1 (unchanged) for the sharded dimension.

    An expansion never repeats a sharded dimension.
    """
    return [-1 if i == laid.dim else x for i, x in enumerate(sizes)]


def _split(
    node: fx.Node, args: list[Any], kwargs: dict[str, Any], source: Laid, extents: Extents
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the call that splits this rank's part of a dimension.

    Parts of a sharded dimension are whole pieces: each is as long as this rank's share of the
    piece.
    """
    full_shape = _shape(node.args[0])  # type: ignore[arg-type]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % len(full_shape)
    if dim != source.dim:
        return node.target, args, kwargs
    parts = [value.shape[dim] for value in node.meta["val"]]
    edges = [sum(parts[:i]) for i in range(len(parts) + 1)]
    local = [_before(source, edge, extents) for edge in edges]
    sizes = [b - a for a, b in pairwise(local)]
    return aten.split_with_sizes.default, [args[0], sizes, dim], {}


def _sliced(
    node: fx.Node, args: list[Any], kwargs: dict[str, Any], source: Laid, extents: Extents
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the call that slices this rank's part of a dimension.

    The bounds of a slice of a sharded dimension are ends of pieces.
    """
    full_shape = _shape(node.args[0])  # type: ignore[arg-type]
    dim = (args[1] if len(args) > 1 else 0) % len(full_shape)
    if dim != source.dim:
        return node.target, args, kwargs
    length, extent = _shape(node)[dim], full_shape[dim]
    if length == extent:
        return aten.alias.default, [args[0]], {}
    start = args[2] if args[2] >= 0 else args[2] + extent
    bounds = [_before(source, edge, extents) for edge in (start, start + length)]
    return node.target, [args[0], dim, *bounds], {}


def _before(source: Laid, edge: int, extents: Extents) -> int:
    """Return this rank's extent before position `edge` of the unsharded dimension, the end of a
    piece."""
    pieces, held = source.pieces, extents(source)
    if not pieces:
        pieces = (edge,) if edge else (1,)
    position = local_position = 0
    for number in range(source.outer * len(pieces)):
        if position >= edge:
            break
        position += pieces[number % len(pieces)]
        local_position += held[number % len(held)]
    assert position == edge, (source, edge)
    return local_position


def _squeezed(
    node: fx.Node, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the call that squeezes the dimensions of extent 1 in the unsharded tensor.

    A dimension whose shard has extent 1 on this rank only is not squeezed.
    """
    source = node.args[0]
    assert isinstance(source, fx.Node)
    full_shape = _shape(source)
    given = args[1] if len(args) > 1 else list(range(len(full_shape)))
    dims = [x % len(full_shape) for x in (given if isinstance(given, list | tuple) else [given])]
    ones = [dim for dim in dims if isinstance(full_shape[dim], int) and full_shape[dim] == 1]
    return aten.squeeze.dims, [args[0], ones], {}


def _histc(x: Tensor, *rest: Any) -> Tensor:
    """Return the histogram of `x`, also for integers on the CPU, for which torch has no kernel."""
    if x.is_floating_point() or x.device.type != "cpu":
        return torch.histc(x, *rest)
    return torch.histc(x.double(), *rest).to(x.dtype)
