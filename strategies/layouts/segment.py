"""Operations that a rank runs in one go, as the resolver decides them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whale_train.strategies.layouts.propagation import Assignment


@dataclass(frozen=True)
class Segment:
    """Operations that one TaskGraph runs in one go. `takes` come from other chunks, `gives` go to
    other chunks (those of the last give the loss); `assignment` types them over the TaskGraph's
    shard group (None where every rank simply has its own samples). Of `sums` over the batch, with
    their degrees, copies tell each other their parts."""

    task_graph: int
    operations: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    assignment: Assignment | None
    sums: Mapping[str, int] = field(default_factory=dict)
