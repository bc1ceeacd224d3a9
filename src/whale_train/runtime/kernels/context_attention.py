"""Scaled dot-product attention over positions that the members of a group divide.

Every member holds the same range of positions of queries, keys and values, [batch, heads, own
positions, width]. By heads, an all-to-all gives each member all positions of some heads, and
another one brings the result back (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). By
rows, each member has all keys and values, and its own rows of queries.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from whale_train.runtime.base.autocast import autocast_dtype
from whale_train.runtime.comms.layout_collectives import ShardGroup, reshard
from whale_train.runtime.kernels.attention_blocks import attend, gradients, join
from whale_train.runtime.kernels.ring_attention import ring_attention


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a call of scaled dot-product attention.

    dropout: the probability that a weight is dropped.
    causal: True if a position attends to itself and those before it.
    scale: the factor of the scores (None: 1 / sqrt(width)).
    """

    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None

    @classmethod
    def of(cls, args: list[Any], kwargs: dict[str, Any]) -> "AttentionOptions":
        """Return the options among the arguments of `aten.scaled_dot_product_attention`."""
        given = dict(zip(("dropout_p", "is_causal"), args[4:6], strict=False)) | kwargs
        scale = given.get("scale")
        return cls(given.get("dropout_p", 0.0), given.get("is_causal", False), scale)

    def whole(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return torch's attention with these options. Groups of query heads may share keys."""
        grouped = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, mask, self.dropout, self.causal, scale=self.scale,
            enable_gqa=grouped,
        )  # fmt: skip


def heads_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    tokens: ShardGroup, of_keys: ShardGroup, options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """Return this member's rows of the attention, computed by heads.

    tokens, of_keys: the members' positions of queries, and of keys and values.
    mask: of all rows and positions, with one head or all.

    The queries have at least as many heads as there are members. Keys and values with fewer are
    repeated as often as it takes.
    """
    query, key, value = lowered(query, key, value)
    groups, members = query.shape[1] // key.shape[1], len(tokens.sizes)
    times = next(n for n in range(1, groups + 1) if groups % n == 0 and key.shape[1] * n >= members)
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    heads = _dealt(tokens, key.shape[1], query.shape[1] // key.shape[1])
    key_heads = _dealt(tokens, key.shape[1], 1)
    if mask is not None and mask.dim() > 2 and mask.shape[-3] == query.shape[1] > 1:
        mask = mask.narrow(-3, heads.start, heads.size)
    queries = reshard(query, 2, 1, tokens, 1, 1, heads)
    keys = reshard(key, 2, 1, of_keys, 1, 1, key_heads)
    values = reshard(value, 2, 1, of_keys, 1, 1, key_heads)
    if query.device.type == "cpu" and groups > times:  # torch's CPU kernel has no groups
        keys, values = (x.repeat_interleave(groups // times, 1) for x in (keys, values))
    mixed = options.whole(queries, keys, values, mask)
    return reshard(mixed, 1, 1, heads, 2, 1, tokens)


def in_a_ring(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    tokens: ShardGroup, of_keys: ShardGroup, options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """Return this member's rows of the attention, computed in a ring without dropout.

    The arguments are those of `heads_attention`, and `mask` has no gradient.
    """
    assert not options.dropout
    query, key, value = lowered(query, key, value)
    return ring_attention(query, key, value, mask, tokens, of_keys, options.causal, options.scale)


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    tokens: ShardGroup, options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """Return this member's rows of the attention to whole `key` and `value`.

    mask: of this member's rows, or of one row for all.
    """
    if not options.causal:
        return options.whole(query, key, value, mask)
    start, stop = tokens.start, tokens.start + tokens.size
    if options.dropout or query.dim() != 4:
        rows = torch.arange(start, stop, device=query.device).unsqueeze(-1)
        mask = torch.arange(key.shape[-2], device=query.device) <= rows
        return AttentionOptions(options.dropout, False, options.scale).whole(
            query, key, value, mask
        )
    query, key, value = lowered(query, key, value)
    result: Tensor = _CausalRows.apply(query, key, value, start, stop, options.scale)  # type: ignore[no-untyped-call]
    return result


class _CausalRows(torch.autograd.Function):
    """Causal attention of the rows [start, stop) to keys and values of all positions, of which
    those from `stop` on are not read."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, start: int, stop: int,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        out, lse = attend(query, key[:, :, start:stop], value[:, :, start:stop], True, None, scale)
        if start:
            before = attend(query, key[:, :, :start], value[:, :, :start], False, None, scale)
            out, lse = join(out, lse, *before)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rows, ctx.scale = (start, stop), scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        start, stop = ctx.rows
        of_query = torch.zeros_like(query)
        of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
        for first, last, causal in ((0, start, False), (start, stop, True)):
            if first == last:
                continue
            here = slice(first, last)
            given = gradients(
                grads[0], query, key[:, :, here], value[:, :, here], out, lse, causal, None,
                ctx.scale,
            )  # fmt: skip
            of_query += given[0]
            of_key[:, :, here], of_value[:, :, here] = given[1:]
        return of_query, of_key, of_value, None, None, None


def lowered(*values: Tensor) -> tuple[Tensor, ...]:
    """Return `values` in the dtype that autocast runs attention in, so that fewer bytes are
    sent."""
    dtype = autocast_dtype(values[0].device.type)
    return values if dtype is None else tuple(value.to(dtype) for value in values)


def _dealt(members: ShardGroup, units: int, width: int) -> ShardGroup:
    """Return `units` groups of `width` heads, dealt to the members as evenly as possible."""
    count = len(members.sizes)
    sizes = tuple(width * ((units * (i + 1)) // count - (units * i) // count) for i in range(count))
    return ShardGroup(members.group, sizes, members.rank)
