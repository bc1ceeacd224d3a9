"""Products of factors that are rounded to 8 bits (`train.precision=fp8`).

Both factors are rounded to e4m3 (4 bits of exponent, 3 of mantissa; Micikevicius et al. 2022, "FP8
Formats for Deep Learning", arXiv 2209.05433), each row of a factor along the summed dimension with
a scale of its own. Scales are powers of two, so that scaling is exact and codes are the same bits
on every device. The product is accumulated in fp32 and returned in bf16.

Forwards and the gradients of inputs are such products. Their rows are tokens and features, so that
a token's rounding does not depend on the batch that it is in. The gradient of a weight sums over
tokens, and stays in 16 bits: its scales would depend on how the batch is shared.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whale_train.runtime.base.autocast import autocast, autocast_dtype

_CODES = torch.float8_e4m3fn
_LARGEST_MANTISSA, _LARGEST_EXPONENT = 0.875, 9  # the largest e4m3 is 448 = 0.875 * 2^9
_EXPONENTS = 126  # of the powers of two that fp32 has, with their inverses, without denormals
_MULTIPLE = 16  # the products' kernels take only multiples of it in the dimensions of a weight
_ROWWISE = functional.ScalingType.RowWise


def scaled_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `left` times `right` transposed, bf16 [rows, out], with factors rounded to 8 bits.
    It has no gradient.

    left: [rows, n], in 16 or 32 bits.
    right: [out, n], likewise.
    bias: bf16 [out], added before the product is rounded to bf16.
    """
    (rows, _), out = left.shape, len(right)
    if not rows:
        return left.new_empty(0, out, dtype=torch.bfloat16)
    codes, scales = _rounded(left)
    right_codes, right_scales = _rounded(right)
    missing = -out % _MULTIPLE
    if missing:
        right_codes = _padded(right_codes, 0, missing)
        right_scales = functional.pad(right_scales, (0, 0, 0, missing))
        bias = None if bias is None else functional.pad(bias, (0, missing))
    if short := -codes.shape[1] % _MULTIPLE:
        codes, right_codes = _padded(codes, 1, short), _padded(right_codes, 1, short)
    product: Tensor = functional.scaled_mm(
        *(codes, right_codes.t(), scales, _ROWWISE, right_scales.t(), _ROWWISE),
        bias=bias,
        output_dtype=torch.bfloat16,
    )
    return product[:, :out].contiguous() if missing else product


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return `values` [rows, n] as codes, e4m3 [rows, n], and the factors that turn the codes of
    each row back, fp32 [rows, 1].

    The factor of a row is the least power of two with which its largest value fits. That of a row
    with values that are not finite is NaN: codes hold no infinity, and conversion saturates
    (findings/torch_e4m3_hides_infinity.sh).
    """
    largest = torch.linalg.vector_norm(
        values, float("inf"), dim=1, keepdim=True, dtype=torch.float32
    )
    mantissa, exponent = torch.frexp(largest)
    shift = _LARGEST_EXPONENT - exponent - (mantissa > _LARGEST_MANTISSA).to(torch.int32)
    shift = shift.clamp(-_EXPONENTS, _EXPONENTS)
    one = torch.ones_like(largest)
    scale = torch.ldexp(one, shift)
    if torch.compiler.is_compiling():
        # Compilers write in one pass anyway, and lay what `out` receives out as `values` are
        # (torch 2.13, findings/torch_compile_forgets_the_layout_of_out.sh).
        codes = (values * scale).to(_CODES).contiguous()
    else:
        codes = torch.empty(values.shape, dtype=_CODES, device=values.device)
        torch.mul(values, scale, out=codes)
    return codes, torch.where(torch.isfinite(largest), torch.ldexp(one, -shift), torch.nan)


def _padded(codes: Tensor, dim: int, missing: int) -> Tensor:
    """Return `codes` with `missing` zeros after them along `dim`."""
    as_bytes = codes.view(torch.uint8)
    pad = (0, 0, 0, missing) if dim == 0 else (0, missing)
    return functional.pad(as_bytes, pad).view(_CODES)


class ScaledLinear(torch.autograd.Function):
    """A linear layer's product as a function of autograd.

    It saves the factors in 16 bits, as a linear layer under autocast does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        """Return the product [.., out] of `x` [.., in] and `weight`, with `bias`; the weight is
        [in, out] where it is `transposed`, else [out, in]."""
        ctx.transposed = transposed
        ctx.save_for_backward(x, weight)  # no view of the weight, which ZeRO 3 frees
        return linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, the weight and the bias.

        A gradient that has gradients itself (`create_graph`) is a product in 16 bits.
        """
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            to_input = weight if ctx.transposed else weight.t()
            is_differentiated = torch.is_grad_enabled()
            product = functional.linear if is_differentiated else linear
            of_x = product(grad, to_input, None)
        rows = _rows(grad)
        if ctx.needs_input_grad[1]:
            of_weight = _rows(x).t() @ rows if ctx.transposed else rows.t() @ _rows(x)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the product [.., out] of `x` [.., in] and `weight`, with `bias`, whose factors are
    rounded to 8 bits under autocast. Outside of autocast they are not, nor in fp64, nor inside the
    transforms of torch.func, which no kernel of these products supports.

    transposed: True where the weight is [in, out], False where it is [out, in].
    """
    dtype = autocast_dtype(x.device.type)
    is_wide = torch.float64 in (x.dtype, weight.dtype)
    if dtype is None or is_wide or torch._C._are_functorch_transforms_active():
        return functional.linear(x, weight.t() if transposed else weight, bias)
    operands = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with autocast(x.device.type, enabled=False):
        product: Tensor = ScaledLinear.apply(*operands, transposed)  # type: ignore[no-untyped-call]
    return product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the scaled product [.., out] of `x` [.., in] and `weight` [out, in], with `bias`."""
    return scaled_product(_rows(x), weight, bias).view(*x.shape[:-1], len(weight))


def _rows(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])
