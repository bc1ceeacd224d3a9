"""Attention of rows of queries to blocks of keys and values, joined exactly.

The softmax over all keys is known from the softmax over each block and the logarithm of the block's
sum (online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867). The backward of a block needs
the result and the logarithm over *all* keys, as in FlashAttention (Dao 2023, arXiv 2307.08691). So
torch's fused kernels serve blocks as well; elsewhere the scores of a block are computed at once.

Queries are [batch, heads, rows, width], keys and values [batch, key heads, positions, width];
groups of query heads share a head of the keys. Logarithms of sums are fp32 [batch, heads, rows].
"""

from math import sqrt

import torch
from torch import Tensor

aten = torch.ops.aten


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of `query` to one block, [batch, heads, rows, width], and the logarithms
    of the sums of exponentials.

    causal: True if row i attends to the first i + 1 positions of the block.
    mask: bool, broadcast to [batch, heads, rows, positions], true where a row attends.
    scale: the factor of the scores (None: 1 / sqrt(width)).

    Rows that attend to nothing are 0, and their logarithm is -inf. Not differentiable.
    """
    key, value = _alike(query, key, value)
    match _kernel(query, value, mask):
        case "cpu":
            bias = None if mask is None else _bias(mask, query.dtype)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=bias, scale=scale
            )
        case "flash":
            out, lse, *_ = aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, causal, False, scale=scale
            )
        case "efficient":
            bias = None if mask is None else _expanded(_bias(mask, query.dtype), query, key)
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, 0.0, causal, scale=scale
            )
        case _:
            scores = _scores(query, key, causal, mask, scale)
            lse = scores.logsumexp(-1)
            out = (scores - _finite(lse).unsqueeze(-1)).exp().to(value.dtype) @ value
    lse = lse[..., : query.shape[-2]].float()
    if mask is not None:  # torch's CPU kernel has 0 for rows that attend to nothing
        lse = lse.masked_fill(~mask.any(-1), -torch.inf)
    return torch.where(lse.isneginf().unsqueeze(-1), 0.0, out), lse


def gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    causal: bool, mask: Tensor | None, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a block's `query`, `key` and `value`, for the gradient `grad` of the
    attention `out` to all blocks. `lse` are the logarithms over all blocks; the other arguments are
    those of `attend`."""
    heads = key.shape[1]
    key, value = _alike(query, key, value)
    lse = _finite(lse)
    match _kernel(query, value, mask):
        case "cpu":
            bias = None if mask is None else _bias(mask, query.dtype)
            given = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
            )
        case "flash":
            seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
            given = aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, out, lse, None, None, query.shape[-2], key.shape[-2],
                0.0, causal, seed, seed[:0], scale=scale,
            )  # fmt: skip
        case "efficient":
            bias = None if mask is None else _expanded(_bias(mask, query.dtype), query, key)
            none = torch.zeros((), dtype=torch.int64, device=query.device)
            given = aten._scaled_dot_product_efficient_attention_backward(
                grad, query, key, value, bias, out, _padded(lse), none, none, 0.0,
                [True, True, True, False], causal, scale=scale,
            )  # fmt: skip
        case _:
            given = _written_out(grad, query, key, value, out, lse, causal, mask, scale)
    of_query, of_key, of_value = given[:3]
    return of_query, _summed(of_key, heads), _summed(of_value, heads)


def join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention to the blocks of `out` and to one more, fp32, and the logarithms over
    both."""
    both = torch.logaddexp(lse, more_lse)
    safe = _finite(both)
    first, second = (lse - safe).exp().unsqueeze(-1), (more_lse - safe).exp().unsqueeze(-1)
    return out.float() * first + more.float() * second, both


def _kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Return the kernel for a block: torch's for CPUs, FlashAttention, the memory-efficient one, or
    '' where scores are computed at once."""
    kind, widths = query.device.type, (query.shape[-1], value.shape[-1])
    if widths[0] != widths[1]:
        return ""
    if kind in ("cpu", "meta"):
        return "cpu"
    if kind != "cuda":
        return ""
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    return "flash" if narrow and mask is None and widths[0] <= 256 else "efficient"


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as `query` where its device's kernels need that."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of keys or values of `heads`, summed over the query heads that share
    one."""
    if gradient.shape[1] == heads:
        return gradient
    batch, _, positions, width = gradient.shape
    return gradient.view(batch, heads, -1, positions, width).sum(2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the summand of scores that a bool mask stands for: 0 where a row attends, else
    -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _expanded(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return `bias` as the memory-efficient kernel reads it: expanded, with rows of a multiple of 8
    elements."""
    positions = key.shape[-2]
    padded = torch.nn.functional.pad(bias, (0, -positions % 8))
    return padded[..., :positions].expand(*query.shape[:-1], positions)


def _padded(lse: Tensor) -> Tensor:
    """Return logarithms with a multiple of 32 rows, as the memory-efficient kernel reads them."""
    return torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """Return logarithms with 0 for the rows that attend to nothing, so that differences to -inf are
    -inf."""
    return lse.masked_fill(lse.isneginf(), 0.0)


def _scores(
    query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the scores of a block, fp32 [batch, heads, rows, positions], -inf where a row does not
    attend."""
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-2, -1)).float() * factor
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~ones.tril(), -torch.inf)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _written_out(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    causal: bool, mask: Tensor | None, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a block from its scores, as in `gradients`."""
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    weights = (_scores(query, key, causal, mask, scale) - lse.unsqueeze(-1)).exp()
    of_weights = (grad @ value.transpose(-2, -1)).float()
    shared = (grad.float() * out.float()).sum(-1, keepdim=True)
    of_scores = (weights * (of_weights - shared) * factor).to(query.dtype)
    return (
        of_scores @ key,
        of_scores.transpose(-2, -1) @ query,
        weights.to(grad.dtype).transpose(-2, -1) @ grad,
    )
