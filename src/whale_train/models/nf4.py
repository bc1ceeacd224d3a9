"""Frozen weights in 4 bits: NF4 (Dettmers et al., "QLoRA", NeurIPS 2023, arXiv 2305.14314) with an
fp32 scale for each block of 64 elements.

bitsandbytes makes the codes and turns them back. Weights are handed to it flat: of a matrix whose
rows are no multiple of a block, its CPU kernel takes the scales of other blocks (0.50.2,
findings/bitsandbytes_nf4_on_a_cpu_takes_other_scales.sh).
"""

from collections.abc import Mapping
from importlib.util import find_spec
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale_train.errors import Fault
from whale_train.extras import how_to_install
from whale_train.models.options import QUANTIZE as KEY

BLOCK = 64
BYTES_PER_ELEMENT = 0.5 + 4 / BLOCK
_NEEDS_WEIGHTS = ("use_dora",)  # settings of peft's whose forward reads the frozen weight itself


class Nf4Linear(nn.Module):
    """A linear layer whose weight is frozen and kept in 4 bits.

    It holds the layer's `bias` as it is, `weight` (two codes to a byte, [ceil(elements / 2)]), and
    `absmax`, the scales of the blocks of the flat weight.

    linear: the layer.
    weight: its weight [out_features, in_features] in fp32, on the device that codes are to be on.
    """

    absmax: Tensor

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, absmax = torch.ops.bitsandbytes.quantize_4bit(
            weight.detach().reshape(-1), BLOCK, "nf4", torch.uint8
        )
        self.weight = nn.Parameter(codes.view(-1), requires_grad=False)
        self.register_buffer("absmax", absmax, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of `x` [..., in_features] and the weight, with the bias, in the dtype
        that autocast has, or that of `x`."""
        kind = x.device.type
        autocasts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocasts else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        shape = (self.out_features, self.in_features)
        with torch.autocast(kind, enabled=False):
            product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                x.to(dtype), self.weight, self.absmax, bias, shape
            )
        return product


class _Product(torch.autograd.Function):
    """The product of a value and a weight in 4 bits, which forward and backward each turn back."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        absmax: Tensor,
        bias: Tensor | None,
        shape: tuple[int, ...],
    ) -> Tensor:
        """Return the product of `x` and the weight of `shape`, with `bias`."""
        ctx.save_for_backward(codes, absmax)
        ctx.shape = shape
        return F.linear(x, dequantised(codes, absmax, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x` and of the bias."""
        codes, absmax = ctx.saved_tensors
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ dequantised(codes, absmax, ctx.shape, gradient.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_x, None, None, of_bias, None


def dequantised(
    codes: Tensor, absmax: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return the weight of `shape` that `codes` and `absmax` hold, in `dtype`."""
    flat: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        codes.view(-1, 1), absmax, BLOCK, "nf4", [prod(shape)], dtype
    )
    return flat.view(shape)


def quantised_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers of a model with adapters whose weights `model.quantize` keeps in 4 bits, by
    path.

    These are the linear layers with frozen weights, apart from the output head and from layers
    whose weight something else holds as well.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    holders: dict[int, int] = {}
    for _, tensor in model.named_parameters(remove_duplicate=False):
        holders[id(tensor)] = holders.get(id(tensor), 0) + 1
    inner = {id(part) for part in head.modules()} if isinstance(head, nn.Module) else set()
    return {
        path: part
        for path, part in model.named_modules()
        if type(part) is nn.Linear
        and not part.weight.requires_grad
        and holders[id(part.weight)] == 1
        and id(part) not in inner
    }


def quantise_faults(settings: Mapping[str, Any] | None) -> list[Fault]:
    """Return the faults of `model.quantize=nf4` beside the adapters' `settings` that can be found
    without a model."""
    if settings is None:
        rule = "stores frozen weights, and without model.adapters all weights are trained"
        return [Fault(KEY, "nf4", rule, "add 'model.adapters={r: 8}', or use null")]
    faults = []
    if find_spec("bitsandbytes") is None:
        rule, remedy = "needs bitsandbytes, which is not installed", how_to_install("bitsandbytes")
        faults.append(Fault(KEY, "nf4", rule, remedy))
    for key in _NEEDS_WEIGHTS:
        if settings.get(key):
            rule = "reads the frozen weights themselves, which model.quantize=nf4 keeps in 4 bits"
            faults.append(Fault(f"model.adapters.{key}", str(settings[key]), rule, "use false"))
    return faults
