"""Stand in for the attention kernel of a GPU, and for the tensors that autograd saves for it.

torch chooses among its kernels for CUDA (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp):
FlashAttention (Dao 2023, arXiv 2307.08691) for 16-bit values without a mask, and the
memory-efficient kernel (Rabe and Staats 2021, arXiv 2112.05682) with a mask or in fp32. Both save
their operands, their result and one fp32 number per row; neither stores the scores.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_HEAD_DIM = 256  # the limit of FlashAttention
FLASH, EFFICIENT, UNFUSED = "flash", "memory-efficient", "unfused"
_MATH = torch.ops.aten._scaled_dot_product_attention_math.default


def kernel_of(query: Tensor, mask: Tensor | None) -> str:
    """Return the kernel, FLASH or EFFICIENT, that a GPU with both kernels would run.

    `query` is [.., tokens, width].
    """
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] <= _MOST_HEAD_DIM
    return FLASH if narrow and mask is None and fits else EFFICIENT


def _output(query: Tensor, width: int, kernel: str) -> Tensor:
    """Return the output [.., tokens, width] of a kernel for `query` [.., tokens, head width].

    A kernel stores the heads of a token contiguously, so that the model's transpose back copies
    nothing. FlashAttention's output has the strides of the query where widths are equal
    (aten/src/ATen/native/transformers/cuda/attention.cu).
    """
    tokens = query.transpose(-3, -2) if query.dim() > 3 else query
    if kernel == FLASH and width == query.shape[-1]:
        output = torch.empty_like(tokens)
    else:
        output = query.new_empty((*tokens.shape[:-1], width))
    return output.transpose(-3, -2) if query.dim() > 3 else output


class _Attention(torch.autograd.Function):
    """Fused attention without computation: it allocates and saves the same tensors as a kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = _output(query, value.shape[-1], kernel_of(query, mask))
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, _, _ = ctx.saved_tensors
        wanted = zip((query, key, value), ctx.needs_input_grad, strict=False)
        of_mask = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
        return *(torch.empty_like(x) if needed else None for x, needed in wanted), of_mask


@contextmanager
def as_on_devices(on_cpu: bool) -> Iterator[Counter[str]]:
    """Run attention over meta tensors inside the context as a GPU would, or as a CPU (`on_cpu`),
    which has no fused attention that drops.

    Yields the number of runs of each kernel. Nothing can be exported inside the context.
    """
    chosen: Counter[str] = Counter()

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        if on_cpu and dropout_p:
            chosen[UNFUSED] += 1
            is_causal = bool(rest[0]) if rest else bool(named.pop("is_causal", False))
            operands = (query, key, value, attn_mask, dropout_p, is_causal)
            mixed: Tensor = _MATH(*operands, **named)[0]
            return mixed
        chosen[kernel_of(query, attn_mask)] += 1
        output: Tensor = _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return output

    library: Any = torch.library.Library
    kernels = library("aten", "IMPL", "AutogradMeta")
    kernels.impl("scaled_dot_product_attention", attention)
    try:
        yield chosen
    finally:
        kernels._destroy()
