"""Disks that are full: which errors say so, and what is said of them."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whale_train.errors import LaunchError
from whale_train.quantities import in_bytes

# No room, no quota left, and no larger file allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Less than what a run says of its failure, at most.
_LITTLE_BYTES = 2**16


def is_full(error: OSError) -> bool:
    """Return whether an error says that there was no room for what was written."""
    return error.errno in _FULL


@contextmanager
def writing(path: Path, wanted_bytes: int) -> Iterator[None]:
    """Around what writes `wanted_bytes` to a file: where there is no room for them, raises an
    OSError of the same number whose text has the path, the bytes wanted and the bytes free."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        said = f"{path}: {in_bytes(wanted_bytes)} wanted, {in_bytes(free_bytes(path))} free"
        number = error.errno or errno.ENOSPC
        raise OSError(number, f"{os.strerror(number)} ({said})") from None


@contextmanager
def failing_when_full() -> Iterator[None]:
    """Around a run: raises LaunchError where there is no room for what it writes."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        name = f" ({error.filename})" if error.filename else ""
        remedy = "make room, or use another hydra.run.dir"
        raise LaunchError(f"{error.strerror}{name}; {remedy}") from error


def free_bytes(path: Path) -> int:
    """Return the bytes that are free for a file, in the first folder above it that there is."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


def has_no_room(folder: Path) -> str:
    """Return what is said of a folder without room for a word of a failure, '' of any other."""
    free = free_bytes(folder)
    return f"there is no room in {folder} ({in_bytes(free)} free)" if free < _LITTLE_BYTES else ""
