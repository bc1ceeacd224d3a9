"""Multiply rows by a stack of experts' weights of which a rank holds a part."""

from collections.abc import Callable

import torch
from torch import Tensor

from whale_train.runtime.comms.layout_collectives import ShardGroup


def own_grouped_mm(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor
) -> Tensor:
    """Multiply the rows `x` [rows, in] of this rank's experts by the experts' weights; return
    [rows, out].

    `weight` is [own experts, in, out], and `ends` [own experts] holds the end of each expert's
    rows. The product is `function(x, weight, ends)`. Without rows the result is [0, out], and the
    weight still gets a gradient.
    """
    return function(x, weight, ends) if len(x) else _no_rows(function, x, weight, ends)


def split_grouped_mm(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor, shards: ShardGroup
) -> Tensor:
    """Multiply the rows `x` [rows, in] by the experts' weights; return [rows, out].

    The rows of other ranks' experts become zeros. Rows are sorted by expert. `ends` [experts] holds
    the end of each expert's rows, for the experts of all ranks; `weight` is [own experts, in, out].
    `function(x, weight, ends)` is the product with a whole stack.
    """
    if len(shards.sizes) == 1:
        return function(x, weight, ends)
    first, last = shards.start, shards.start + shards.size
    start = int(ends[first - 1]) if first else 0
    stop = int(ends[last - 1]) if shards.size else start
    if stop > start:
        rows = function(x[start:stop], weight, ends[first:last] - start)
    elif last > first:  # without rows there is still a product, so that the weight has a gradient
        rows = _no_rows(function, x[:0], weight, ends[first:last])
    else:
        rows = x[:0] @ weight.sum(0)
    before = rows.new_zeros(start, rows.shape[1])
    return torch.cat([before, rows, rows.new_zeros(len(x) - stop, rows.shape[1])])


def _no_rows(function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [0, out] for `x` [0, in], of the result dtype of `function`, with gradients to both
    operands.

    torch's grouped products refuse an input without rows, so one row of zeros is multiplied and
    dropped.
    """
    one = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return function(one, weight, torch.ones_like(ends))[:0]
