"""What a process frees goes back to the system, or is kept for what it allocates next."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"  # the same as a variable of the environment
# What glibc's own thresholds grow to once a block of 32 MiB was freed (its mallopt(3)).
_MOST_BYTES = 32 * 2**20
_WHILE_GIVEN_BACK_BYTES = 2**20


@contextmanager
def given_back() -> Iterator[None]:
    """In here blocks of 1 MiB and more go back to the system when they are freed.

    glibc comes to keep those under 32 MiB for itself, and what a model's parameters pass through
    while they are partitioned stays as holes: half of a partition more, for all of a training.
    Afterwards it keeps them again, as every step wants the same ones: to have them mapped anew
    took a quarter more processor time. No other C library is touched, nor a threshold that the user
    has set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _MMAP_THRESHOLD in os.environ:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _WHILE_GIVEN_BACK_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MOST_BYTES)
