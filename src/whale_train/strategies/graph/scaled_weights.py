"""Choose the weights whose products round their factors to 8 bits (`train.precision=fp8`)."""

from collections.abc import Iterator

from whale_train.strategies.graph.operation_graph import (
    LOWERED,
    ModelProfile,
    OperationGraph,
    kind_of,
)

# Products with a smaller dimension gain nothing: rounding costs more than the product.
_LEAST = 64
_MULTIPLE = 16  # of both dimensions, as the kernels of GPUs need
_ROUTERS = {"router", "gate"}  # names of modules, where a model has no graph


def scaled_weights(profile: ModelProfile) -> tuple[str, ...]:
    """Return the paths of the weights of linear layers in the model's repeated blocks, of those
    whose two dimensions are multiples of 16 and at least 64.

    Output heads, routers and layers outside of blocks stay in 16 bits, as do weights of experts,
    which are no linear layers. A head's product feeds the loss, whose softmax enlarges its errors;
    a router's decides which experts a token has.
    """
    routers = _routers(profile)
    return tuple(
        path
        for path in profile.linear_weights
        if _is_in_block(path)
        and path not in routers
        and all(
            extent % _MULTIPLE == 0 and extent >= _LEAST
            for extent in profile.weight_by_path[path].shape
        )
    )


def _is_in_block(weight: str) -> bool:
    """Return True if a weight is of a module inside an entry of a list of blocks. A layer that is
    itself an entry, as of a Sequential, is no block."""
    module = weight.split(".")[:-1]
    return any(part.isdecimal() for part in module[:-1])


def _routers(profile: ModelProfile) -> set[str]:
    """Return the paths of the weights whose product decides by a top-k, before any other product
    reads it; without a graph, of the modules that are named as routers."""
    if profile.graph is None:
        return {x for x in profile.linear_weights if not _ROUTERS.isdisjoint(x.split("."))}
    graph = profile.graph
    chosen = (x.name for x in graph if kind_of(x) == "topk")
    read = (graph[name] for top in chosen for name in _before(graph, top))
    weights = {x.path for x in read if x.target in ("parameter", "frozen")}
    return {profile.weight_by_path[path].path for path in weights if path in profile.weight_by_path}


def _before(graph: OperationGraph, name: str) -> Iterator[str]:
    """Yield the values that `name` is computed from, as far as the products that they go back to,
    and the operands of those."""
    waiting, seen = list(graph[name].inputs), set[str]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        if kind_of(graph[value]) in LOWERED:
            yield from graph[value].inputs
        else:
            waiting += graph[value].inputs
