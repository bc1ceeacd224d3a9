"""Rules for operations along some dimensions that repeat over all others.

These are norms, softmax, sums and pooling. Rules for tables and losses, which are sharded by rows
and by classes, are here as well.
"""

from collections.abc import Callable
from dataclasses import replace

from whale_train.strategies.layouts.types import (
    ENTERED,
    Layout,
    P,
    PartialSum,
    R,
    Rule,
    RuleInput,
    RuleResult,
    Shard,
    dimensions,
)


def along(dims: Callable[[RuleInput], tuple[int, ...]]) -> Rule:
    """Return the rule of an operation that mixes elements along `dims` only. Its result has the
    shape of its first argument, or is a list of such tensors. Its other inputs enter unsharded."""

    def rule(typed: RuleInput) -> RuleResult | None:
        layout = typed.only
        if not isinstance(layout, Shard) or layout.dim in dims(typed):
            return None
        others = (name for name in typed.shapes if name != typed.value(0))
        if any(isinstance(typed.layouts[name], Shard) for name in others):
            return None
        others = (name for name in typed.shapes if name != typed.value(0))
        return RuleResult(dict.fromkeys(others, ENTERED), layout)

    return rule


def second(typed: RuleInput) -> tuple[int, ...]:
    """Return the dimension given by the second argument, or the last."""
    return dimensions(typed.argument(1, -1, "dim"), len(typed.shape(0)))


def third(typed: RuleInput) -> tuple[int, ...]:
    """Return the dimension given by the third argument, or the last."""
    return dimensions(typed.argument(2, -1, "dim"), len(typed.shape(0)))


def normalized(typed: RuleInput) -> tuple[int, ...]:
    """Return the last dimensions, as many as the second argument has entries."""
    shape, rank = typed.argument(1), len(typed.shape(0))
    assert isinstance(shape, tuple)
    return tuple(range(rank - len(shape), rank))


def spatial(typed: RuleInput) -> tuple[int, ...]:
    """Return all dimensions after samples and channels."""
    return tuple(range(2, len(typed.shape(0))))


def reduction(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a reduction that is no sum or mean."""
    return _reduced(typed, sums=False)


def total(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a sum. A sum over the sharded dimension is a partial sum, and so is a
    sum of a partial sum."""
    return _reduced(typed, sums=True)


def mean(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a mean. A mean of a partial sum is a partial sum. A mean over the
    sharded dimension is a partial sum of the ranks' means, each weighted by the rank's fraction."""
    if isinstance(typed.only, PartialSum):
        return RuleResult({}, P)
    typing = _reduced(typed, sums=True)
    return replace(typing, becomes="split_mean") if typing and typing.gives == P else typing


def _reduced(typed: RuleInput, sums: bool) -> RuleResult | None:
    layout, rank = typed.only, len(typed.shape(0))
    if isinstance(layout, PartialSum):
        return RuleResult({}, P) if sums else None
    if not isinstance(layout, Shard):
        return None
    position = 2 if typed.operation.target == "aten.linalg_vector_norm.default" else 1
    dims = dimensions(typed.argument(position, None, "dim"), rank)
    if layout.dim in dims:
        return RuleResult({}, P) if sums else None
    keeps_rank = typed.rank == rank
    dim = layout.dim - (0 if keeps_rank else sum(1 for gone in dims if gone < layout.dim))
    return RuleResult({}, Shard(dim, layout.axis, layout.outer, layout.pieces))


def batch_norm(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a BatchNorm of x [N, C, ..] sharded by channels, with the parameters
    and statistics of these channels."""
    layout = typed.only
    if not isinstance(layout, Shard) or layout.dim != 1:
        return None
    return _by_channel(typed, layout, ())


def group_norm(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a group norm of x [N, C, ..] sharded by groups of channels."""
    layout, groups = typed.only, typed.argument(1)
    if not isinstance(layout, Shard) or layout.dim != 1 or not isinstance(groups, int):
        return None
    group_width = typed.shape(0)[1].fixed // groups
    if not layout.pieces or any(piece % group_width for piece in layout.pieces):
        return None
    return _by_channel(typed, layout, tuple((layout.axis, p // group_width) for p in layout.pieces))


def _by_channel(
    typed: RuleInput, layout: Shard, coarsen: tuple[tuple[str, int], ...]
) -> RuleResult | None:
    """Derive the layouts of an operation by channels: inputs with one value for each channel are
    sharded like x."""
    wanted = Shard(0, layout.axis, layout.outer, layout.pieces)
    wants: dict[str, Layout] = {}
    unite = []
    for name in typed.shapes:
        laid = typed.layouts[name]
        if name == typed.value(0):
            continue
        if not isinstance(laid, Shard):
            wants[name] = wanted
        elif (laid.dim, laid.outer, laid.pieces) != (0, layout.outer, layout.pieces):
            return None
        elif laid.axis != layout.axis:
            unite.append((layout.axis, laid.axis))
    return RuleResult(wants, layout, "", tuple(unite), coarsen)


def embedding(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a table lookup. A table sharded by rows gives a partial sum: each rank
    looks up its own rows and fills the others with zeros. A table sharded by columns gives a result
    sharded alike. A lookup with `scale_grad_by_freq` has no rule."""
    weight = typed.layout(0)
    if not isinstance(weight, Shard) or typed.argument(3):
        return None
    wants: dict[str, Layout] = {typed.value(1): R}
    if weight.dim == 1:
        return RuleResult(wants, Shard(typed.rank - 1, weight.axis, weight.outer, weight.pieces))
    if weight.outer != 1 or len(weight.pieces) > 1:
        return None
    return RuleResult(wants, P, becomes="split_embedding")


def cross_entropy(typed: RuleInput) -> RuleResult | None:
    """Derive the layouts of a cross-entropy of logits [rows, classes] sharded by classes: the
    distributed softmax cross-entropy, as a mean or a sum, without class weights. In any other case
    the logits are gathered."""
    layout = typed.only
    plain = typed.argument(2, None, "weight") is None and typed.argument(3, 1, "reduction") != 0
    rows = len(typed.shape(0)) == 2 and "float" not in typed.graph[typed.value(1)].dtype
    by_class = isinstance(layout, Shard) and (layout.dim, layout.outer) == (1, 1)
    if not (isinstance(layout, Shard) and by_class and plain and rows and len(layout.pieces) < 2):
        return None
    return RuleResult({typed.value(1): R}, R, becomes="split_cross_entropy")
