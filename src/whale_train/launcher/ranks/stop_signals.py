"""Handle the signals that end a job: Ctrl-C, SIGTERM, and SIGUSR1, which Slurm sends before it
takes a node.

Until a job can save, the first signal ends it. From then on, the first signal asks its ranks to
save a checkpoint and to end. The next signal, or the end of the time they have for that, ends the
job.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """The signals that have arrived, and what they cause.

    KeyboardInterrupt ends a job. It is raised where a signal is handled, and again by `poll`, since
    an exception raised inside a weak reference's callback or a finaliser is swallowed there.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ask: Callable[[], None] | None = None
        self._grace_s = 0.0
        self._deadline: float | None = None

    def asks(self, ask: Callable[[], None], grace_s: float) -> None:
        """Call `ask` at the first signal from here on, and end the job `grace_s` seconds after it.

        `ask` has the ranks save and end.
        """
        self._ask, self._grace_s = ask, grace_s

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Raises KeyboardInterrupt, unless it is the first and the ranks can be
        asked to save."""
        self.count += 1
        if self._ask is not None and self.count == 1:
            self._deadline = time.monotonic() + self._grace_s
            self._ask()
            return
        raise KeyboardInterrupt

    def end(self) -> None:
        """End the job as a first signal does, without one."""
        self.handle(signal.SIGTERM, None)

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
    """Handle SIGNALS within the context, and yield the signals that arrive.

    Python runs handlers in the main thread alone. In any other nothing is handled, and none arrive.
    """
    signals = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.handle) for number in SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == signals.handle:  # another handler stays, such as SIG_IGN
                signal.signal(number, handler)
