"""Close the trackers of a run that ends early, in the time that is left.

A tracking server would otherwise show such a run as running forever.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whale_train.runtime.record.trackers import Trackers

# An exception of rank 0 is recorded after this time; the host waits 1 s for the record once another
# rank has ended.
_FAILING_S = 0.8
# The host kills ranks 2 s after SIGTERM.
_ENDED_S = 1.5
_FAILURE = "failure.json"  # written by the host before it ends the ranks of a failed run


@contextmanager
def closed_when_failing(trackers: Trackers | None) -> Iterator[None]:
    """Close the trackers as `failed` if the code of the context raises."""
    try:
        yield
    except BaseException:
        if trackers:
            trackers.close("failed", {}, _FAILING_S)
        raise


def close_when_ended(trackers: Trackers, run_dir: Path) -> None:
    """Close the trackers once SIGTERM tells this rank to end, then end as SIGTERM does.

    The rank may wait for others in C++, where no Python handler would run, so the signal itself
    wakes a thread. The status is `failed` if the host has written a failure, else `interrupted`.
    Call it from the main thread. Does nothing without trackers.
    """
    if not trackers:
        return
    woken, waking = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    def wait() -> None:
        while os.read(woken, 1) != bytes([signal.SIGTERM]):
            pass
        failed = (run_dir / _FAILURE).exists()
        trackers.close("failed" if failed else "interrupted", {}, _ENDED_S)
        # Only the main thread can set handlers by `signal.signal`.
        ctypes.CDLL(None).signal(signal.SIGTERM.value, 0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="close trackers", daemon=True).start()
