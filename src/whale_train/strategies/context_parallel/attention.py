"""Choose how the members of a group that divides positions compute an attention together."""

from whale_train.strategies.context_parallel.rules import GATHERED, HEADS
from whale_train.strategies.graph.operation_graph import Operation, OperationGraph, Ref


def attention_by(graph: OperationGraph, operation: Operation, members: int) -> str:
    """Return the way in which `members` divide an attention: by heads where every member gets a
    head of the keys, else by rows of queries over gathered keys."""
    query, key = (graph[x.name].shape for x in operation.args[:2] if isinstance(x, Ref))
    if query is None or key is None or len(query) != 4 or len(key) != 4:
        return GATHERED
    return HEADS if key[1].fixed >= members and not key[1].per_sample else GATHERED
