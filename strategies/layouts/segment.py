"""The operations that a rank runs in one go, as the resolver decides them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_train.strategies.layouts.propagation import Assignment


@dataclass(frozen=True)
class Segment:
    """Operations that one TaskGraph runs in one go.

    task_graph: the index of the TaskGraph.
    operations: the names of the operations.
    takes: the values that come from other chunks.
    gives: the values that go to other chunks; the last chunk gives the loss.
    assignment: the layouts over the TaskGraph's shard group; None where every rank simply has its
        own samples.
    sums: the sums over the batch, with their degrees, of which replicas exchange their parts.
    changes: from an operation to the value that it changes in place.
    """

    task_graph: int
    operations: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    assignment: Assignment | None
    sums: Mapping[str, int] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
