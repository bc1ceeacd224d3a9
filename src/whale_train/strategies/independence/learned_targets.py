"""Losses that are means over targets which are computed from parameters.

The targets of a step are counted before its first forward, from the data alone, which is impossible
for these losses.
"""

from whale_train.strategies.graph.operation_graph import ModelProfile, Operation, OperationGraph

_MEAN = 1  # of torch's reductions
_LOSSES = (
    "aten.cross_entropy_loss.default",
    *(f"aten.{name}.default" for name in ("nll_loss", "nll_loss_nd", "nll_loss2d")),
)


def learned_means(profile: ModelProfile) -> tuple[str, ...]:
    """Return the names of the operations that are means over classes with targets computed from
    trained parameters, in graph order. A mean over probability targets does not count: it is a mean
    over rows, whose number is known."""
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
    """Return True if `operation` is a loss that averages over its class targets. Losses of
    probabilities, which average over rows, and losses with another reduction do not count."""
    if operation.target not in _LOSSES or "float" in graph[operation.inputs[1]].dtype:
        return False
    reduction = operation.args[3] if len(operation.args) > 3 else _MEAN
    return reduction == _MEAN
