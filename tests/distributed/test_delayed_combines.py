"""Rows that come back from their experts while a shared expert's products run: what they would be
without waiting, forward and backward, in an order that leaves them time."""

import torch
from tests.distributed.harness import run_ranks
from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.runtime.base.node_meta import BLOCK
from whale_train.runtime.comms.expert_rows import (
    combine,
    combine_begin,
    combine_end,
    dispatch,
    exchange,
)
from whale_train.runtime.comms.layout_collectives import ShardGroup
from whale_train.runtime.graph.delay_combines import delay_combines
from whale_train.runtime.graph.written_graph import Called

EXPERTS, ROWS, WIDTH = 4, 7, 3


def sent_and_back() -> list[Tensor]:
    """Rows that came back, and the gradient of what was sent, both ways. The last row is nobody's:
    it stays."""
    rank = dist.get_rank()
    experts = ShardGroup(dist.group.WORLD, (3, 1), rank)
    ends = torch.tensor([[2, 2, 3, 6], [0, 4, 4, 6]][rank], dtype=torch.int32)
    found = []
    for delayed in (False, True):
        torch.manual_seed(rank)
        rows = torch.randn(ROWS, WIDTH, requires_grad=True)
        where = exchange(ends, rows, experts)
        there = dispatch(rows, where).tanh() * (rank + 2)
        if delayed:
            returning = combine_begin(there, where)
            beside = (rows * 2).cos()
            back = combine_end(returning)
        else:
            back, beside = combine(there, where), (rows * 2).cos()
        (back * beside).pow(2).sum().backward()
        found += [back.detach(), rows.grad]
    return found


def test_rows_and_gradients_are_those_that_are_waited_for() -> None:
    for back, grad, delayed_back, delayed_grad in run_ranks(sent_and_back, 2):
        assert torch.equal(back, delayed_back)
        torch.testing.assert_close(grad, delayed_grad)
        assert torch.equal(back[-1], torch.zeros(WIDTH))


def traced(first: bool, in_place: bool = False) -> fx.GraphModule:
    """A mixture's rows and a shared expert of one layer, which is computed `first` or last."""
    graph, root = fx.Graph(), nn.Module()
    root.add_module("combine", Called(combine))
    x, weight, rows, where = map(graph.placeholder, ("x", "weight", "rows", "where"))
    aten = torch.ops.aten

    def shared() -> fx.Node:
        made = graph.call_function(aten.linear.default, (x, weight))
        return graph.call_function(aten.silu.default, (made,))

    beside = shared() if first else None
    back = graph.call_module("combine", (rows, where))
    scaled = graph.call_function(aten.mul.Tensor, (back, 2.0))
    if in_place:
        scaled = graph.call_function(aten.mul_.Tensor, (scaled, 2.0))
    beside = beside or shared()
    graph.output(graph.call_function(aten.add.Tensor, (scaled, beside)))
    for node in graph.nodes:
        node.meta[BLOCK] = "" if node.op in ("placeholder", "output") else "layers.0"
    return fx.GraphModule(root, graph)


def order_of(graph: fx.GraphModule) -> list[str]:
    calls = (node for node in graph.graph.nodes if node.op.startswith("call"))
    return [str(node.target).removeprefix("aten.").removesuffix(".default") for node in calls]


def test_products_run_while_rows_come() -> None:
    for first in (False, True):
        graph = traced(first)
        delay_combines(graph, set())
        graph.graph.lint()
        expected = ["combine_begun", "linear", "silu", "combine_ended", "mul.Tensor", "add.Tensor"]
        assert order_of(graph) == expected, first


def test_what_changes_in_place_keeps_its_order() -> None:
    graph = traced(first=True, in_place=True)
    before = order_of(graph)
    delay_combines(graph, {x for x in graph.graph.nodes if x.target == torch.ops.aten.mul_.Tensor})
    assert order_of(graph) == before


def test_without_other_products_rows_are_waited_for() -> None:
    graph = traced(first=False)
    (linear,) = (n for n in graph.graph.nodes if n.target == torch.ops.aten.linear.default)
    linear.target, linear.args = torch.ops.aten.mul.Tensor, (linear.args[0], 3.0)
    before = order_of(graph)
    delay_combines(graph, set())
    assert order_of(graph) == before
