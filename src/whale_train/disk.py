"""Recognise errors of full disks, and describe them."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whale_train.errors import LaunchError
from whale_train.quantities import in_bytes

# The errors of a full disk, a used-up quota, and a file that may not grow.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A folder with fewer free bytes may have no room for the record of a run's failure.
_LITTLE_BYTES = 2**16


def is_full(error: OSError) -> bool:
    """Return whether an error says that there was no room left for a write."""
    return error.errno in _FULL


@contextmanager
def writing(path: Path, wanted_bytes: int) -> Iterator[None]:
    """Run the code of the context, which writes `wanted_bytes` to the file `path`.

    Raises an OSError with the same errno where there is no room. The text of the error has the
    path, the bytes wanted and the bytes free.
    """
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
    """Run the code of the context, which is a run. Raises LaunchError where the disk is full."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        name = f" ({error.filename})" if error.filename else ""
        remedy = "make room, or use another hydra.run.dir"
        raise LaunchError(f"{error.strerror}{name}; {remedy}") from error


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of `path`. Neither the file nor its folders need
    exist."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    stats = os.statvfs(existing)
    return stats.f_bavail * stats.f_frsize


def has_no_room(folder: Path) -> str:
    """Return a message where `folder` has no room for the record of a failure, else ''."""
    free = free_bytes(folder)
    return f"there is no room in {folder} ({in_bytes(free)} free)" if free < _LITTLE_BYTES else ""
