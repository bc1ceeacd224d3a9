"""Convert an exported graph to the torch-free OperationGraph, on which all planning works."""

from collections.abc import Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from torch import Tensor, fx, nn

from whale_train.models.export.export import EXPORT_BATCH, fetched, model_path, module_path, size_of
from whale_train.models.export.op_schemas import changed_value, draws, written_arguments
from whale_train.strategies.graph.operation_graph import (
    OWN,
    Argument,
    Operation,
    OperationGraph,
    Ref,
    Shape,
)


def _per_sample(saved: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Return saved bytes of the export batch as those of a sample, by place."""
    return tuple((place, num_bytes / EXPORT_BATCH) for place, num_bytes in saved.items())


def operation_graph(
    module: fx.GraphModule,
    flops: Mapping[str, float],
    saved: Mapping[str, Mapping[int, float]],
    memory: Mapping[str, int],
    saved_on_cpu: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
) -> OperationGraph:
    """Return the torch-free form of `module.graph`.

    flops: FLOPs by operation name, for the export batch.
    saved: bytes that autograd saves, by operation name and then by place (`Operation.saved`), for
        the export batch.
    memory: `Operation.memory` by operation name.
    saved_on_cpu: `saved` on a CPU, of the operations that save something else there.

    Operations that these do not name have no FLOPs, save nothing and have memory of their own.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    writers, writes = _earlier_writers(module.graph), _buffers_written(module.graph)
    return OperationGraph(
        tuple(
            Operation(
                name=node.name,
                target=_target(node, parameters),
                args=tuple(_argument(x) for x in node.args),
                kwargs=tuple((key, _argument(x)) for key, x in node.kwargs.items()),
                shape=_shape(node, module),
                dtype=_dtype(node, module),
                module=module_path(node),
                path=model_path(str(node.target)) if node.op == "get_attr" else "",
                flops=flops.get(node.name, 0.0) / EXPORT_BATCH,
                saved=_per_sample(saved.get(node.name, {})),
                saved_on_cpu=_per_sample(saved_on_cpu.get(node.name, {})),
                memory=memory.get(node.name, OWN),
                after=writers.get(node.name, ()),
                random=_draws(node),
                writes=writes.get(node.name, ()),
                changes=_changed_name(node),
            )
            for node in module.graph.nodes
        )
    )


def _target(node: fx.Node, parameters: dict[str, nn.Parameter]) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        if isinstance(node.meta.get("val"), nn.Module) or _is_graph(node):
            return "graph"
        if node.target not in parameters:
            return "buffer"
        return "parameter" if parameters[str(node.target)].requires_grad else "frozen"
    if node.op == "output":
        return "output"
    if isinstance(node.target, FunctionType):  # printed, its address would be in the name
        return f"<function {node.target.__name__}>"
    return str(node.target)


def _argument(value: Any) -> Argument:
    if isinstance(value, fx.Node):
        return Ref(value.name)
    if isinstance(value, list | tuple):
        return tuple(_argument(x) for x in value)
    if isinstance(value, dict):
        return tuple(_argument(x) for x in value.values())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _value(node: fx.Node, module: fx.GraphModule) -> Any:
    if node.op != "get_attr":
        return node.meta.get("val")
    return fetched(module, str(node.target))


def _shape(node: fx.Node, module: fx.GraphModule) -> Shape | None:
    value = _value(node, module)
    if not isinstance(value, Tensor):
        return None
    sizes = [size_of(extent) for extent in value.shape]
    assert None not in sizes, f"{node.name}: export() leaves no graph with such extents"
    return tuple(size for size in sizes if size is not None)


def _dtype(node: fx.Node, module: fx.GraphModule) -> str:
    value = _value(node, module)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""


def _is_graph(node: fx.Node) -> bool:
    """Return whether a `get_attr` node fetches a graph: a region without autocast or gradients."""
    return _inner(node) is not None


def _inner(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a `get_attr` node fetches, or None for any other node."""
    if node.op != "get_attr":
        return None
    assert node.graph.owning_module is not None
    value = fetched(node.graph.owning_module, str(node.target))
    return value if isinstance(value, fx.GraphModule) else None


def _draws(node: fx.Node) -> bool:
    """Return whether a call draws random numbers itself or runs a graph that does."""
    if node.op != "call_function":
        return False
    inner = [graph for graph in map(_inner, node.all_input_nodes) if graph is not None]
    if any(_draws(inner_node) for graph in inner for inner_node in graph.graph.nodes):
        return True
    return draws(node.target, node.args, node.kwargs)


def _earlier_writers(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each node, the earlier nodes that wrote to memory that it reads, by name.

    A node's inputs are left out. An example is `x[1:] = y`, a copy into a view of x: a later node
    that reads x must come after it. Nodes without such writers are left out.
    """
    memory = _memory(graph)
    writers: dict[fx.Node, list[fx.Node]] = {}
    earlier_writers: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        read = {root for value in node.all_input_nodes for root in memory[value]}
        all_writers = [w for root in read for w in writers.get(root, ())]
        names = [w.name for w in dict.fromkeys(all_writers) if w not in node.all_input_nodes]
        if names:
            earlier_writers[node.name] = tuple(names)
        for value in _given_to_write(node):
            for root in memory[value]:
                writers.setdefault(root, []).append(node)
    return earlier_writers


def _changed_name(node: fx.Node) -> str:
    """Return the name of the value that a node changes in place and returns, or ''."""
    changed = changed_value(node)
    return "" if changed is None else changed.name


def _memory(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return for each node the set of nodes whose memory its value may share, including itself."""
    memory: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        shared = {node}
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            for argument, value in zip(schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and isinstance(value, fx.Node):
                    shared |= memory[value]
        elif node.op == "call_function":  # getitem on a list whose items may be views
            shared |= {root for value in node.all_input_nodes for root in memory[value]}
        memory[node] = shared
    return memory


def _given_to_write(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call writes to: in place, as `out`, or in a graph that it
    runs."""
    if node.op != "call_function":
        return []
    written_values = list(written_arguments(node))
    for number, argument in enumerate(node.args):
        inner = _inner(argument) if isinstance(argument, fx.Node) else None
        if inner is None:
            continue
        memory = _memory(inner.graph)
        written_roots = {
            root
            for inner_node in inner.graph.nodes
            for x in _given_to_write(inner_node)
            for root in memory[x]
        }
        inputs = [inner_node for inner_node in inner.graph.nodes if inner_node.op == "placeholder"]
        for inner_node, given in zip(inputs, node.args[number + 1 :], strict=False):
            if inner_node in written_roots and isinstance(given, fx.Node):
                written_values.append(given)
    return written_values


def _buffers_written(graph: fx.Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each node, the names of the attributes that it writes to. Other nodes are left
    out."""
    memory, written_names = _memory(graph), {}
    for node in graph.nodes:
        roots = {root for value in _given_to_write(node) for root in memory[value]}
        held = [root.name for root in graph.nodes if root in roots and root.op == "get_attr"]
        if held:
            written_names[node.name] = tuple(held)
    return written_names
