"""Slow a process, against the others, to the speed of the device that it stands for.

This serves `launcher.device_speed`: every rank is a CPU process, and all are equally fast. Before
it communicates, a rank that stands for a slower device sleeps as long as that device would still be
computing. The others then wait for it as they would for the device.
"""

import time
from collections.abc import Callable
from pathlib import Path
from threading import get_ident

# A rank that started among many others may have waited for seconds, which steps must not make up.
_MOST_OVERSLEPT_S = 0.5
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Pace:
    """Makes a thread's computing take `factor` times its processor time.

    computing: returns the thread's seconds on a processor and its seconds of waiting for one, both
        since any fixed time; None: from the kernel. The seconds of waiting count as slept.
    sleep: sleeps for a number of seconds.
    clock: returns seconds.

    It is the pace of the thread that makes it. Other threads only communicate, and are not slowed.

    Excess sleep, because no processor was free or a sleep lasted too long, is subtracted from the
    next sleeps, up to half a second of it.
    """

    def __init__(
        self,
        factor: float,
        computing: Callable[[], tuple[float, float]] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.factor = factor
        self._computing = computing or _of_this_thread
        self._sleep, self._clock = sleep, clock
        self._owed = 0.0
        self._thread = get_ident()
        self._last = self._computing()

    def settle(self) -> None:
        """Sleep for the time that all computing since the last call still has to take; in another
        thread, return at once."""
        if get_ident() != self._thread:
            return
        on, waited = self._computing()
        self._owed += (on - self._last[0]) * (self.factor - 1) - (waited - self._last[1])
        self._owed = max(self._owed, -_MOST_OVERSLEPT_S)
        self._last = on, waited
        if self._owed > 0:
            started = self._clock()
            self._sleep(self._owed)
            self._owed -= self._clock() - started
            self._last = self._computing()


def _of_this_thread() -> tuple[float, float]:
    """Return the thread's seconds on a processor, and its seconds ready to run without one.

    The latter are 0 if the kernel does not report them (Documentation/scheduler/sched-stats).
    """
    try:
        on, waited, _ = _SCHEDSTAT.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return time.thread_time(), 0.0
    return int(on) / 1e9, int(waited) / 1e9
