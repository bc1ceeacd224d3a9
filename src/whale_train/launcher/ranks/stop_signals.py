"""Handle the signals that end a job: Ctrl-C, SIGTERM, and SIGUSR1, which Slurm sends before it
takes a node away.

If a job cannot save yet, the first signal ends it. Once it can save, the first signal asks the
ranks to save a checkpoint and end. A second signal, or the end of the grace period, ends the job.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """The signals that have arrived, and their effect on the job.

    KeyboardInterrupt ends a job. It is raised by the signal handler and again by `poll`, since
    Python discards an exception that is raised inside a finaliser or a weak reference's callback.
    """

    def __init__(self) -> None:
        self.count = 0
        self._ask: Callable[[], None] | None = None
        self._grace_s = 0.0
        self._deadline: float | None = None

    def asks(self, ask: Callable[[], None], grace_s: float) -> None:
        """Let the next first signal ask the ranks to save and end.

        ask: called at the first signal; asks the ranks.
        grace_s: seconds after that signal at which `poll` ends the job.
        """
        self._ask, self._grace_s = ask, grace_s

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Raises KeyboardInterrupt, unless this is the first signal and the ranks
        can be asked to save."""
        self.count += 1
        if self._ask is not None and self.count == 1:
            self._deadline = time.monotonic() + self._grace_s
            self._ask()
            return
        raise KeyboardInterrupt

    def end(self) -> None:
        """End the job as if a signal had arrived."""
        self.handle(signal.SIGTERM, None)

    def poll(self) -> None:
        """Raise KeyboardInterrupt if the job is to end."""
        if self._deadline is None:
            ends = self.count > 0
        else:
            ends = self.count > 1 or time.monotonic() > self._deadline
        if ends:
            raise KeyboardInterrupt


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Handle SIGNALS within the context, and yield the record of arrived signals.

    In any thread but the main one, no signal is handled and the record stays empty, since Python
    runs handlers in the main thread alone.
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
            if signal.getsignal(number) == signals.handle:  # a handler set meanwhile stays
                signal.signal(number, handler)
