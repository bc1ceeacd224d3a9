"""Products whose weights' gradients wait, and whose weights may be taken away meanwhile."""

import pytest
import torch
from torch import Tensor, fx, nn

from whale_train.runtime.blocks import BLOCK
from whale_train.runtime.weight_gradients import WeightGradients

aten = torch.ops.aten
KEY = (0, 0)


def graph_of(kind: str) -> fx.GraphModule:
    """tanh of a product with a weight and of a bias that is made of a parameter."""
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    made = graph.call_function(aten.mul.Tensor, (bias, 2.0))
    if kind == "linear":
        product = graph.call_function(aten.linear.default, (x, weight, made))
    else:
        product = graph.call_function(aten.addmm.default, (made, x, weight))
    graph.output(graph.call_function(aten.tanh.default, (product,)))
    for node in graph.nodes:
        node.meta[BLOCK] = "layers.0"
    return fx.GraphModule(nn.Module(), graph)


def operands(kind: str) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((6, 5), (3, 5), (3,)))
    weight = weight if kind == "linear" else weight.t().contiguous()
    return x.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias)


def replaced(kind: str, deferred: WeightGradients) -> fx.GraphModule:
    graph = graph_of(kind)
    deferred.replace(graph, frozenset(("weight", "bias")))
    return graph


@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_a_bias_that_is_made_of_a_parameter_has_its_gradient_at_once(kind: str) -> None:
    x, weight, bias = operands(kind)
    graph_of(kind)(x, weight, bias).sum().backward()
    expected = [t.grad for t in (x, weight, bias)]
    x, weight, bias = operands(kind)
    deferred = WeightGradients()
    loss = replaced(kind, deferred)(x, weight, bias).sum()
    with deferred.deferring(KEY):
        loss.backward()
    assert dict(deferred.left(KEY)) == {weight: 1}
    assert weight.grad is None
    torch.testing.assert_close([x.grad, bias.grad], [expected[0], expected[2]])
    deferred.accumulate(KEY, lambda parameter: None)
    torch.testing.assert_close(weight.grad, expected[1])


@pytest.mark.parametrize("kind", ["linear", "addmm"])
def test_a_product_stays_in_its_block(kind: str) -> None:
    nodes = replaced(kind, WeightGradients()).graph.nodes
    assert [node.meta.get(BLOCK) for node in nodes] == ["layers.0"] * len(nodes)


def test_no_view_of_a_weight_is_kept() -> None:
    """What ZeRO 3 gathered is free once it takes the weight away: the weight itself is kept, and
    read again when it is there."""
    assert views_kept(graph_of("linear"))
    assert not views_kept(replaced("linear", WeightGradients()))


def views_kept(graph: fx.GraphModule) -> list[tuple[int, ...]]:
    x, weight, bias = operands("linear")
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph(x, weight, bias)
    of_weight = [t for t in kept if t.untyped_storage()._cdata == weight.untyped_storage()._cdata]
    assert of_weight
    return [tuple(t.shape) for t in of_weight if not t.is_leaf]
