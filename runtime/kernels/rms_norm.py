"""Compute RMSNorm as one function: models write six operations, and torch has a kernel for GPUs.

Each of these operations passes over the whole value, and autograd over what each has kept: 1.5 ms
or more for [512, 512] on a core, which a small Llama has 17 of in a step of 550 ms, and a split
repeats on every rank. As one function it is a fifth of that, and keeps only its input (Zhang and
Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.float64)


def join_rms_norms(graph: fx.GraphModule) -> None:
    """Replace, in `graph`, every weight * (x * rsqrt(mean(x ** 2, -1) + eps)) by `rms_norm`."""
    for node in list(graph.graph.nodes):
        norm = _norm_ending_in(node)
        if norm is None:
            continue
        with graph.graph.inserting_before(node):
            made = graph.graph.call_function(rms_norm, (norm.input, norm.weight, norm.eps))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        for old in norm.operations:
            graph.graph.erase_node(old)
    graph.recompile()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x` [.., n] over the root of its mean square along n, times `weight` [n].

    `eps` is added to the mean square.
    """
    if x.is_cuda and x.dtype == weight.dtype and x.shape[-1:] == weight.shape:
        fused: Tensor = torch.rms_norm(x, weight.shape, weight, eps)
        return fused
    joins = x.dtype in _DTYPES and x.dtype == weight.dtype and x.shape[-1:] == weight.shape
    if not joins:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        plain: Tensor = weight * (x * inverse)
        return plain
    normed: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with r = rsqrt(mean(x^2) + eps) and output x r w.

    For an output gradient g, the gradient of w is the sum of g x r over all rows, and that of x is
    g w r - x r^3 mean(g w x).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        # Not `mul_`: torch 2.11 compiles what gives a value written in place with wrong gradients.
        normed: Tensor = x * inverse * weight
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        product = grad * x
        rows, of_row = product.reshape(-1, size), inverse.reshape(-1)
        of_weight = of_row @ rows if ctx.needs_input_grad[1] else None
        of_x = None
        if ctx.needs_input_grad[0]:
            factor = of_row**3 * (rows @ weight) / size
            of_x = torch.mul(grad, weight, out=product).mul_(inverse)
            of_x.addcmul_(x, factor.view_as(inverse), value=-1)
        return of_x, of_weight, None


@dataclass(frozen=True)
class _Norm:
    """RMSNorm in a graph.

    input: the value that is normalised.
    weight: the factor by channel.
    eps: the number added to the mean square.
    operations: the nodes of the norm, the last one first.
    """

    input: fx.Node
    weight: fx.Node
    eps: float
    operations: tuple[fx.Node, ...]


def _norm_ending_in(last: fx.Node) -> _Norm | None:
    """Return the norm whose last operation is `last`, the product with a weight, or None."""
    if last.target is not _aten.mul.Tensor:
        return None
    operands: list[Any] = list(last.args)
    for weight, normed in (operands, operands[::-1]):
        casts: list[fx.Node] = []
        while _is_only(normed, _aten.to.dtype) and normed.args[1] == torch.float32:
            casts.append(normed)
            normed = normed.args[0]
        if not isinstance(weight, fx.Node) or not _is_only(normed, _aten.mul.Tensor):
            continue
        for x, inverse in (normed.args[:2], normed.args[1::-1]):
            root = _root_of_mean(x, inverse)
            if root is not None and not _writes(root[-1], last):
                eps: Any = root[1].args[1]
                return _Norm(x, weight, eps, (last, *casts, normed, *root))
    return None


def _root_of_mean(x: Any, inverse: Any) -> tuple[fx.Node, ...] | None:
    """Return the operations of `inverse`, last first, or None for anything else.

    `inverse` must be rsqrt(mean(x ** 2, -1) + eps).
    """
    operations = []
    node = inverse
    for target, rest in (
        (_aten.rsqrt.default, ()),
        (_aten.add.Tensor, (float,)),
        (_aten.mean.dim, ([-1], True)),
        (_aten.pow.Tensor_Scalar, (2,)),
    ):
        if not _is_only(node, target) or node.kwargs or len(node.args) != 1 + len(rest):
            return None
        for given, wanted in zip(node.args[1:], rest, strict=True):
            if not isinstance(given, float) if wanted is float else given != wanted:
                return None
        operations.append(node)
        node = node.args[0]
    return tuple(operations) if node is x else None


def _is_only(node: Any, target: Callable[..., Any]) -> bool:
    """Return True where `node` is a call of `target` whose result exactly one operation reads."""
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


def _writes(first: fx.Node, last: fx.Node) -> bool:
    """Return True where an operation from `first` up to `last` changes a value in place."""
    node = first
    while node is not last:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            return True
        node = node.next
    return False
