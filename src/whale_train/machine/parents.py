"""Have processes end with the process that started them, however that one ends."""

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
    """Have the kernel send this process the signal `number` when its parent ends.

    Exits at once where `parent` is not the parent any more. The kernel keeps the setting over an
    `exec`, and forgets it in a process that is forked. It is available on Linux alone;
    `watch_parent` works elsewhere too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(STOPPED)


def watch_parent(parent: int) -> None:
    """Start a thread that checks for the parent every second, and exits this process when the
    parent is gone.

    It does so beside whatever the process does or waits for outside of Python.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(STOPPED)

    threading.Thread(target=look, name="watch of the parent", daemon=True).start()
