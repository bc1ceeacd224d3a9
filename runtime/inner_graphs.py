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


def attribute(module: Any, path: str) -> Any:
    """What a `get_attr` node of `module` reads."""
    value = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def is_tensor(source: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a `get_attr` node reads a tensor, and not an inner graph."""
    return isinstance(attribute(source, str(node.target)), Tensor)


def is_graph(source: fx.GraphModule, value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr" and not is_tensor(source, value)


def runner(
    operation: str, inner: fx.GraphModule, mode: Sequence[Any], device: torch.device
) -> Callable[..., Any]:
    """`inner`, on `device`, as `operation` of an exported graph runs it with the arguments `mode`;
    it takes the values that follow them."""
    graph = _on_device(inner, device)
    if operation == "wrap_with_set_grad_enabled":
        return partial(_with_grad, graph, mode[0])
    assert operation == "wrap_with_autocast", operation
    return partial(_with_autocast, graph, (device.type, *mode[1:]))


def _on_device(inner: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a graph that was exported for another device."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    found = copy.deepcopy(inner)
    for node in found.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    found.recompile()
    return found


def _with_grad(inner: fx.GraphModule, enabled: bool, *values: Tensor) -> Any:
    with torch.set_grad_enabled(enabled):
        return inner(*values)


def _with_autocast(inner: fx.GraphModule, mode: tuple[Any, ...], *values: Tensor) -> Any:
    device_type, dtype, enabled, cache_enabled = mode
    with torch.autocast(device_type, dtype, enabled, cache_enabled):
        return inner(*values)
