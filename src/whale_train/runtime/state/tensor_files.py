"""Write and read safetensors files block by block.

Files are written by Python's own functions. The library's function would hold the interpreter lock
while it writes, although steps must go on, and it computes no checksum. Files are read by the
library, which maps a file and reads the requested slices; files in a store are read by ranges of
bytes.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from whale_train.checkpoints.checkpoint_files import FileRecord, stored_tensors
from whale_train.checkpoints.safetensors_files import (
    Block,
    BrokenCheckpoint,
    StoredBlock,
    header,
    whole_shape,
)
from whale_train.checkpoints.url_path import Place, UrlPath
from whale_train.disk import writing
from whale_train.runtime.state.ranged_reads import read_slice

# Safetensors' codes of dtypes.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
_WRITE_BYTES = 2**24  # written at a time
_AT_ONCE = 16  # reads from a store at the same time


class _Counted:
    """A file of `whole_bytes` that is being written, with the checksum of the bytes written so far.

    `close` returns once the bytes are on the disk. On a full disk an OSError names the number of
    bytes needed.
    """

    def __init__(self, path: Path, whole_bytes: int) -> None:
        self._path, self._whole_bytes = path, whole_bytes
        self.crc32 = self.size = 0
        with self._room():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb", buffering=0)

    def _room(self) -> AbstractContextManager[None]:
        return writing(self._path, self._whole_bytes - self.size)

    def write(self, content: "memoryview[Any] | bytes") -> None:
        view = memoryview(content)
        for start in range(0, len(view), _WRITE_BYTES):
            piece = view[start : start + _WRITE_BYTES]
            self.crc32 = zlib.crc32(piece, self.crc32)
            with self._room():
                while len(piece):
                    piece = piece[self._file.write(piece) :]
            self.size += min(_WRITE_BYTES, len(view) - start)

    def close(self) -> None:
        try:
            with self._room():
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_tensors(
    folder: Path,
    path: str,
    shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
) -> FileRecord:
    """Write a safetensors file, and return its record.

    `shapes` maps names to dtype and shape. `tensors` yields the tensors in that order; each is
    freed after it is written. `offsets` maps names to the start of a block in its whole tensor
    (None: all tensors are whole).
    """
    described = {
        name: (CODES[dtype], shape, prod(shape) * dtype.itemsize)
        for name, (dtype, shape) in shapes.items()
    }
    start = header(described, offsets or {})
    file = _Counted(folder / path, len(start) + sum(size for _, _, size in described.values()))
    try:
        file.write(start)
        for tensor in tensors:
            file.write(_bytes_of(tensor))
    finally:
        file.close()
    return FileRecord(path, file.size, file.crc32)


def record_json(folder: Path, path: str, content: Any) -> FileRecord:
    """Write plain data as JSON, and return the record of the file."""
    return record_text(folder, path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def record_text(folder: Path, path: str, text: str) -> FileRecord:
    """Write `text` to a file, and return its record."""
    content = text.encode()
    file = _Counted(folder / path, len(content))
    try:
        file.write(content)
    finally:
        file.close()
    return FileRecord(path, file.size, file.crc32)


def recorded(folder: Path, path: str) -> FileRecord:
    """Return the record of an existing file, after reading it."""
    crc32 = size = 0
    with (folder / path).open("rb") as file:
        while piece := file.read(_WRITE_BYTES):
            crc32, size = zlib.crc32(piece, crc32), size + len(piece)
    return FileRecord(path, size, crc32)


def _bytes_of(tensor: Tensor) -> "memoryview[Any]":
    """Return the bytes of a tensor, copied to the host where needed."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


class TensorReader:
    """Reads the tensors in a folder of safetensors files, whatever blocks they are divided into."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._stored = stored_tensors(folder)
        self._parameters = {name.rpartition(".")[0] for name in self._stored}
        self._open: dict[Path, Any] = {}

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtype and shape of every tensor, by name."""
        stored = self._stored.items()
        return {name: (_DTYPES[x[0].dtype], whole_shape(x)) for name, x in stored}

    def has_moments(self, name: str) -> bool:
        """Return True if any moment is stored of the parameter that the moment `name` belongs
        to."""
        return name.rpartition(".")[0] in self._parameters

    def whole(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors with their names, one by one: the tensors `names`, or all."""
        shapes = self.shapes()
        for name in shapes if names is None else names:
            dtype, shape = shapes[name]
            tensor = torch.empty(shape, dtype=dtype)
            self.read(name, Block((0,) * len(shape), shape), tensor)
            yield name, tensor

    def read_all(self, wanted: Sequence[tuple[str, Block, Tensor]]) -> None:
        """Fill the tensor of each (name, block, tensor) as `read` does; a store is read
        concurrently."""
        if isinstance(self._folder, UrlPath):
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda x: self.read(*x), wanted))
            return
        for name, block, into in wanted:
            self.read(name, block, into)

    def read(self, name: str, wanted: Block, into: Tensor) -> None:
        """Fill `into` with the elements `wanted` of tensor `name`, converted to the dtype of
        `into`.

        Raises BrokenCheckpoint where the files lack some of the elements.
        """
        missing = prod(wanted.shape)
        for stored in self._stored.get(name, ()):
            block = stored.block
            shared = block.overlap(wanted) if len(block.shape) == len(wanted.shape) else None
            if shared is not None:
                piece = self._slice(stored, name, shared.within(block))
                into[shared.within(wanted)].copy_(piece)
                missing -= prod(shared.shape)
        if missing:
            rule = f"has not all of {name}" if name in self._stored else f"has no {name}"
            raise BrokenCheckpoint(f"{self._folder} {rule}")

    def _slice(self, stored: StoredBlock, name: str, index: tuple[slice, ...]) -> Tensor:
        if isinstance(stored.file, UrlPath):
            return read_slice(stored, index, _DTYPES[stored.dtype])
        if stored.file not in self._open:
            self._open[stored.file] = safe_open(stored.file, framework="pt")
        file = self._open[stored.file]
        # The library refuses to slice a scalar.
        tensor: Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        return tensor
