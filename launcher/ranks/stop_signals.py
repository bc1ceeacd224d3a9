"""The signals that end a job: Ctrl-C, SIGTERM, and SIGUSR1, which Slurm sends before it takes a
node.

Until a job can save, the first ends it. Then the first asks its ranks to save a checkpoint and to
end, and the next, or the end of the time they have for that, ends it.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """What came of them. KeyboardInterrupt ends a job: it is raised where a signal is handled, and
    again by `poll`, as one that is raised inside a weak reference's callback or a finaliser is
    swallowed there."""

    def __init__(self) -> None:
        self.count = 0
        self._ask: Callable[[], None] | None = None
        self._grace_s = 0.0
        self._deadline: float | None = None

    def asks(self, ask: Callable[[], None], grace_s: float) -> None:
        """From here on call `ask`, which has the ranks save and end, at the first signal, and end
        the job `grace_s` after it."""
        self._ask, self._grace_s = ask, grace_s

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._ask is not None and self.count == 1:
            self._deadline = time.monotonic() + self._grace_s
            self._ask()
            return
        raise KeyboardInterrupt

    def poll(self) -> None:
        """Raise KeyboardInterrupt where the job is to end."""
        if self._deadline is None:
            ends = self.count > 0
        else:
            ends = self.count > 1 or time.monotonic() > self._deadline
        if ends:
            raise KeyboardInterrupt


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Handle SIGNALS inside."""
    signals = StopSignals()
    before = {number: signal.signal(number, signals.handle) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == signals.handle:  # or it is ignored to the end
                signal.signal(number, handler)
