"""Products (linear, addmm) and lookups (embedding) of weights in a graph.

This file owns the formulas of their values and gradients.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from whale_train.runtime.base.graph_nodes import replace_nodes
from whale_train.runtime.kernels.scaled_products import linear, scaled_linear
from whale_train.strategies.graph.operation_graph import PRODUCTS


def as_rows(value: Tensor) -> Tensor:
    """Return `value` [.., n] as [rows, n]; a vector [n] becomes one row."""
    return value.flatten(0, -2) if value.dim() > 1 else value.unsqueeze(0)


@dataclass(frozen=True)
class ProductForm:
    """The positions of a product's operands among its arguments.

    input: the position of the input.
    weight: the position of the weight.
    bias: the position of the bias.
    transposed: True where the weight is [in, out], False where it is [out, in].
    scaled: True where the product and the gradient of its input round their factors to 8 bits.
    """

    input: int
    weight: int
    bias: int
    transposed: bool
    scaled: bool = False

    def value(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product [.., out] of `x` [.., in]."""
        product = linear if self.scaled else functional.linear
        return product(x, weight.t() if self.transposed else weight, bias)

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient [.., in] of the input; `grad` is [.., out]."""
        if self.scaled:
            return linear(grad, self.to_input(weight).t(), None)
        return grad @ self.to_input(weight)

    def add_of_input(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Add the gradient of the input to `total`, [rows, in]; `grad` is [rows, out]."""
        if self.scaled:
            total.add_(self.of_input(grad, weight))
        else:
            total.addmm_(grad, self.to_input(weight))

    def to_input(self, weight: Tensor) -> Tensor:
        """Return the weight as [out, in]."""
        return weight.t() if self.transposed else weight

    def of_weight(self, grad: Tensor, x: Tensor, known: Tensor | None = None) -> Tensor:
        """Return the gradient of the weight, in the weight's shape.

        `grad` is [.., out] and `x` [.., in]. With `known`, the gradient is added to `known` in
        place, and `known` is returned.
        """
        grad, x = as_rows(grad), as_rows(x)
        left, right = (x.t(), grad) if self.transposed else (grad.t(), x)
        if known is None:
            return left @ right
        if known.dtype != left.dtype:
            return known.add_(left @ right)
        return known.addmm_(left, right)  # the sum needs no buffer for the added gradient

    def of_bias(self, grad: Tensor, known: Tensor | None = None) -> Tensor:
        """Return the gradient [out] of the bias; it is added in place to `known` if that is
        given."""
        total = as_rows(grad).sum(0)
        return total if known is None else known.add_(total)


_SCALED = "scaled"  # of a node's meta
_aten = torch.ops.aten
_KINDS: dict[Any, ProductForm] = {
    _aten.linear.default: ProductForm(*PRODUCTS["aten.linear.default"], transposed=False),
    _aten.addmm.default: ProductForm(*PRODUCTS["aten.addmm.default"], transposed=True),
}


@dataclass(frozen=True)
class ProductNode:
    """A product with a parameter in a graph.

    node: the product.
    kind: the positions of its operands.
    input: the input.
    weight: the placeholder of the weight.
    bias: the bias, or None. It may be computed from a parameter: where the input is sharded, only
        one member adds the bias.
    """

    node: fx.Node
    kind: ProductForm
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def product_of(node: fx.Node) -> ProductNode:
    """Return `node`, a product with a weight, as a ProductNode with its operands."""
    kind = replace(_KINDS[node.target], scaled=bool(node.meta.get(_SCALED)))
    args: list[Any] = [*node.args, None]
    return ProductNode(node, kind, args[kind.input], args[kind.weight], args[kind.bias])


def scale_product(node: fx.Node) -> None:
    """Mark `node`, a product with a weight, as one that rounds its factors to 8 bits."""
    node.meta[_SCALED] = True


def scale_products(graph: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
    """Replace `nodes` of `graph`, products with weights, by ones that round their factors to 8
    bits."""
    for node in nodes:
        product = product_of(node)
        operands = (product.input, product.weight, product.bias, product.kind.transposed)
        with graph.graph.inserting_before(node):
            scaled = graph.graph.call_function(scaled_linear, operands)
        replace_nodes(scaled, [node])


def is_product(node: fx.Node) -> bool:
    """Return True if `node` is a product."""
    return node.target in _KINDS


@dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a parameter in a graph.

    weight: the placeholder of the table.
    indices: the row numbers.
    padding: the row without a gradient; -1 where all rows have one.
    """

    weight: fx.Node
    indices: fx.Node
    padding: int


def lookup_of(node: fx.Node) -> Lookup:
    """Return `node`, a lookup of rows, as a Lookup with its operands."""
    args: list[Any] = [*node.args, -1]
    return Lookup(*args[:3])


def of_table(
    grad: Tensor, indices: Tensor, rows: int, padding: int, known: Tensor | None = None
) -> Tensor:
    """Return the gradient of a table [rows, width] from `grad` [*indices.shape, width].

    `indices` are the rows that were looked up; the row `padding` gets no gradient. With `known`,
    the gradient is added to `known` in place, and `known` is returned. Gradients of equal indices
    are summed in the same order every time, and in no less than fp32.
    """
    if known is None or known.dtype.itemsize < 4:
        wide = torch.promote_types(grad.dtype, torch.float32)
        total: Tensor = _aten.embedding_dense_backward(grad.to(wide), indices, rows, padding, False)
        return total.to(grad.dtype) if known is None else known.add_(total)
    if padding >= 0:
        grad = grad.masked_fill((indices == padding)[..., None], 0.0)
    return known.index_put_((indices,), grad.to(known.dtype), accumulate=True)
