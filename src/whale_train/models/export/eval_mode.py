"""Compare a model in evaluation mode with its training graph as evaluations run it.

A split or staged model has one graph, exported in training mode. Evaluations run that graph with
the arguments that modules of torch.nn pass in evaluation mode (`models/export/op_schemas.py`). That
cannot serve a forward that reads `self.training` itself, or that always applies dropout. This file
detects such a forward: it exports the model in both modes and compares the operations.
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

_Call = tuple[Any, ...]  # an operation and its arguments; values are numbered by their calls
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def changed_in_evaluation(options: ModelOptions, fields: tuple[InputField, ...]) -> str:
    """Return the difference between evaluation mode and the evaluations of a split or staged model,
    or ''.

    The text names the first module with other operations, or says why the model cannot be exported
    in one of the modes.
    """
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
    """Return the path of the module to which the first difference between two lists of calls
    belongs.

    Both lists begin at the difference. Of the modules of the two first calls, it is the one whose
    operations differ between the lists.
    """
    differing = [
        module_path(calls[0][1])
        for calls in (trained, evaluated)
        if calls and _targets(trained, calls[0][1]) != _targets(evaluated, calls[0][1])
    ]
    return differing[0] if differing else module_path((trained or evaluated)[0][1])


def _targets(calls: list[tuple[_Call, fx.Node]], node: fx.Node) -> list[str]:
    """Return the names of the operations in the module of `node`, in order."""
    path = module_path(node)
    return [call[0] for call, caller in calls if module_path(caller) == path]


def _computed(graph: fx.GraphModule, training: bool) -> list[tuple[_Call, fx.Node]]:
    """Return the calls that `graph` makes in an evaluation, in order, each with its node.

    `training` says in which mode `graph` was exported. Dropouts that are off are left out.
    """
    read = _read(graph)
    values: dict[fx.Node, Any] = {}
    calls: list[tuple[_Call, fx.Node]] = []

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
        values[node] = ("value", len(calls))
        given = by_name(node.target, args, kwargs) or {"": args}
        call = (str(node.target), *((name, described(x)) for name, x in given.items()))
        calls.append((call, node))
    return calls


def _held(value: Any, path: str, training: bool) -> Any:
    """Return a description of an attribute: the calls of a graph, or the path of a tensor."""
    if isinstance(value, fx.GraphModule):
        return tuple(call for call, _ in _computed(value, training))
    return ("tensor", path)


def _is_dropout(node: fx.Node) -> bool:
    """Return whether a node is one of torch's dropouts."""
    namespace, _, name = str(node.target).partition(".")
    return namespace == "aten" and name.partition(".")[0].rstrip("_") in _DROPOUTS


def _read(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that the output depends on.

    A write in place counts, because another alias may read the memory. An update of a buffer that
    no node reads does not count.
    """
    needed: set[fx.Node] = set()
    for node in reversed(graph.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        changes = schema is not None and schema.is_mutable
        updates = changes and not node.users and node.args[0].op == "get_attr"
        if node.op == "output" or node in needed or (changes and not updates):
            needed.add(node)
            needed.update(node.all_input_nodes)
    return needed
