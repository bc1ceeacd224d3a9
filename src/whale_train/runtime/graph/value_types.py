"""Compute the shapes and dtypes of an exported graph's values before the graph is run.

Shapes depend on the batch size, and dtypes on the precision: an export is made in fp32, and
autocast, whose rules depend on the kind of device, changes the dtypes of operations' results.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from whale_train.models.export.export import EXPORT_BATCH, size_of
from whale_train.runtime.base.autocast import NARROW, in_precision
from whale_train.runtime.base.value_type import ValueType
from whale_train.runtime.graph.nested_graphs import attribute, is_graph, is_tensor, runner
from whale_train.runtime.graph.shard_ops import local_call

# Dtypes by graph, cached as long as the graph lives: a rehearsal needs them for every rank.
_Asked = tuple[frozenset[str], str, torch.device]
_FOUND = WeakKeyDictionary[fx.GraphModule, dict[_Asked, dict[str, torch.dtype]]]()


class ValueTypes:
    """The types of the values `names` of `graph`, when it runs in `precision` on the kind of
    `device`."""

    def __init__(
        self, graph: fx.GraphModule, names: Collection[str], precision: str, device: torch.device
    ) -> None:
        wanted = [node for node in graph.graph.nodes if node.name in names]
        self._values: Mapping[str, Tensor] = {node.name: node.meta["val"] for node in wanted}
        self._dtypes = {name: value.dtype for name, value in self._values.items()}
        if precision in NARROW:
            known = _FOUND.setdefault(graph, {})
            key = (frozenset(names), precision, device)
            if key not in known:
                known[key] = _dtypes_under_autocast(graph, wanted, precision, device)
            self._dtypes = known[key]

    def of(self, name: str, samples: int) -> ValueType:
        """Return the type of the unsharded value `name` for a batch of `samples`."""
        sizes = [size_of(extent) for extent in self._values[name].shape]
        assert all(size is not None for size in sizes), name  # the export refuses other extents
        shape = tuple(size.at(samples) for size in sizes if size is not None)
        return ValueType(shape, self._dtypes[name])

    def is_floating_point(self, name: str) -> bool:
        """Return True where the value `name` has a floating-point dtype."""
        return self._dtypes[name].is_floating_point


def _dtypes_under_autocast(
    graph: fx.GraphModule, wanted: list[fx.Node], precision: str, device: torch.device
) -> dict[str, torch.dtype]:
    """Return the dtypes of the values of `wanted` by name, computed on tensors without storage."""
    results: dict[fx.Node, Any] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return results[value]
        return device if isinstance(value, torch.device) else value

    def example(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        sizes = [size_of(extent) for extent in value.shape]
        shape = [size.at(EXPORT_BATCH) for size in sizes if size is not None]
        return torch.empty(shape, dtype=value.dtype, device=device)

    needed = _ancestors(wanted)
    without_storage: AbstractContextManager[Any] = nullcontext()
    if device.type != "meta":  # tensors on the meta device have no storage
        without_storage = FakeTensorMode(allow_non_fake_inputs=True)
    with without_storage, torch.no_grad(), in_precision(precision, device):
        for node in graph.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder" or (node.op == "get_attr" and is_tensor(graph, node)):
                results[node] = example(node.meta["val"])
            elif any(is_graph(graph, x) for x in node.all_input_nodes):
                args = list(node.args)
                number = next(i for i, x in enumerate(args) if is_graph(graph, x))
                inner = attribute(graph, str(args[number].target))
                run = runner(str(node.target), inner, args[:number], device, True)
                results[node] = run(*(argument(x) for x in args[number + 1 :]))
            elif node.op == "call_function":
                given = list(fx.node.map_aggregate(node.args, argument))
                named = dict(fx.node.map_aggregate(node.kwargs, argument))
                function, given, named = local_call(node, given, named, None, None, lambda _: ())
                results[node] = function(*given, **named)
    return {node.name: results[node].dtype for node in wanted}


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `nodes` and all nodes that they depend on, directly or indirectly."""
    closure, pending = set[fx.Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in closure:
            closure.add(node)
            pending += node.all_input_nodes
    return closure
