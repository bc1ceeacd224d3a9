"""The events of one rank's timeline.

The format is the format of `strategies/simulate/chrome_trace.py`. On a GPU a span lasts as long as
the host takes to enqueue the work, unless the work itself waits.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from whale_train.strategies.schedule.instructions import Instruction
from whale_train.strategies.simulate.chrome_trace import event, named


class Trace:
    """Timeline events of one rank.

    rank: the rank.
    device: the rank's name in the timeline.
    events: the events so far, the first of which names the rank.
    """

    def __init__(self, rank: int, device: str) -> None:
        self.rank = rank
        self.events: list[dict[str, Any]] = [named(rank, device)]

    @contextmanager
    def span(self, label: Instruction | str) -> Iterator[None]:
        """Record an event `label` that lasts as long as the body of the context."""
        started = time.time_ns()
        try:
            yield
        finally:
            duration_ns = time.time_ns() - started
            self.events.append(event(self.rank, label, started / 1e3, duration_ns / 1e3))


def span(trace: Trace | None, label: Instruction | str) -> AbstractContextManager[None]:
    """Return a context that records `label` in `trace`, or a null context where `trace` is None."""
    return nullcontext() if trace is None else trace.span(label)
