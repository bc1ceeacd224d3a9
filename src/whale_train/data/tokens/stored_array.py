"""Arrays of int64 in a file, whose rows are read with `pread` and not mapped.

Mapped pages count as memory of the rank that touched them, which would seem to grow with the
corpus.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
_CHUNK = 1 << 20  # rows that are read at once


class Int64Rows(Protocol):
    """An int64 array `[n, ...]`: a numpy array, or one in a file."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, rows: int, /) -> np.int64: ...
    @overload
    def __getitem__(self, rows: slice, /) -> Int64s: ...


class StoredArray:
    """Reader of an int64 array in a file. It works in processes forked after it was opened.

    shape: shape of the array, `[n]` or `[n, width]`.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], offset: int = 0) -> None:
        """Open the array that begins at byte `offset` of the file."""
        self.shape = shape
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = offset
        self._width = int(np.prod(shape[1:], dtype=np.int64))

    @classmethod
    def of_npy(cls, path: Path) -> "StoredArray":
        """Open an array that `np.save` wrote. Raises OSError, and ValueError where the file does
        not hold an int64 array."""
        mapped = np.load(path, mmap_mode="r")
        if mapped.dtype != np.int64:
            raise ValueError(f"{path} holds {mapped.dtype}, not int64")
        return cls(path, mapped.shape, mapped.offset)

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def __getitem__(self, rows: int) -> np.int64: ...
    @overload
    def __getitem__(self, rows: slice) -> Int64s: ...
    def __getitem__(self, rows: int | slice) -> np.int64 | Int64s:
        """Return a number of an array `[n]`, or consecutive rows `[m, ...]`."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            read = self._read(start, max(stop - start, 0))
            return read.reshape(-1, *self.shape[1:])
        row = rows + len(self) if rows < 0 else rows
        if not 0 <= row < len(self):
            raise IndexError(f"row {rows} of an array with {len(self)}")
        number: np.int64 = self._read(row, 1)[0]
        return number

    def _read(self, start: int, count: int) -> Int64s:
        size = 8 * self._width
        return np.frombuffer(read_at(self._file, self._offset + start * size, count * size), "<i8")

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


def read_at(file: int, start: int, count: int) -> bytes:
    """Return `count` bytes of an open file from byte `start` on. Raises OSError where the file ends
    before."""
    pieces = []
    while count:
        piece = os.pread(file, count, start)
        if not piece:
            raise OSError(f"a store of tokens is shorter than it says (at byte {start})")
        pieces.append(piece)
        start, count = start + len(piece), count - len(piece)
    return b"".join(pieces)


def differences(ends: Int64Rows) -> Iterator[Int64s]:
    """Yield the differences between neighbours of `ends`, the first one to 0, in chunks."""
    before = 0
    for start in range(0, len(ends), _CHUNK):
        chunk = ends[start : start + _CHUNK]
        yield np.diff(chunk, prepend=before)
        before = int(chunk[-1])
