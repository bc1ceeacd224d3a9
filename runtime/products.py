"""Products of a graph that have weights (linear, addmm): where their operands stand, and what
their gradients are."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional


@dataclass(frozen=True)
class Kind:
    """Where a product's input, weight and bias stand among its arguments, and whether its weight
    is [in, out]."""

    input: int
    weight: int
    bias: int
    transposed: bool

    def value(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[.., out] of `x` [.., in]."""
        return functional.linear(x, weight.t() if self.transposed else weight, bias)

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [.., out] times the weight: [.., in]."""
        return grad @ self.to_input(weight)

    def to_input(self, weight: Tensor) -> Tensor:
        """The weight as [out, in]."""
        return weight.t() if self.transposed else weight

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, in its own shape."""
        grad, x = grad.flatten(0, -2), x.flatten(0, -2)
        return x.t() @ grad if self.transposed else grad.t() @ x


_aten = torch.ops.aten
_KINDS: dict[Any, Kind] = {
    _aten.linear.default: Kind(0, 1, 2, transposed=False),
    _aten.addmm.default: Kind(1, 2, 0, transposed=True),
}


@dataclass(frozen=True)
class Product:
    """A node of a graph that is a product with a parameter, and its operands. The bias may be a
    value made of one: of a product whose input is cut, one member alone adds it."""

    node: fx.Node
    kind: Kind
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def product_of(node: fx.Node, parameters: Set[str]) -> Product | None:
    """`node` as a product whose weight is among the placeholders `parameters` (None: it is
    none)."""
    kind = _KINDS.get(node.target) if node.op == "call_function" else None
    if kind is None or node.kwargs:
        return None
    args: list[Any] = list(node.args) + [None] * (3 - len(node.args))
    x, weight, bias = args[kind.input], args[kind.weight], args[kind.bias]
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if weight.name not in parameters:
        return None
    return Product(node, kind, x, weight, bias)
