"""Take weight gradients out of autograd: defer them, or add them straight into `.grad`.

In a rewritten graph the operations that read weights (linear, addmm, embedding) are replaced by
functions whose backward returns the input's gradient and handles the weight's gradient itself:

* Under a zero-bubble schedule (Qi et al. 2023, arXiv 2401.10241) the backward stores the operands
  of the weight's gradient for later: the previous stage waits for the input's gradient, but nothing
  waits for a weight's.
* Where a step has several backwards, each adds to the weight's `.grad` as it computes the gradient.
  Autograd would compute the gradient first and add it afterwards, which needs as much memory again;
  for an embedding that is the gradient of all rows of the table, every time.
* The functions save the weights themselves and no views of them: ZeRO 3 frees weights between
  forward and backward.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from whale_train.runtime.base.autocast import autocast, autocast_dtype
from whale_train.runtime.base.graph_nodes import replace_nodes
from whale_train.runtime.kernels.matmul import (
    ProductForm,
    is_product,
    lookup_of,
    of_table,
    product_of,
)

Key = tuple[int, int]  # chunk, micro-batch
Added = Callable[[nn.Parameter], None]
# A parameter and the function that computes its gradient, or adds it to a known one.
_Make = Callable[[Tensor | None], Tensor]
_Addition = tuple[nn.Parameter, _Make]


class GradientRequest(NamedTuple):
    """A gradient that a backward may have to compute.

    operand: the weight or bias, or None where the operation has none.
    needed: True where autograd needs the gradient.
    make: computes the gradient; given a tensor, it adds the gradient to the tensor in place.
    """

    operand: Tensor | None
    needed: bool
    make: _Make


class WeightGradients:
    """A handler of weight gradients in backwards; it stores deferred ones by chunk and
    micro-batch."""

    def __init__(self) -> None:
        self._left: dict[Key, list[_Addition]] = {}
        self._now: Key | None = None
        self._adds = False
        self._casts: dict[int, Tensor] | None = None

    @contextmanager
    def casting_once(self) -> Iterator[None]:
        """Cast each weight only once inside the context, and reuse the copy for all later
        products."""
        self._casts = {}
        try:
            yield
        finally:
            self._casts = None

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` in `dtype`; inside `casting_once` the cast is cached."""
        if weight.dtype == dtype or self._casts is None:
            return weight.to(dtype)
        if id(weight) not in self._casts:
            self._casts[id(weight)] = weight.to(dtype)
        return self._casts[id(weight)]

    @contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Defer the weight gradients of backwards inside the context until `accumulate(key)`."""
        self._now = key
        self._left[key] = []
        try:
            yield
        finally:
            self._now = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Add the weight gradients of backwards inside the context straight into `.grad`.

        Autograd gets no gradients, but still calls its hooks of a parameter when all readers of the
        parameter are done.
        """
        self._adds = True
        try:
            yield
        finally:
            self._adds = False

    def left(self, key: Key) -> Mapping[nn.Parameter, int]:
        """Return the number of gradients that `accumulate(key)` will add to each weight."""
        return Counter(parameter for parameter, _ in self._left[key])

    @torch.no_grad()  # or autograd would keep the operands of each gradient for a second backward
    def accumulate(self, key: Key, added: Added) -> None:
        """Add the gradients deferred under `key` to the weights' `.grad`.

        `added` is called with the weight after every addition.
        """
        for parameter, make in self._left.pop(key):
            _add(parameter, make)
            added(parameter)

    def take(self, additions: Sequence[_Addition]) -> Set[nn.Parameter]:
        """Add `additions` to `.grad` inside `accumulating`, or defer them inside `deferring`.

        Return the parameters of these additions, whose gradients autograd must not add. The set is
        empty outside of both contexts.
        """
        if self._now is not None:
            self._left[self._now] += additions
        elif self._adds:
            for parameter, make in additions:
                _add(parameter, make)
        else:
            additions = ()
        return {parameter for parameter, _ in additions}

    def gradients(self, wanted: Sequence[GradientRequest]) -> list[Tensor | None]:
        """Return the gradients that a backward hands to autograd, one for each of `wanted`.

        An entry is None where autograd needs no gradient, or where `take` has handled it.
        """
        needed = [(x.operand, x.make) for x in wanted if x.needed and x.operand is not None]
        # A bias computed from a parameter is no parameter: its gradient stays with autograd.
        taken = self.take([(p, make) for p, make in needed if isinstance(p, nn.Parameter)])
        remaining = {id(p): make(None).to(p.dtype) for p, make in needed if p not in taken}
        return [remaining.get(id(x.operand)) for x in wanted]

    def replace(self, graph: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
        """Replace `nodes` of `graph` by operations whose weight gradients this object handles.

        nodes: products and lookups, each of which reads a placeholder that takes the weight.
        """
        for node in nodes:
            owned: nn.Module
            args: tuple[fx.Node | None, ...]
            if is_product(node):
                product = product_of(node)
                owned = _OwnedProduct(self, product.kind)
                args = (product.input, product.weight, product.bias)
            else:
                lookup = lookup_of(node)
                owned = _OwnedLookup(self, lookup.padding)
                args = (lookup.weight, lookup.indices)
            name = f"owned_{node.name}"
            graph.add_module(name, owned)
            with graph.graph.inserting_before(node):
                new = graph.graph.call_module(name, args)
            replace_nodes(new, [node])


def of_product(
    kind: ProductForm,
    operands: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad: Tensor,
    x: Tensor,
) -> tuple[GradientRequest, GradientRequest]:
    """Return the requests for the gradients of a product's weight and bias.

    `operands` are the weight and the bias, and `needed` tells which of them autograd needs a
    gradient of. `x` [.., in] is the product's input, and `grad` [.., out] the gradient of its
    value.
    """
    weight, bias = operands
    return (
        GradientRequest(weight, needed[0], lambda known: kind.of_weight(grad, x, known)),
        GradientRequest(bias, needed[1], lambda known: kind.of_bias(grad, known)),
    )


class _OwnedProduct(nn.Module):
    """A product whose weight and bias gradients `owner` handles."""

    def __init__(self, owner: WeightGradients, kind: ProductForm) -> None:
        super().__init__()
        self.owner, self.kind = owner, kind

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product [.., out] of `x` [.., in], in autocast's dtype under autocast."""
        result: Tensor
        dtype = autocast_dtype(x.device.type)
        if dtype is None:
            result = _Product.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
            return result
        x = x.to(dtype)  # autocast does not reach into a Function
        with autocast(x.device.type, enabled=False):
            result = _Product.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    """One product as a function of autograd; its backward computes the input's gradient itself.

    The owner handles the gradients of weight and bias, and returns the gradients that autograd must
    add.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owned: _OwnedProduct
    ) -> Tensor:
        ctx.owned = owned
        ctx.operands = weight, bias  # the parameters themselves, whose `.grad` is added to
        cast = owned.owner.cast
        weight, bias = cast(weight, x.dtype), None if bias is None else cast(bias, x.dtype)
        ctx.save_for_backward(x, weight)
        return owned.kind.value(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        owned: _OwnedProduct = ctx.owned
        (grad,), kind = grads, owned.kind
        of_x = kind.of_input(grad, weight) if ctx.needs_input_grad[0] else None
        needed = ctx.needs_input_grad[1:3]
        wanted = of_product(kind, ctx.operands, needed, grad, x)
        return of_x, *owned.owner.gradients(wanted), None


class _OwnedLookup(nn.Module):
    """A lookup whose table gradient `owner` handles; the row `padding` has none."""

    def __init__(self, owner: WeightGradients, padding: int) -> None:
        super().__init__()
        self.owner, self.padding = owner, padding

    def forward(self, weight: Tensor, indices: Tensor) -> Tensor:
        result: Tensor = _Lookup.apply(weight, indices, self)  # type: ignore[no-untyped-call]
        return result


class _Lookup(torch.autograd.Function):
    """One lookup as a function of autograd; the owner handles the table's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, owned: _OwnedLookup) -> Tensor:
        ctx.owned, ctx.weight, ctx.rows = owned, weight, len(weight)
        ctx.save_for_backward(indices)
        return torch.embedding(weight, indices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (indices,) = grads, ctx.saved_tensors
        rows, padding = ctx.rows, ctx.owned.padding

        def make(known: Tensor | None) -> Tensor:
            return of_table(grad, indices, rows, padding, known)

        wanted = [GradientRequest(ctx.weight, ctx.needs_input_grad[0], make)]
        return *ctx.owned.owner.gradients(wanted), None, None


def _add(parameter: nn.Parameter, make: _Make) -> None:
    """Add the gradient that `make` computes to the parameter's `.grad`.

    The first gradient is cast to `grad_dtype`, the dtype of the parameter's gradients.
    """
    if parameter.grad is None:
        parameter.grad = make(None).to(parameter.grad_dtype)
    else:
        make(parameter.grad)
