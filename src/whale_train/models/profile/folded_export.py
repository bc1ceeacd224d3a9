"""Export the graph of a deep model from a few of its blocks, equal to the graph in its profile.

`block_folding` does this for the torch-free graph, and this file for the executable graph. It
serves rehearsals, which train nothing. A rank that trains exports the whole model.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import fx, nn

from whale_train.models.export.export import EXPORT_BATCH, example_batch, export, fetched, on_meta
from whale_train.models.export.to_operation_graph import operation_graph
from whale_train.models.loss_module import MODEL_PREFIX
from whale_train.models.options import ModelOptions
from whale_train.models.profile.block_folding import (
    CannotUnfold,
    Fold,
    folded,
    folds_of,
    numbered,
    original,
    references,
    repeated,
)
from whale_train.strategies.graph.operation_graph import InputField, Operation


def export_by_folding(
    options: ModelOptions, fields: tuple[InputField, ...]
) -> tuple[fx.GraphModule | None, str]:
    """Return the exported graph of a model and '', or None and the reason, as `export_model` does.

    Of equal blocks three are exported, where the others can be copied from them.
    """
    module, inputs = on_meta(options, fields)
    batch = example_batch(inputs, EXPORT_BATCH)
    folds = folds_of(module.model)
    if folds:
        with folded(module.model, folds):
            graph, _ = export(module, batch)
        module, _ = on_meta(options, fields)  # a forward may have changed its modules
        if graph is not None:
            with suppress(CannotUnfold):
                return _unfolded(graph, module, folds), ""
    return export(module, batch)


def _unfolded(graph: fx.GraphModule, model: nn.Module, folds: Sequence[Fold]) -> fx.GraphModule:
    """Return the graph of the whole `model`, from the `graph` of the folded model.

    Raises CannotUnfold where the exported blocks do not represent all blocks.
    """
    sources = {node.name: node for node in graph.graph.nodes}
    operations = repeated(operation_graph(graph, {}, {}, {}), folds)
    made = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    attributes: dict[str, Any] = {}
    for operation in operations:
        source = sources[original(operation)]
        args, kwargs = _reading(source, [nodes[name] for name in references(operation)])
        target = source.target
        if source.op == "get_attr":
            target = _target(source, operation)
            attributes[target] = _attribute(graph, model, str(source.target), target)
        node = made.create_node(source.op, target, args, kwargs)
        node.meta = _meta(source, operation)
        nodes[operation.name] = node
    module = fx.GraphModule(attributes, made)
    for node, operation in zip(nodes.values(), numbered(operations), strict=True):
        node.name = operation.name
    module.recompile()
    return module


def _reading(source: fx.Node, nodes: Sequence[fx.Node]) -> tuple[Any, Any]:
    """Return the (args, kwargs) of `source`, with the nodes that it reads replaced by `nodes` in
    order."""
    left = iter(nodes)

    def following(_: fx.Node) -> fx.Node:
        return next(left)

    return fx.node.map_arg(source.args, following), fx.node.map_arg(source.kwargs, following)


def _target(source: fx.Node, operation: Operation) -> str:
    """Return the path of the attribute that `operation`, a copy of the node `source`, fetches."""
    is_of_model = str(source.target).startswith(MODEL_PREFIX)
    return f"{MODEL_PREFIX}{operation.path}" if is_of_model else operation.path


def _attribute(graph: fx.GraphModule, model: nn.Module, source: str, target: str) -> Any:
    """Return the attribute at `target` of `model`, or of `graph` where the export made it.

    `source` is the path in the folded graph. Raises CannotUnfold for an attribute that the export
    made and whose path differs between the two.
    """
    try:
        return fetched(model, target)
    except AttributeError:  # the export made it, such as a constant
        if target != source:
            raise CannotUnfold(f"{target} is not the model's") from None
        return fetched(graph, source)


def _meta(source: fx.Node, operation: Operation) -> dict[str, Any]:
    """Return the `meta` of the node of `operation`, which is a copy of the node `source`."""
    meta = dict(source.meta)
    stack = meta.get("nn_module_stack")
    if stack and operation.module:
        *outer, (last, (_, kind)) = stack.items()
        meta["nn_module_stack"] = {**dict(outer), last: (MODEL_PREFIX + operation.module, kind)}
    return meta
