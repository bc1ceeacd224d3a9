"""What a process frees goes back to the system, or is kept for what it allocates next.

No C library but glibc is touched, nor a threshold that the user has set.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whale_train.strategies.memory.malloc_headroom import THRESHOLD

# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# What glibc's own thresholds grow to once a block of 32 MiB was freed (its mallopt(3)).
_MOST_BYTES = 32 * 2**20
_WHILE_GIVEN_BACK_BYTES = 2**20
# Half of the holes of a step are between smaller blocks than 1 MiB (docs/adr/021).
_ALWAYS_GIVEN_BACK_BYTES = 2**16


def give_back() -> None:
    """Have blocks of 64 KiB and more go back to the system when they are freed, from here on, for a
    tenth to a fifth more processor time (docs/adr/021)."""
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _ALWAYS_GIVEN_BACK_BYTES)
        # As if the user had: `given_back` leaves it alone.
        os.environ[THRESHOLD] = str(_ALWAYS_GIVEN_BACK_BYTES)


@contextmanager
def given_back() -> Iterator[None]:
    """Have blocks of 1 MiB and more go back to the system when they are freed inside.

    glibc comes to keep those under 32 MiB for itself, and what a model's parameters pass through
    while they are partitioned stays as holes: half of a partition more, for all of a training.
    Afterwards it keeps them again, as every step wants the same ones: to have them mapped anew
    took a quarter more processor time.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _WHILE_GIVEN_BACK_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_BYTES)


def _mallopt() -> Callable[[int, int], int] | None:
    """glibc's, where it is and the user has set no threshold."""
    if THRESHOLD in os.environ:
        return None
    found: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    return found
