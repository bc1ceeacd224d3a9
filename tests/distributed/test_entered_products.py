"""Products joined at the value they read, against the same products of whole weights."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.runtime.comms.layout_collectives import copy_to_parallel_region
from whale_train.runtime.kernels.column_parallel import join_products
from whale_train.runtime.kernels.weight_gradients import WeightGradients

aten = torch.ops.aten
MEMBERS = 2
PARAMETERS = ("first", "bias", "second", "shift", "third")


def drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def parameters() -> list[Tensor]:
    """Of all members' work side by side: two linears of 6 and 4 columns and an addmm of 8."""
    shapes = ((6, 5), (6,), (5, 8), (8,), (4, 5))
    return [drawn(i + 1, *shape) for i, shape in enumerate(shapes)]


def mine(whole: list[Tensor], rank: int) -> list[nn.Parameter]:
    """A member's half of every output."""
    dims = (0, 0, 1, 0, 0)
    return [
        nn.Parameter(t.chunk(MEMBERS, d)[rank].clone()) for t, d in zip(whole, dims, strict=True)
    ]


class Entering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = partial(copy_to_parallel_region, group=dist.group.WORLD)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def graph_of() -> fx.GraphModule:
    graph, root = fx.Graph(), nn.Module()
    root.entering = Entering()
    x = graph.placeholder("x")
    first, bias, second, shift, third = (graph.placeholder(name) for name in PARAMETERS)
    entered = graph.call_module("entering", (x,))
    made = [
        graph.call_function(aten.linear.default, (entered, first, bias)),
        graph.call_function(aten.addmm.default, (shift, entered, second)),
        graph.call_function(aten.linear.default, (entered, third)),
    ]
    graph.output(tuple(made))
    return fx.GraphModule(root, graph)


def products(module: fx.GraphModule) -> list[fx.Node]:
    read = (aten.linear.default, aten.addmm.default)
    return [node for node in module.graph.nodes if node.target in read]


def gradients(frozen: bool) -> dict[str, Any]:
    whole, rank = parameters(), dist.get_rank()
    held = mine(whole, rank)
    held[0].requires_grad_(not frozen)
    module = graph_of()
    join_products(module, [products(module)], WeightGradients())
    module.recompile()
    x = drawn(0, 7, 5).requires_grad_()
    outputs = module(x, *held)
    sum((out**2).sum() for out in outputs[:3]).backward()
    return {
        "calls": [str(node.target) for node in module.graph.nodes if node.op == "call_module"],
        "outputs": [out.detach() for out in outputs[:3]],
        "x": x.grad,
        "held": [parameter.grad for parameter in held],
    }


@pytest.mark.parametrize("frozen", [False, True])
def test_joined_products_are_those_of_whole_weights(frozen: bool) -> None:
    whole = [t.requires_grad_() for t in parameters()]
    x = drawn(0, 7, 5).requires_grad_()
    made = (x @ whole[0].T + whole[1], x @ whole[2] + whole[3], x @ whole[4].T)
    sum((out**2).sum() for out in made).backward()
    for rank, found in enumerate(run_ranks(gradients, MEMBERS, frozen)):
        assert found["calls"] == ["products_entering"]
        for out, expected in zip(found["outputs"], made, strict=True):
            torch.testing.assert_close(out, expected.detach().chunk(MEMBERS, 1)[rank])
        torch.testing.assert_close(found["x"], x.grad)
        of_all = mine([t.grad for t in whole], rank)
        for number, (of_mine, of_whole) in enumerate(zip(found["held"], of_all, strict=True)):
            if frozen and number == 0:
                assert of_mine is None
            else:
                torch.testing.assert_close(of_mine, of_whole.detach())


def halves(_: int) -> list[torch.dtype]:
    module = graph_of()
    join_products(module, [products(module)], WeightGradients())
    module.recompile()
    held = [nn.Parameter(p.detach().float()) for p in mine(parameters(), dist.get_rank())]
    x = drawn(0, 7, 5).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = module(x, *held)
    sum((out.float() ** 2).sum() for out in outputs).backward()
    return [*(out.dtype for out in outputs), x.grad.dtype, *(p.grad.dtype for p in held)]


def test_autocast_reaches_joined_products_and_their_sum_is_wide() -> None:
    for found in run_ranks(halves, MEMBERS, 0):
        assert found == [torch.bfloat16] * 3 + [torch.float32] * 6
