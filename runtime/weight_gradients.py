"""Backward in two parts: gradients of inputs at once, those of weights when there is time.

What a zero-bubble schedule needs (Qi et al. 2023, arXiv 2401.10241): the stage before waits for
the gradient of its output, nobody waits for a weight's. In a rewritten graph the products that
have weights (linear, addmm) are replaced by functions whose backward gives the input's gradient and
notes what the weight's needs. They keep the weights themselves for that and no views of them, as is
wanted where ZeRO 3 takes weights away meanwhile.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from whale_train.runtime.products import Kind, product_of

Key = tuple[int, int]  # chunk, micro-batch
_Addition = tuple[nn.Parameter, Callable[[], Tensor]]  # and what makes its gradient


class WeightGradients:
    """What backwards have left to do, by chunk and micro-batch."""

    def __init__(self) -> None:
        self._left: dict[Key, list[_Addition]] = {}
        self._now: Key | None = None

    @contextmanager
    def deferring(self, key: Key) -> Iterator[None]:
        """Inside it, backwards leave weight gradients for `accumulate(key)`."""
        self._now = key
        self._left[key] = []
        try:
            yield
        finally:
            self._now = None

    def left(self, key: Key) -> Mapping[nn.Parameter, int]:
        """How many gradients `accumulate(key)` will add to each weight."""
        return Counter(parameter for parameter, _ in self._left[key])

    @torch.no_grad()  # or each gradient would keep what it was made of for a backward of its own
    def accumulate(self, key: Key, added: Callable[[nn.Parameter], None]) -> None:
        """Add what was left into the weights' `.grad`, and call `added` after every addition."""
        for parameter, make in self._left.pop(key):
            gradient = make().to(parameter.dtype)
            known = parameter.grad
            parameter.grad = gradient if known is None else known.add_(gradient)
            added(parameter)

    def take(self, additions: Sequence[_Addition]) -> bool:
        """Leave `additions` for later; False when they are wanted now."""
        if self._now is None:
            return False
        self._left[self._now] += additions
        return True

    def replace(self, graph: fx.GraphModule, parameters: frozenset[str]) -> None:
        """Replace the products of `graph` whose weight is one of its placeholders `parameters`."""
        for node in list(graph.graph.nodes):
            product = product_of(node, parameters)
            if product is None:
                continue
            name = f"deferred_{node.name}"
            graph.add_module(name, _Deferred(self, product.kind))
            with graph.graph.inserting_before(node):
                args = (product.input, product.weight, product.bias)
                new = graph.graph.call_module(name, args)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)
        graph.recompile()


class _Deferred(nn.Module):
    """One product, its weight's gradient deferred when a backward is in two parts."""

    def __init__(self, owner: WeightGradients, kind: Kind) -> None:
        super().__init__()
        self.owner, self.kind = owner, kind

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):  # which does not look into a Function
            x = x.to(torch.get_autocast_dtype(x.device.type))
        result: Tensor = _Product.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: _Deferred
    ) -> Tensor:
        ctx.deferred = deferred
        ctx.operands = weight, bias  # the very parameters, whose `.grad` is added to
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return deferred.kind.value(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        deferred: _Deferred = ctx.deferred
        (grad,), kind = grads, deferred.kind
        of_x = kind.of_input(grad, weight) if ctx.needs_input_grad[0] else None
        wanted: list[tuple[Tensor, Callable[[], Tensor]]] = [
            (operand, make)
            for operand, needed, make in zip(
                ctx.operands,
                ctx.needs_input_grad[1:3],
                (lambda: kind.of_weight(grad, x), lambda: grad.flatten(0, -2).sum(0)),
                strict=True,
            )
            if needed
        ]
        # A bias that is made of a parameter has a backward of its own to hand its gradient to.
        later = [(p, make) for p, make in wanted if isinstance(p, nn.Parameter)]
        left = {id(p) for p, _ in later} if deferred.owner.take(later) else set[int]()
        made = {id(p): make().to(p.dtype) for p, make in wanted if id(p) not in left}
        of_weight, of_bias = (made.get(id(operand)) for operand in ctx.operands)
        return of_x, of_weight, of_bias, None
