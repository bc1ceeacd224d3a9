"""What one rank did when, as events of a timeline.

Its form is `strategies/simulate/chrome_trace.py`'s. On a GPU a span is the time its work took to be
asked for, unless what is asked for waits.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from whale_train.strategies.schedule.instructions import Instruction
from whale_train.strategies.simulate.chrome_trace import event, named


class Trace:
    """The `events` of one rank so far. `device` names it in the timeline."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank = rank
        self.events: list[dict[str, Any]] = [named(rank, device)]

    @contextmanager
    def span(self, what: Instruction | str) -> Iterator[None]:
        """Note how long the body takes."""
        started = time.time_ns()
        try:
            yield
        finally:
            took = time.time_ns() - started
            self.events.append(event(self.rank, what, started / 1e3, took / 1e3))


def span(trace: Trace | None, what: Instruction | str) -> AbstractContextManager[None]:
    """Begin a span of `trace`, if there is one."""
    return nullcontext() if trace is None else trace.span(what)
