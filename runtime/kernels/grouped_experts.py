"""Products with a stack of experts of which a rank holds some."""

from collections.abc import Callable

import torch
from torch import Tensor

from whale_train.runtime.comms.layout_collectives import ShardGroup


def own_grouped_mm(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor
) -> Tensor:
    """[rows, out]: the rows `x` [rows, in] of my experts `weight` [mine, in, out], times their
    weight, by `function(x, weight, ends)`. There may be none, and the weight has a gradient all the
    same."""
    return function(x, weight, ends) if len(x) else _no_rows(function, x, weight, ends)


def split_grouped_mm(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor, shards: ShardGroup
) -> Tensor:
    """[rows, out]: the rows of `x` [rows, in] that my experts `weight` [mine, in, out] have, times
    their weight; zeros elsewhere.

    Rows are sorted by expert, `ends` [experts] says where each one's end; `function` is the
    product with a whole stack, `function(x, weight, ends)`.
    """
    if len(shards.sizes) == 1:
        return function(x, weight, ends)
    first, last = shards.start, shards.start + shards.size
    start = int(ends[first - 1]) if first else 0
    stop = int(ends[last - 1]) if shards.size else start
    if stop > start:
        rows = function(x[start:stop], weight, ends[first:last] - start)
    elif last > first:  # no row is mine: still a product, so that the weight has a gradient
        rows = _no_rows(function, x[:0], weight, ends[first:last])
    else:
        rows = x[:0] @ weight.sum(0)
    before = rows.new_zeros(start, rows.shape[1])
    return torch.cat([before, rows, rows.new_zeros(len(x) - stop, rows.shape[1])])


def _no_rows(function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[0, out] for `x` [0, in], of the dtype that `function` makes of rows; `weight` has a
    gradient, and `x` too. (torch's grouped products refuse to have no rows.)"""
    one = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return function(one, weight, torch.ones_like(ends))[:0]
