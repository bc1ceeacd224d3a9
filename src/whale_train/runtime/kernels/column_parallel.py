"""Overlap the all-reduce of an input's gradient with the weight gradients of the products that read
it.

A replicated value that enters sharded work gets gradients from every member of the group. Earlier
layers wait for the sum of these gradients, but nothing waits for the work's weight gradients. So
where all readers of such a value are products with weights (the three projections of an attention,
the two of a gated MLP, a head), they become one function whose backward begins the sum, computes
the weight gradients, and then waits for the sum. The plan lists the products (`joined_products` of
strategies/graph/rewrites.py). Megatron-LM does the same for its column-parallel layers (Korthikanti
et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from whale_train.runtime.base.autocast import autocast, autocast_dtype
from whale_train.runtime.base.graph_nodes import replace_nodes
from whale_train.runtime.kernels.matmul import ProductForm, as_rows, product_of
from whale_train.runtime.kernels.weight_gradients import WeightGradients, of_product


def join_products(
    graph: fx.GraphModule, joined: Iterable[Sequence[fx.Node]], owner: WeightGradients
) -> None:
    """Replace each of `joined` in `graph`, and the node that copies its input to the parallel
    region, by one function.

    joined: products with weights of the placeholders, in the order they run. They are the only
        readers of one `copy_to_parallel_region`.
    owner: computes the gradients of the weights and biases.
    """
    for nodes in joined:
        products = [product_of(node) for node in nodes]
        entered = products[0].input
        function = graph.get_submodule(str(entered.target)).function
        assert isinstance(function, partial)
        group: dist.ProcessGroup = function.keywords["group"]
        name = f"products_{entered.name}"
        graph.add_module(name, _Joined([product.kind for product in products], group, owner))
        operands = [x for product in products for x in (product.weight, product.bias)]
        with graph.graph.inserting_after(entered):
            joint = graph.graph.call_module(name, (entered.args[0], *operands))
        joint.meta = dict(entered.meta)
        after = joint
        for number, product in enumerate(products):
            with graph.graph.inserting_after(after):
                after = graph.graph.call_function(getitem, (joint, number))
            replace_nodes(after, [product.node])
        graph.graph.erase_node(entered)


class _Joined(nn.Module):
    """Products with one common input, whose gradient the backward all-reduces over `group`."""

    def __init__(
        self, kinds: Sequence[ProductForm], group: dist.ProcessGroup, owner: WeightGradients
    ) -> None:
        super().__init__()
        self.kinds, self.group, self.owner = tuple(kinds), group, owner

    def forward(self, x: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
        """Return the value [.., out] of each product for the common input `x` [.., in].

        `operands` are the weight and the bias (or None) of each product in turn.
        """
        dtype = autocast_dtype(x.device.type)
        values: tuple[Tensor, ...] = _Products.apply(x, self, dtype, *operands)  # type: ignore[no-untyped-call]
        return values


class _Products(torch.autograd.Function):
    """Several products of one input, as one function of autograd.

    The backward overlaps the sum of the input's gradient with the weight gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, joined: _Joined, dtype: torch.dtype | None, *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.joined, ctx.dtype = joined, x.dtype
        ctx.operands = operands  # the parameters themselves, whose `.grad` is added to
        if dtype is not None:  # autocast does not reach into a Function
            x = x.to(dtype)
            cast = joined.owner.cast
            operands = tuple(None if t is None else cast(t, dtype) for t in operands)
        weights, biases = operands[::2], operands[1::2]
        ctx.save_for_backward(x, *weights)
        with autocast(x.device.type, enabled=False):
            given = zip(joined.kinds, weights, biases, strict=True)
            return tuple(kind.value(x, w, b) for kind, w, b in given if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        joined: _Joined = ctx.joined
        # A timeout is reported by the local name `group` (runtime/failures/timeout_frames.py).
        group = joined.group
        of_x, work = None, None
        if ctx.needs_input_grad[0]:
            of_x = _sum_of_inputs(joined.kinds, grads, weights).to(ctx.dtype)
            if of_x.numel():
                work = dist.all_reduce(of_x, group=group, async_op=True)
        operands, needed = ctx.operands, ctx.needs_input_grad[3:]
        operand_grads: list[Tensor | None] = []
        for number, (kind, grad) in enumerate(zip(joined.kinds, grads, strict=True)):
            pair = slice(2 * number, 2 * number + 2)  # weight and bias
            wanted = of_product(kind, operands[pair], needed[pair], grad, x)
            operand_grads += joined.owner.gradients(wanted)
        if work is not None:
            work.wait()
        return of_x, None, None, *operand_grads


def _sum_of_inputs(
    kinds: Sequence[ProductForm], grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """Return the gradient [.., in] of the products' common input, summed in one buffer.

    `grads` are the gradients [.., out] of the products' values.
    """
    shape = grads[0].shape[:-1]
    rows = [as_rows(grad) for grad in grads]
    total = rows[0] @ kinds[0].to_input(weights[0])
    for kind, grad, weight in zip(kinds[1:], rows[1:], weights[1:], strict=True):
        total.addmm_(grad, kind.to_input(weight))
    return total.view(*shape, total.shape[-1])
