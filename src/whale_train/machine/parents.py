"""End processes with the process that started them, however that one ends."""

import ctypes
import os
import signal
import sys
import threading
import time

STOPPED = 130  # the exit status of a process that was told to stop
STARTER = "WHALE_TRAIN_STARTER"  # variable that names the program which started a rank
# A constant of Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process the signal `number` when its parent ends (Linux only).

    Exits at once where `parent` has ended before. The setting survives an `exec`, and is cleared in
    a forked child (prctl(2)). `watch_parent` works on other systems too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(STOPPED)


def watch_parent(parent: int) -> None:
    """Start a thread that checks every second that `parent` still runs, and exits this process when
    it does not.

    The thread works while the main thread computes or waits outside of Python.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(STOPPED)

    threading.Thread(target=look, name="watch of the parent", daemon=True).start()
