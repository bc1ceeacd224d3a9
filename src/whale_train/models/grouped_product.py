"""The grouped matrix product of experts and their rows, as one operation that can be exported.

torch has the kernel (`functional.grouped_mm`), but traces it only in bf16. This operation wraps it,
so that shapes, gradients and FLOPs are known in every floating type, and autocast lowers it like
other products. It knows nothing of whale-train.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("whale_train::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each row of `rows` times the weight of its expert, [rows, out].

    rows: [rows, in], sorted by expert.
    weight: [experts, in, out].
    ends: int32 [experts], the index after the last row of each expert. An expert may have no rows.
        Rows after the last end belong to no expert, and their results are uninitialised memory.

    A row of `in` or of `out` elements must be a multiple of 16 bytes.
    """
    return functional.grouped_mm(rows, weight, offs=ends)


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("whale_train::grouped_mm_backward", mutates_args=())
def _backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `rows`, [rows, in], and of `weight`, [experts, in, out].

    `gradient` is the gradient of the product, [rows, out].
    """
    rows_gradient = functional.grouped_mm(gradient, weight.mT, offs=ends)
    # This product sums over the rows of each expert, and its result is a stack again.
    return rows_gradient, functional.grouped_mm(rows.mT, gradient, offs=ends)


@_backward.register_fake
def _(gradient: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_backward(gradient.contiguous(), *ctx.saved_tensors), None


grouped_mm.register_autograd(_gradients, setup_context=_keep)


def _autocast(device: str, key: DispatchKey) -> Callable[..., Tensor]:
    """Return the kernel of `grouped_mm` under autocast, which computes in autocast's 16-bit
    dtype."""

    def lowered(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with _ExcludeDispatchKeyGuard(DispatchKeySet(key)):
            made: Tensor = grouped_mm(rows.to(dtype), weight.to(dtype), ends)
            return made

    return lowered


# The library keeps the kernels alive. (torch.library.register_autocast casts to one given dtype.)
_KERNELS: Any = torch.library.Library("whale_train", "FRAGMENT")  # type: ignore[no-untyped-call]
for _device, _key in (("cpu", DispatchKey.AutocastCPU), ("cuda", DispatchKey.AutocastCUDA)):
    _KERNELS.impl("grouped_mm", _autocast(_device, _key), _key.name)


@register_flop_formula([torch.ops.whale_train.grouped_mm])
def _flops(rows: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula([torch.ops.whale_train.grouped_mm_backward])
def _backward_flops(
    gradient: Sequence[int], rows: Sequence[int], weight: Sequence[int], *_: Any, **__: Any
) -> int:
    return 2 * _flops(rows, weight)
