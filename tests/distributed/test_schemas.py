"""What draws random numbers in an exported graph, and what evaluation makes of its calls."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from whale_train.models.export.export import export
from whale_train.models.export.op_schemas import (
    changed_value,
    draws,
    in_evaluation,
    written_arguments,
)

aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, inner: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Inside(nn.Module):
    """With what is drawn in graphs inside the graph, one in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
            mask = self.drop(torch.ones(8, 8) @ x[0].T)
        return x + mask.float().mean()


def exported(module: nn.Module, x: Tensor) -> fx.GraphModule:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + 0.0)  # as some work in place

    graph, error = export(Named(), {"x": x})
    assert graph is not None, error
    return graph


def graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [each for each in module.modules() if isinstance(each, fx.GraphModule)]


RANDOM = {
    "Dropout": nn.Dropout(0.5),
    "Dropout in place": nn.Dropout(0.5, inplace=True),
    "Dropout1d": nn.Dropout1d(0.5),
    "AlphaDropout": nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": nn.FeatureAlphaDropout(0.5),
    "RReLU": nn.RReLU(),
    "RReLU in place": nn.RReLU(inplace=True),
    "LSTM": Recurrent(nn.LSTM(8, 4, num_layers=2, dropout=0.5, batch_first=True)),
    "GRU": Recurrent(nn.GRU(8, 4, num_layers=2, dropout=0.5, batch_first=True)),
    "MultiheadAttention": Attention(),
    "a graph inside": Inside(),
}
NOT_RANDOM = {
    "Dropout of 0": nn.Dropout(0.0),
    "Dropout in evaluation": nn.Dropout(0.5).eval(),
    "LSTM": Recurrent(nn.LSTM(8, 4, num_layers=2, batch_first=True)),
    "BatchNorm1d": nn.BatchNorm1d(5),
    "BatchNorm1d, none kept": nn.BatchNorm1d(5, track_running_stats=False),
    "InstanceNorm1d": nn.InstanceNorm1d(5, track_running_stats=True),
    "InstanceNorm1d, none kept": nn.InstanceNorm1d(5),
    "Linear": nn.Linear(8, 4),
}


@pytest.mark.parametrize(
    ("module", "expected"),
    [*((each, True) for each in RANDOM.values()), *((each, False) for each in NOT_RANDOM.values())],
    ids=[*RANDOM, *(f"not {name}" for name in NOT_RANDOM)],
)
def test_what_draws_is_found_and_evaluation_is_what_torch_makes_of_it(
    module: nn.Module, expected: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    graph = exported(module, x)
    calls = [n for each in graphs(graph) for n in each.graph.nodes if n.op == "call_function"]
    assert any(draws(node.target, node.args, node.kwargs) for node in calls) == expected
    for node in calls:
        args, node.kwargs = in_evaluation(node.target, node.args, node.kwargs)
        node.args = tuple(args)
    for each in graphs(graph):
        each.recompile()
    torch.testing.assert_close(graph(x=x), module.eval()(x.clone()))


def called(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call of a graph, whose arguments that are strings are values of these names."""
    graph = fx.Graph()

    def value(given: Any) -> Any:
        if isinstance(given, list):
            return [value(x) for x in given]
        return graph.placeholder(given) if isinstance(given, str) else given

    return graph.call_function(
        target, tuple(map(value, args)), {key: value(x) for key, x in kwargs.items()}
    )


@pytest.mark.parametrize(
    ("node", "written", "changed"),
    [
        (called(aten.add.Tensor, "x", "y"), [], None),
        (called(aten.add_.Tensor, "x", "y"), ["x"], "x"),
        (called(aten.add.out, "x", "y", out="z"), ["z"], "z"),
        (called(aten.__iand__.Tensor, "x", "y"), ["x"], "x"),
        (called(aten._foreach_add_.List, ["x", "y"], ["z", "w"]), ["x", "y"], None),
        (  # the statistics are written, and are not what it returns
            called(
                aten._native_batch_norm_legit.default,
                *("x", "w", "b", "mean", "var", True, 0.1, 1e-5),
            ),
            ["mean", "var"],
            None,
        ),
    ],
    ids=lambda x: str(x.target) if isinstance(x, fx.Node) else "",
)
def test_what_a_call_writes(node: fx.Node, written: list[str], changed: str | None) -> None:
    assert [x.name for x in written_arguments(node)] == written
    value = changed_value(node)
    assert (None if value is None else value.name) == changed
