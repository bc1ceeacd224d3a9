"""Run graphs inside an exported graph: regions under autocast or without gradients.

Export makes such a region a graph of its own. The outer graph reads the inner graph as it reads a
tensor (`get_attr`) and passes it to the operation that runs it.
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
    """Return the attribute of `module` at the dotted `path`, the target of a `get_attr` node."""
    value = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def is_tensor(source: fx.GraphModule, node: fx.Node) -> bool:
    """Return True where a `get_attr` node of `source` reads a tensor, False for an inner graph."""
    return isinstance(attribute(source, str(node.target)), Tensor)


def is_graph(source: fx.GraphModule, value: Any) -> bool:
    """Return True where `value` is a node of `source` that reads an inner graph."""
    return isinstance(value, fx.Node) and value.op == "get_attr" and not is_tensor(source, value)


def runner(
    operation: str,
    inner: fx.GraphModule,
    mode: Sequence[Any],
    device: torch.device,
    in_training: bool,
) -> Callable[..., Any]:
    """Return a function that runs `inner` on `device` as `operation` of the exported graph does.

    `mode` are the arguments of `operation` before the inner graph; the function takes the arguments
    after the inner graph. With `in_training` False, operations such as dropout run as in
    evaluation.
    """
    graph = _as_run(inner, device, in_training)
    if operation == _SET_GRAD:
        return partial(_with_grad, graph, mode[0])
    assert operation == _AUTOCAST, operation
    return partial(_with_autocast, graph, (device.type, *mode[1:]))


_SET_GRAD, _AUTOCAST = "wrap_with_set_grad_enabled", "wrap_with_autocast"


def _as_run(inner: fx.GraphModule, device: torch.device, in_training: bool) -> fx.GraphModule:
    """Return a copy of `inner` and of the graphs inside it, moved to `device`.

    The graphs were exported for training, perhaps on another kind of device.
    """

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    copied = copy.deepcopy(inner)
    for graph in (module for module in copied.modules() if isinstance(module, fx.GraphModule)):
        for node in graph.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, moved)
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
            if str(node.target) == _AUTOCAST:
                node.args = (device.type, *node.args[1:])
            elif node.op == "call_function" and not in_training:
                args, node.kwargs = in_evaluation(node.target, node.args, node.kwargs)
                node.args = tuple(args)
        graph.recompile()
    return copied


def _with_grad(inner: fx.GraphModule, enabled: bool, *values: Tensor) -> Any:
    with torch.set_grad_enabled(enabled):
        return inner(*values)


def _with_autocast(inner: fx.GraphModule, mode: tuple[Any, ...], *values: Tensor) -> Any:
    device_type, dtype, enabled, cache_enabled = mode
    with autocast(device_type, dtype, enabled, cache_enabled):
        return inner(*values)
