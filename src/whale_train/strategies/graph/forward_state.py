"""Buffers that a forward changes, and the operations that must see each change in one order.

Such a buffer is a counter that is read and then moved, or statistics that later layers read. An
operation that reads it has to run before or after its writes as the model has it, and each write
once. A cut of the graph must leave all of them together. This file finds them; the caller that cuts
the graph decides where they go.
"""

from collections.abc import Collection, Iterable, Sequence

from whale_train.strategies.graph.operation_graph import OperationGraph


def updates_beside(graph: OperationGraph, inside: Collection[str]) -> set[str]:
    """Return the operations that write into a buffer which an operation of `inside` reads or
    writes."""
    touched = [names for names in graph.changed_buffers.values() if names.intersection(inside)]
    return {name for name in graph.updates if any(name in names for names in touched)}


def torn_buffer(graph: OperationGraph, segments: Sequence[Iterable[str]]) -> str:
    """Return the path of a buffer that the forward writes, and that operations of several
    `segments` read or write; '' where there is none."""
    parts = [frozenset(segment) for segment in segments]
    for path, names in graph.changed_buffers.items():
        if sum(not names.isdisjoint(part) for part in parts) > 1:
            return path
    return ""
