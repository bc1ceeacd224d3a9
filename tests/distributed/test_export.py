"""Which models have a graph, and why the others have none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from whale_train.models.build import build_model
from whale_train.models.export.export import export, export_model, on_meta
from whale_train.models.export.lifted_constants import with_constants
from whale_train.models.loss_module import LossModule
from whale_train.models.options import ModelOptions
from whale_train.strategies.graph.operation_graph import InputField


class Reversed(Function):
    """A gradient layer of domain adaptation: the values as they are, the gradients reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Clipped(Function):
    """Unlike its derivative where values are large, and there alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.clamp(-10, 10)


class Squared(Function):
    """A product whose backward is its derivative, with a mask beside it, written in the way that
    keeps the context apart."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return x * x * y * factor, y > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, y, ctx.factor = inputs
        ctx.save_for_backward(x, y)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return grad * 2 * x * y * ctx.factor, grad * x * x * ctx.factor, None


class Doubled(Function):
    """It writes into what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@torch.library.custom_op("whale_train_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    """An operation of a user's own, with five times its derivative."""
    return x * 3


@tripled.register_fake
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


tripled.register_autograd(lambda ctx, grad: grad * 15)


squared = Squared.apply  # as many modules name them


class Model(nn.Module):
    """A product, and then `function`."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(4, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self.into(x)) ** 2).sum()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return x


def on_module() -> nn.Module:
    model = Model(torch.tanh)
    model.into.register_full_backward_hook(lambda module, into, out: None)
    return model


def before_module() -> nn.Module:
    model = Model(torch.tanh)
    model.into.register_full_backward_pre_hook(lambda module, grad: None)
    return model


def on_parameter() -> nn.Module:
    model = Model(torch.tanh)
    model.into.weight.register_hook(lambda grad: grad * 2)
    return model


def after_accumulation() -> nn.Module:
    model = Model(torch.tanh)
    model.into.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


LOSES = "torch.export would lose the backward of the autograd function "


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: Model(lambda x: Reversed.apply(x)), LOSES + "Reversed"),
        (lambda: Model(lambda x: Rounded.apply(x)), LOSES + "Rounded"),
        (lambda: Model(lambda x: Clipped.apply(x)), LOSES + "Clipped"),
        (
            lambda: Model(lambda x: checkpoint(torch.tanh, x, use_reentrant=True)),
            LOSES + "CheckpointFunction",
        ),
        (
            lambda: Model(hooked),
            "torch.export would lose the hook on a gradient that its forward registers",
        ),
        (on_module, "torch.export would lose the backward hook of module into"),
        (before_module, "torch.export would lose the backward hook of module into"),
        (on_parameter, "torch.export would lose the hook on the gradient of parameter into.weight"),
        (
            after_accumulation,
            "torch.export would lose the hook on the gradient of parameter into.bias",
        ),
        (
            lambda: Model(lambda x: x[x[:, 0] > 0]),
            "its forward makes tensors whose shapes follow values of others",
        ),
        (
            lambda: Model(lambda x: x * x.max().item()),
            "its forward computes with numbers that it reads from tensors",
        ),
        (lambda: Model(torch.vmap(torch.tanh)), "its forward uses torch.vmap"),
        (lambda: Model(lambda x: x if x.sum() > 0 else -x), "GuardOnDataDependentSymNode"),
    ],
)
def test_what_a_graph_would_not_hold_is_said(build: Callable[[], nn.Module], reason: str) -> None:
    graph, error = export(build(), {"x": torch.zeros(3, 4)})
    assert graph is None
    assert error.startswith(reason)


@pytest.mark.parametrize(
    "function",
    [
        torch.tanh,
        lambda x: squared(x, x.tanh(), 3.0)[0],
        lambda x: Doubled.apply(x * 3),
        tripled,
        lambda x: x + Reversed.apply(x.detach()),
        lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    ],
    ids=[
        "none",
        "context apart",
        "in place",
        "custom operation",
        "without a gradient",
        "checkpoint",
    ],
)
def test_a_graph_has_the_gradients_of_its_model(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(3, 4)
    graph, error = export(model, {"x": x})
    assert graph is not None, error
    found, expected = (
        torch.autograd.grad(each(x=x), list(model.parameters())) for each in (graph, model)
    )
    torch.testing.assert_close(found, expected)


def test_what_only_an_assertion_reads_is_not_in_a_graph() -> None:
    def asserted(x: Tensor) -> Tensor:
        lengths = (x.detach() != 0).sum(1)
        # What torch.export makes of an `assert`, of which pytest makes something else.
        torch._check(lengths.max().item() <= 4)
        return x

    graph, error = export(Model(asserted).to("meta"), {"x": torch.empty(3, 4, device="meta")})
    assert graph is not None, error
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)
    graph(x=torch.empty(5, 4, device="meta"))  # where no number can be read


def test_functions_of_wide_values_are_compared_on_narrow_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    forward = Squared.forward

    def noted(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        sizes.append(x.numel())
        return forward(x, y, factor)

    monkeypatch.setattr(Squared, "forward", staticmethod(noted))
    model = Model(lambda x: squared(x, x, 1.0)[0], width=2**24).to("meta")
    graph, error = export(model, {"x": torch.empty(3, 4, device="meta")})
    assert graph is not None, error
    assert sizes.count(3 * 2**24) == 2  # to export, and to see what it is called with
    assert max(size for size in sizes if size != 3 * 2**24) < 100


class Old(nn.Module):
    """Parameters and buffers made as was usual once, which a default device does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Module(), nn.Linear(6, 4)
        self.first.weight = nn.Parameter(torch.Tensor(6, 6).normal_())
        self.tied = self.first.weight
        self.frozen = nn.Parameter(torch.FloatTensor(6).zero_(), requires_grad=False)
        self.register_buffer("scale", torch.Tensor([2.0]))

    def forward(self, points: Tensor) -> Tensor:
        hidden = torch.tanh(points @ self.first.weight) @ self.tied * self.scale + self.frozen
        logits: Tensor = self.last(hidden)
        return logits


def test_old_constructors_have_no_values_either() -> None:
    options = ModelOptions.from_mapping({"_target_": f"{__name__}.Old", "loss": "cross_entropy"})
    fields = (InputField("points", (6,), "float32"), InputField("labels", (), "int64", 4))
    model = on_meta(options, fields)[0].model
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert model.get_parameter("tied") is model.get_parameter("first.weight")
    assert not model.get_parameter("frozen").requires_grad
    graph, error = export_model(options, fields)
    assert graph is not None, error


class Constants(nn.Module):
    """Tensors made in the forward. On a CPU, torch.export has the number that is put into `points`
    for one as well, and numbers it with the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Module(), nn.Linear(6, 4)

    def forward(self, points: Tensor) -> Tensor:
        points = points.clone()
        points[:, 0] = 0.25
        factors = [torch.tensor([0.5, factor]) for factor in (1.0, 2.0, 3.0)]
        shift = torch.tensor([0.125, 4.0])
        for factor in factors:
            points = points * factor.sum() - shift.prod()
        logits: Tensor = self.last(points)
        return logits


def test_constants_of_a_forward_are_found_whatever_their_numbers() -> None:
    options = ModelOptions.from_mapping(
        {"_target_": f"{__name__}.Constants", "loss": "cross_entropy"}
    )
    fields = (InputField("points", (6,), "float32"), InputField("labels", (), "int64", 4))
    graph, error = export_model(options, fields)
    assert graph is not None, error
    module = LossModule(build_model(options), options)
    graph = with_constants(graph, module, fields)
    constants = [
        graph.get_buffer(str(node.target)).tolist()
        for node in graph.graph.find_nodes(op="get_attr")
        if "lifted" in str(node.target)
    ]
    assert constants == [[0.5, 1.0], [0.5, 2.0], [0.5, 3.0], [0.125, 4.0]]


class OpenEnded(nn.Module):
    """It takes whatever it is given, and names a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 4)

    def forward(self, points: Tensor, **others: Tensor) -> Tensor:
        logits: Tensor = self.last(points * others["weights"])
        return logits


def test_a_graph_takes_what_a_forward_does_not_name() -> None:
    options = ModelOptions.from_mapping(
        {"_target_": f"{__name__}.OpenEnded", "loss": "cross_entropy"}
    )
    fields = (
        *(InputField("points", (6,), "float32"), InputField("weights", (6,), "float32")),
        InputField("labels", (), "int64", 4),
    )
    graph, error = export_model(options, fields)
    assert graph is not None, error
    taken = [node.target for node in graph.graph.find_nodes(op="placeholder")]
    assert sorted(taken) == ["labels", "points", "weights"]
