"""Overlap the communication of products that read one common input with their gradients.

A replicated value that enters sharded work gets gradients from every member of the group. Earlier
layers wait for the sum of these gradients, but nothing waits for the work's weight gradients. So
where all readers of such a value are products with weights (the three projections of an attention,
the two of a gated MLP, a head), they become one function whose backward begins the sum, computes
the weight gradients, and then waits for the sum.

An input that is sharded along the sequence is gathered for them, in the dtype of the products. The
function saves the rank's shard alone; its backward gathers the input again beside the gradient of
the input, and scatters the sum of that gradient beside the weight gradients.

The plan lists the products (`joined_products` and `gathered_products` of
strategies/graph/rewrites.py). Megatron-LM does the same for its column-parallel layers (Korthikanti
et al. 2022, arXiv 2205.05198, section 4.2.2).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import getitem
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from whale_train.runtime.base.autocast import autocast, autocast_dtype
from whale_train.runtime.base.graph_nodes import replace_nodes
from whale_train.runtime.comms.layout_collectives import TokenShards, copy_to_parallel_region
from whale_train.runtime.kernels.matmul import ProductForm, as_rows, product_of
from whale_train.runtime.kernels.weight_gradients import WeightGradients, of_product


def join_products(
    graph: fx.GraphModule, joined: Iterable[Sequence[fx.Node]], owner: WeightGradients
) -> None:
    """Replace each of `joined` in `graph`, and the node through which its input enters the parallel
    region, by one function.

    joined: products with weights of the placeholders, in the order they run. They are the only
        readers of one `copy_to_parallel_region` or `all_gather_reduce_scatter`.
    owner: computes the gradients of the weights and biases.
    """
    for nodes in joined:
        products = [product_of(node) for node in nodes]
        entered = products[0].input
        function = graph.get_submodule(str(entered.target)).function
        assert isinstance(function, partial)
        name = f"products_{entered.name}"
        kinds = [product.kind for product in products]
        graph.add_module(name, _Joined(kinds, _entry(function), owner))
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


class _Entry(Protocol):
    """How an input enters products that are sharded over `group`."""

    group: dist.ProcessGroup

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        """Begin to make the products' input of what the rank has of it, and return a function that
        returns the input."""

    def sum(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Begin to sum the members' gradients of the input, and return a function that returns what
        the rank has of the sum."""


class _Whole:
    """An input of which every member has all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def gather(self, own: Tensor) -> Callable[[], Tensor]:
        return lambda: own

    def sum(self, gradient: Tensor) -> Callable[[], Tensor]:
        group = self.group  # a timeout is reported by this name (failures/timeout_frames.py)
        work = dist.all_reduce(gradient, group=group, async_op=True) if gradient.numel() else None

        def summed() -> Tensor:
            if work is not None:
                work.wait()
            return gradient

        return summed


def _entry(function: partial[Tensor]) -> _Entry:
    """Return the entry of the cast `function`, a `copy_to_parallel_region` or
    `all_gather_reduce_scatter`."""
    given = function.keywords
    if function.func is copy_to_parallel_region:
        return _Whole(given["group"])
    return TokenShards(given["dim"], given["outer"], given["shards"])


class _Joined(nn.Module):
    """Products with one common input, which enters by `entry`."""

    def __init__(self, kinds: Sequence[ProductForm], entry: _Entry, owner: WeightGradients) -> None:
        super().__init__()
        self.kinds, self.entry, self.owner = tuple(kinds), entry, owner

    def forward(self, x: Tensor, *operands: Tensor | None) -> tuple[Tensor, ...]:
        """Return the value [.., out] of each product for the rank's part `x` [.., in] of the common
        input.

        `operands` are the weight and the bias (or None) of each product in turn.
        """
        dtype = autocast_dtype(x.device.type)
        values: tuple[Tensor, ...] = _Products.apply(x, self, dtype, *operands)  # type: ignore[no-untyped-call]
        return values


class _Products(torch.autograd.Function):
    """Several products of one input, as one function of autograd.

    The backward overlaps the arrival of the input with the input's gradient, and the sum of that
    gradient with the weight gradients.
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
            x = joined.entry.gather(x)()
            given = zip(joined.kinds, weights, biases, strict=True)
            return tuple(kind.value(x, w, b) for kind, w, b in given if w is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        joined: _Joined = ctx.joined
        arrived, summed = joined.entry.gather(x), None
        if ctx.needs_input_grad[0]:
            of_x = _sum_of_inputs(joined.kinds, grads, weights).to(ctx.dtype)
            summed = joined.entry.sum(of_x)
            del of_x
        x = arrived()
        operands, needed = ctx.operands, ctx.needs_input_grad[3:]
        operand_grads: list[Tensor | None] = []
        for number, (kind, grad) in enumerate(zip(joined.kinds, grads, strict=True)):
            pair = slice(2 * number, 2 * number + 2)  # weight and bias
            wanted = of_product(kind, operands[pair], needed[pair], grad, x)
            operand_grads += joined.owner.gradients(wanted)
        return summed and summed(), None, None, *operand_grads


def _sum_of_inputs(
    kinds: Sequence[ProductForm], grads: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """Return the gradient [.., in] of the products' common input, summed in one buffer.

    `grads` are the gradients [.., out] of the products' values.
    """
    shape = grads[0].shape[:-1]
    rows = [as_rows(grad) for grad in grads]
    total = kinds[0].of_input(rows[0], weights[0])
    for kind, grad, weight in zip(kinds[1:], rows[1:], weights[1:], strict=True):
        kind.add_of_input(total, grad, weight)
    return total.view(*shape, total.shape[-1])
