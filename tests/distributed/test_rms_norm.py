"""RMSNorm as one function, against its operations; and what of a graph is one."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from whale_train.models.export.to_operation_graph import operation_graph
from whale_train.runtime.kernels.rms_norm import join_rms_norms, rms_norm
from whale_train.strategies.graph.rewrites import RewriteScope


def in_operations(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    eps=st.sampled_from([1e-6, 0.5]),
    learned=st.sampled_from([(True, True), (True, False), (False, True)]),
    turned=st.booleans(),
    seed=st.integers(0, 99),
)
def test_value_and_gradients(
    shape: list[int], eps: float, learned: tuple[bool, bool], turned: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def value(*size: int) -> Tensor:
        """With its last two dimensions the other way in memory, where it is `turned`."""
        if len(size) < 2 or not turned:
            return drawn(*size)
        return drawn(*size[:-2], size[-1], size[-2]).transpose(-1, -2)

    leaves = [value(*shape), drawn(shape[-1])]
    towards = value(*shape)
    found = []
    for function in (rms_norm, in_operations):
        x, weight = (
            leaf.clone().requires_grad_(wanted)
            for leaf, wanted in zip(leaves, learned, strict=True)
        )
        normed = function(x, weight, eps)
        normed.backward(towards)
        found.append((normed.detach(), x.grad, weight.grad))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_halves_and_other_weights_go_through_the_operations() -> None:
    x, weight = torch.randn(3, 4), torch.randn(3, 1)
    torch.testing.assert_close(rms_norm(x, weight, 0.1), in_operations(x, weight, 0.1))
    half, whole = x.bfloat16(), torch.randn(4)
    assert torch.equal(rms_norm(half, whole, 0.1), in_operations(half, whole, 0.1))


class Norm(nn.Module):
    def __init__(self, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.formula = nn.Parameter(torch.randn(6)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, self.weight)


def as_llama(x: Tensor, weight: Tensor) -> Tensor:
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + 1e-6)).to(torch.float32)


def reversed_products(x: Tensor, weight: Tensor) -> Tensor:
    return (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * x) * weight


def over_another_dim(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6))


def of_another_value(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.sin().pow(2).mean(-1, keepdim=True) + 1e-6))


def read_twice(x: Tensor, weight: Tensor) -> Tensor:
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (x * inverse) + inverse


def changed_between(x: Tensor, weight: Tensor) -> Tensor:
    x = x + 1
    mean = x.pow(2).mean(-1, keepdim=True)
    x.mul_(2.0)
    return weight * (x * torch.rsqrt(mean + 1e-6))


@pytest.mark.parametrize(
    ("formula", "joined"),
    [
        (as_llama, True),
        (reversed_products, True),
        (over_another_dim, False),
        (of_another_value, False),
        (read_twice, False),
        (changed_between, False),
    ],
)
def test_what_is_one(formula: Callable[[Tensor, Tensor], Tensor], joined: bool) -> None:
    module, x = Norm(formula), torch.randn(6, 6)
    expected = module(x.clone())
    graph = torch.export.export(module, (x,), strict=False).module()
    assert isinstance(graph, fx.GraphModule)
    for node in list(graph.graph.nodes):  # readers that a rewritten graph does not have
        if "_assert_tensor_metadata" in str(node.target):
            graph.graph.erase_node(node)
    nodes = {node.name: node for node in graph.graph.nodes}
    norms = list(RewriteScope.whole(operation_graph(graph, {}, {}, {})).rms_norms())
    assert [norm.kind for norm in norms] == ["rms_norm"] * joined
    join_rms_norms(graph, [[nodes[name] for name in norm.operations] for norm in norms])
    graph.recompile()
    assert any(node.target is rms_norm for node in graph.graph.nodes) == joined
    torch.testing.assert_close(graph(x.clone()), expected)
