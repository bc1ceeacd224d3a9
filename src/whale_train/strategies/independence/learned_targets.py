"""Losses that are means over targets which parameters have a part in.

The targets of a step are counted before its first forward, from the data alone. Of these losses
nobody can.
"""

from whale_train.strategies.graph.operation_graph import ModelProfile, Operation, OperationGraph

_MEAN = 1  # of torch's reductions
_LOSSES = (
    "aten.cross_entropy_loss.default",
    *(f"aten.{name}.default" for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")),
)


def learned_means(profile: ModelProfile) -> tuple[str, ...]:
    """Return the operations of the model's graph that are means over classes whose targets are
    computed from trained parameters, in the graph's order. A mean over probabilities is one over
    rows, which are known, and is none of them."""
    graph = profile.graph
    assert graph is not None
    trained = {parameter.path for parameter in profile.parameters}
    means = (operation for operation in graph if _is_mean_over_classes(graph, operation))
    return tuple(
        operation.name
        for operation in means
        if any(graph[x].path in trained for x in graph.ancestors(set(operation.inputs[1:])))
    )


def _is_mean_over_classes(graph: OperationGraph, operation: Operation) -> bool:
    """Return True if `operation` is a loss that is a mean over the classes of its targets: not one
    of probabilities, whose mean is over rows, and not a sum or the losses themselves."""
    if operation.target not in _LOSSES or "float" in graph[operation.inputs[1]].dtype:
        return False
    reduction = operation.args[3] if len(operation.args) > 3 else _MEAN
    return reduction == _MEAN
