"""Whether a model computes in evaluation mode what its training graph does in evaluations.

A split or staged model has one graph, that of its training; evaluations run it with the arguments
that modules of torch.nn give in evaluation mode (`models/export/op_schemas.py`). A forward that
asks for `self.training` itself, or always drops, is not reached by that. Owns finding it, by
exporting the model in both modes and comparing what the graphs compute.
"""

from itertools import takewhile
from typing import Any

from torch import fx

from whale_train.models.export.export import (
    EXPORT_BATCH,
    example_batch,
    export,
    fetched,
    module_path,
    on_meta,
)
from whale_train.models.export.op_schemas import by_name, draws, in_evaluation
from whale_train.models.options import ModelOptions
from whale_train.strategies.graph.operation_graph import InputField

_Call = tuple[Any, ...]  # an operation and what it is given; values by their places
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def changed_in_evaluation(options: ModelOptions, fields: tuple[InputField, ...]) -> str:
    """Return what in evaluation mode is not what evaluations of a split or staged model run: the
    first module with other operations, in words; '' where all are the same."""
    computed = []
    for training in (True, False):
        module, inputs = on_meta(options, fields)
        graph, error = export(module.train(training), example_batch(inputs, EXPORT_BATCH))
        if graph is None:
            return f"the model cannot be exported in evaluation mode ({error})"
        computed.append(_computed(graph, training))
    trained, evaluated = computed
    same = sum(1 for _ in takewhile(_is_same, zip(trained, evaluated, strict=False)))
    if same == len(trained) == len(evaluated):
        return ""
    path = _where(trained[same:], evaluated[same:])
    return f"{path or 'the model'} runs other operations in evaluation mode"


def _is_same(pair: tuple[tuple[_Call, fx.Node], tuple[_Call, fx.Node]]) -> bool:
    return pair[0][0] == pair[1][0]


def _where(trained: list[tuple[_Call, fx.Node]], evaluated: list[tuple[_Call, fx.Node]]) -> str:
    """Return the module that the first of two unlike lists of calls is from: of the two modules
    there, one that has other operations in the one list than in the other."""
    unlike = [
        module_path(calls[0][1])
        for calls in (trained, evaluated)
        if calls and _targets(trained, calls[0][1]) != _targets(evaluated, calls[0][1])
    ]
    return unlike[0] if unlike else module_path((trained or evaluated)[0][1])


def _targets(calls: list[tuple[_Call, fx.Node]], node: fx.Node) -> list[str]:
    """Return the operations of a node's module."""
    path = module_path(node)
    return [call[0] for call, each in calls if module_path(each) == path]


def _computed(graph: fx.GraphModule, training: bool) -> list[tuple[_Call, fx.Node]]:
    """Return what `graph`, exported in training mode or not, computes in an evaluation, in order,
    and the nodes that do. Dropouts, which are off, are left out."""
    read = _read(graph)
    values: dict[fx.Node, Any] = {}
    found: list[tuple[_Call, fx.Node]] = []

    def described(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        if isinstance(argument, list | tuple):
            return tuple(described(x) for x in argument)
        return repr(argument)

    for node in (node for node in graph.graph.nodes if node in read):
        if node.op == "placeholder":
            values[node] = ("input", str(node.target))
            continue
        if node.op == "get_attr":
            values[node] = _held(fetched(graph, str(node.target)), str(node.target), training)
            continue
        args, kwargs = node.args, node.kwargs
        if training:
            args, kwargs = in_evaluation(node.target, args, kwargs)
        if _is_dropout(node) and not draws(node.target, args, kwargs):
            values[node] = described(args[0])
            continue
        values[node] = ("value", len(found))
        given = by_name(node.target, args, kwargs) or {"": args}
        call = (str(node.target), *((name, described(x)) for name, x in given.items()))
        found.append((call, node))
    return found


def _held(value: Any, path: str, training: bool) -> Any:
    """Return a tensor by its path, a graph by what it computes."""
    if isinstance(value, fx.GraphModule):
        return tuple(call for call, _ in _computed(value, training))
    return ("tensor", path)


def _is_dropout(node: fx.Node) -> bool:
    namespace, _, name = str(node.target).partition(".")
    return namespace == "aten" and name.partition(".")[0].rstrip("_") in _DROPOUTS


def _read(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that the result depends on. What changes a tensor in place may be read by
    another name; it counts, but for updates of buffers that nobody reads."""
    found: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        changes = schema is not None and schema.is_mutable
        updates = changes and not node.users and node.args[0].op == "get_attr"
        if node.op == "output" or node in found or (changes and not updates):
            found.add(node)
            found.update(node.all_input_nodes)
    return found
