"""Buffers that a forward changes, and the operations that must see each change in one order.

Such a buffer is a counter that is read and then advanced, or statistics that later layers read. An
operation that reads it must run before or after its writes as in the model, and each write must run
once. A cut of the graph must keep all of these operations together. This file finds them; the
caller that cuts the graph decides where they go.
"""

from collections.abc import Collection, Iterable, Sequence

from whale_train.strategies.graph.operation_graph import OperationGraph


def updates_beside(graph: OperationGraph, inside: Collection[str]) -> set[str]:
    """Return the names of the operations that write into a buffer which an operation of `inside`
    reads or writes."""
    touched = [names for names in graph.changed_buffers.values() if names.intersection(inside)]
    return {name for name in graph.updates if any(name in names for names in touched)}


def torn_buffer(graph: OperationGraph, segments: Sequence[Iterable[str]]) -> str:
    """Return the path of a buffer that the forward writes and that operations of several `segments`
    read or write; '' for none."""
    parts = [frozenset(segment) for segment in segments]
    for path, names in graph.changed_buffers.items():
        if sum(not names.isdisjoint(part) for part in parts) > 1:
            return path
    return ""
