"""Fix the decisions of routers where nothing is computed: every expert gets equally many rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise

from torch import Tensor

from whale_train.runtime.comms import expert_rows
from whale_train.runtime.comms.layout_collectives import ShardGroup


@contextmanager
def evenly() -> Iterator[None]:
    """Distribute rows evenly over experts inside the context.

    Every member sends each member rows in proportion to that member's experts. It receives as many
    rows as if every other member had as many rows as this one.
    """

    def evenly_spread(numbers: Tensor, rows: int, experts: ShardGroup) -> list[list[int]]:
        ends = [rows * first // experts.total for first in accumulate(experts.sizes, initial=0)]
        sent = [stop - start for start, stop in pairwise(ends)]
        return [sent, [sent[experts.rank]] * len(sent)]

    before, expert_rows.on_host = expert_rows.on_host, evenly_spread
    try:
        yield
    finally:
        expert_rows.on_host = before
