"""Graphs inside an exported graph: what a forward runs under autocast, or without gradients.

Export makes such a region a graph of its own, which the outer one reads as it reads a tensor
(`get_attr`) and passes to the operation that runs it.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from whale_train.models.export.op_schemas import in_evaluation
from whale_train.runtime.base.autocast import autocast


def attribute(module: Any, path: str) -> Any:
    """Return what a `get_attr` node of `module` reads."""
    value = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def is_tensor(source: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a `get_attr` node reads a tensor, and not an inner graph."""
    return isinstance(attribute(source, str(node.target)), Tensor)


def is_graph(source: fx.GraphModule, value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr" and not is_tensor(source, value)


def runner(
    operation: str,
    inner: fx.GraphModule,
    mode: Sequence[Any],
    device: torch.device,
    in_training: bool,
) -> Callable[..., Any]:
    """`inner`, on `device`, as `operation` of an exported graph runs it with the arguments `mode`;
    it takes the values that follow them."""
    graph = _as_run(inner, device, in_training)
    if operation == _SET_GRAD:
        return partial(_with_grad, graph, mode[0])
    assert operation == _AUTOCAST, operation
    return partial(_with_autocast, graph, (device.type, *mode[1:]))


_SET_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def _as_run(inner: fx.GraphModule, device: torch.device, in_training: bool) -> fx.GraphModule:
    """Return a copy, with the graphs inside it, of one that was exported for training elsewhere."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    found = copy.deepcopy(inner)
    for graph in (each for each in found.modules() if isinstance(each, fx.GraphModule)):
        for node in graph.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, moved)
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
            if str(node.target) == _AUTOCAST:
                node.args = (device.type, *node.args[1:])
            elif node.op == "call_function" and not in_training:
                args, node.kwargs = in_evaluation(node.target, node.args, node.kwargs)
                node.args = tuple(args)
        graph.recompile()
    return found


def _with_grad(inner: fx.GraphModule, enabled: bool, *values: Tensor) -> Any:
    with torch.set_grad_enabled(enabled):
        return inner(*values)


def _with_autocast(inner: fx.GraphModule, mode: tuple[Any, ...], *values: Tensor) -> Any:
    device_type, dtype, enabled, cache_enabled = mode
    with autocast(device_type, dtype, enabled, cache_enabled):
        return inner(*values)
