"""Processes that end with the one that started them, however that ends."""

import ctypes
import os
import signal
import sys
import threading
import time

STOPPED = 130  # the exit status of what was told to stop
STARTER = "WHALE_TRAIN_STARTER"  # set to our own name by what of ours starts ranks elsewhere
# From Linux's <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process `number` when its parent ends; exits if it has.

    The kernel keeps this over an `exec`, and forgets it in a process that is forked. Off Linux it
    cannot; `watch_parent` can.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(STOPPED)


def watch_parent(parent: int) -> None:
    """Look for the parent every second, beside whatever this process does or waits for outside of
    Python, and exit when it is gone."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(STOPPED)

    threading.Thread(target=look, name="watch of the parent", daemon=True).start()
