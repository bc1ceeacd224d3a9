"""Multiply rows by a stack of experts of which a rank holds some."""

from collections.abc import Callable

import torch
from torch import Tensor

from whale_train.runtime.comms.layout_collectives import ShardGroup


def own_grouped_mm(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor
) -> Tensor:
    """Return the rows `x` [rows, in], all of this rank's experts, times their weights: [rows, out].

    `weight` is [own experts, in, out], and `ends` [own experts] says where each expert's rows end.
    The product is `function(x, weight, ends)`. Without rows the result is [0, out], and the weight
    has a gradient all the same.
    """
    return function(x, weight, ends) if len(x) else _no_rows(function, x, weight, ends)


def split_grouped_mm(
    function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor, shards: ShardGroup
) -> Tensor:
    """Return `x` [rows, in] times the experts' weights, [rows, out].

    The rows of other ranks' experts are zeros. Rows are sorted by expert. `ends` [experts] says
    where the rows of each expert end, for the experts of all ranks; `weight` is [own experts, in,
    out]. The product with a whole stack is `function(x, weight, ends)`.
    """
    if len(shards.sizes) == 1:
        return function(x, weight, ends)
    first, last = shards.start, shards.start + shards.size
    start = int(ends[first - 1]) if first else 0
    stop = int(ends[last - 1]) if shards.size else start
    if stop > start:
        rows = function(x[start:stop], weight, ends[first:last] - start)
    elif last > first:  # no rows for this rank: still a product, so that the weight has a gradient
        rows = _no_rows(function, x[:0], weight, ends[first:last])
    else:
        rows = x[:0] @ weight.sum(0)
    before = rows.new_zeros(start, rows.shape[1])
    return torch.cat([before, rows, rows.new_zeros(len(x) - stop, rows.shape[1])])


def _no_rows(function: Callable[..., Tensor], x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return [0, out] for `x` [0, in], of the dtype that `function` gives, with gradients to both.

    torch's grouped products refuse to have no rows, so one row of zeros is multiplied and dropped.
    """
    one = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return function(one, weight, torch.ones_like(ends))[:0]
