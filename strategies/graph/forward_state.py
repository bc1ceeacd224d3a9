"""Buffers that a forward changes, and the operations that must see each change in one order.

A counter that is read and then moved, or statistics that later layers read: what reads such a
buffer has to run before or after its writes as the model has it, and each write once. Cutting a
graph must leave all of them together. Owns finding them; who cuts decides where they go.
"""

from collections.abc import Collection, Iterable, Sequence

from whale_train.strategies.graph.operation_graph import OperationGraph


def updates_beside(graph: OperationGraph, inside: Collection[str]) -> set[str]:
    """Return the writes into buffers that an operation `inside` reads."""
    touched = [names for names in graph.changed_buffers.values() if names.intersection(inside)]
    return {name for name in graph.updates if any(name in names for names in touched)}


def torn_buffer(graph: OperationGraph, segments: Sequence[Iterable[str]]) -> str:
    """Return the path of a buffer that operations of several `segments` read or write, at least one
    of which writes; '' where there is none."""
    parts = [frozenset(segment) for segment in segments]
    for path, names in graph.changed_buffers.items():
        if sum(not names.isdisjoint(part) for part in parts) > 1:
            return path
    return ""
