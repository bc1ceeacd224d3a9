"""Control whether glibc's malloc returns freed memory to the system or keeps it for later use.

Other C libraries are left alone, and so are thresholds that the user has set.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whale_train.strategies.memory.malloc_headroom import THRESHOLD

# From glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The value that glibc's own thresholds grow to once a block of 32 MiB was freed (mallopt(3)).
_MOST_BYTES = 32 * 2**20
_WHILE_GIVEN_BACK_BYTES = 2**20
# Half of the holes of a step are between blocks smaller than 1 MiB (docs/adr/021).
_ALWAYS_GIVEN_BACK_BYTES = 2**16


def trim_heap() -> None:
    """Make malloc return blocks of 64 KiB and more to the system when they are freed.

    It takes a tenth to a fifth more processor time (docs/adr/021).
    """
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _ALWAYS_GIVEN_BACK_BYTES)
        # This marks the threshold as set by the user, so that `given_back` leaves it alone.
        os.environ[THRESHOLD] = str(_ALWAYS_GIVEN_BACK_BYTES)


@contextmanager
def given_back() -> Iterator[None]:
    """Return blocks of 1 MiB and more to the system when they are freed inside this context.

    By default glibc eventually keeps freed blocks under 32 MiB. The buffers that a model's
    parameters pass through while they are partitioned would stay as holes: half of a partition
    more, for the whole training. After the context blocks are kept again, as every step needs
    blocks of the same sizes: mapping them anew took a quarter more processor time.
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
    """Return glibc's `mallopt`, or None if it does not exist or the user has set a threshold."""
    if THRESHOLD in os.environ:
        return None
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt
