"""Forwards that write in place, and the graphs without writes that they become."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from whale_train.models.export.export import export


def residual(x: Tensor) -> Tensor:
    x += x.tanh()
    x *= 2
    return x.add_(0.1).relu_()


def parts(x: Tensor) -> Tensor:
    x[:, 0].mul_(0.5)
    x[:, 1] = 3.0
    x[:, 2:4, ::2] = x[:, :2, 1::2] * 2
    x[..., -1].zero_()
    return x


def views(x: Tensor) -> Tensor:
    """Written by many names of one memory, and read by those made before."""
    turned, flat = x.transpose(1, 2), x.view(-1, 4)
    turned[:, 0].mul_(0.3)
    flat[:, 1:3].add_(turned[:, 3].reshape(-1, 1))
    x.permute(2, 0, 1)[0] += 1
    x.unsqueeze(0).squeeze(0).sub_(flat.mean())
    x.unflatten(2, (2, 2)).select(3, 1).neg_()
    return flat.sum(0) + turned.sum((0, 2))


def a_name_of_a_write(x: Tensor) -> Tensor:
    first = x.mul_(2)
    second = first.add_(1)
    third = x.sin_()
    return first * second + third


def into_zeros(x: Tensor) -> Tensor:
    """No gradient until one is written, step by step as in a recurrent layer."""
    found, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for step in range(x.shape[1]):
        state = state * 0.5 + x[:, step]
        found[:, step] = state
    return found


def masked(x: Tensor) -> Tensor:
    x[x > 0.2] = 1.5
    x.masked_fill_(x < -0.5, -2.0)
    x.index_add_(2, torch.tensor([0, 2]), x[..., :2] * 2)
    x.scatter_(2, torch.zeros_like(x[..., :1], dtype=torch.long), x[..., 3:] * 2)
    return x


def a_copy_first(x: Tensor) -> Tensor:
    kept, reshaped = x.clone(), x.transpose(1, 2).reshape(-1)  # which is a copy
    x.fill_(2.0)
    return x + kept + reshaped.mean()


def broadcast(x: Tensor) -> Tensor:
    x[:, 1:3] = x[:, :1]
    x[:, 4].fill_(x.mean())
    return x


def of_another_type(x: Tensor) -> Tensor:
    half = x.to(torch.bfloat16)
    half += x  # stays what it is
    return half.float() * 2


def labels(x: Tensor) -> Tensor:
    """What has no gradient."""
    moved = torch.zeros_like(x.detach())
    moved[:, 1:] = x.detach()[:, :-1] > 0
    return x * moved


WRITING = [
    *(residual, parts, views, a_name_of_a_write, into_zeros, masked, a_copy_first, broadcast),
    *(of_another_type, labels),
]


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.function = function
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        return (self.function(self.into(x)) ** 2).mean()


def written_to(graph: fx.GraphModule) -> list[str]:
    """The names of what is changed in place. `detach_`, of constants, changes nothing."""
    found = []
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and schema.name != "aten::detach_":
            found.append(node.args[0].name)
    return found


@pytest.mark.parametrize("function", WRITING)
def test_a_graph_without_writes_computes_the_same(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(3, 5, 4)
    graph, error = export(model, {"x": x})
    assert graph is not None, error
    assert set(written_to(graph)) == {"calls"}
    found, expected = graph(x=x), model(x=x)
    torch.testing.assert_close(found, expected)
    of_graph, of_model = (
        torch.autograd.grad(loss, list(model.parameters())) for loss in (found, expected)
    )
    torch.testing.assert_close(of_graph, of_model)


def test_it_computes_the_same_in_half_precision() -> None:
    def summed(x: Tensor) -> Tensor:
        x += torch.linspace(0, 1, 4)  # of a wider type
        return x

    model, x = Model(summed), torch.randn(3, 5, 4)
    graph, error = export(model, {"x": x})
    assert graph is not None, error
    model, graph, x = model.bfloat16(), graph.bfloat16(), x.bfloat16()
    assert graph(x=x).dtype is torch.bfloat16
    torch.testing.assert_close(graph(x=x), model(x=x))


def resized(x: Tensor) -> Tensor:
    y = x * 2
    y.unsqueeze_(0)
    return y


def in_a_graph_inside(x: Tensor) -> Tensor:
    y = x * 2
    y.relu_()
    with torch.no_grad():
        y.mul_(2)
    return y


@pytest.mark.parametrize(
    ("function", "operation"),
    [(resized, "aten.unsqueeze_.default"), (in_a_graph_inside, "wrap_with_set_grad_enabled")],
)
def test_what_has_no_other_form_is_refused(
    function: Callable[[Tensor], Tensor], operation: str
) -> None:
    graph, error = export(Model(function), {"x": torch.zeros(3, 5, 4)})
    assert graph is None
    assert error == f"its forward changes in place: {operation}"


def test_what_has_no_other_form_stays_where_no_gradient_is() -> None:
    def drawn(x: Tensor) -> Tensor:
        mask = torch.zeros_like(x.detach())
        mask.unsqueeze_(0)
        mask[:, :, 0] = 1
        return x * mask[0]

    torch.manual_seed(0)
    model, x = Model(drawn), torch.randn(3, 5, 4)
    graph, error = export(model, {"x": x})
    assert graph is not None, error
    assert len(set(written_to(graph))) > 1
    torch.testing.assert_close(graph(x=x), model(x=x))
