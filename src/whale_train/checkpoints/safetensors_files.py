"""Safetensors files as their headers describe them: which blocks of which tensors, and where.

Each file of a checkpoint says in its header where in the whole tensor its blocks begin, as
`torch.distributed.checkpoint`'s safetensors storage does, whose reader reads these files. A header
is checked whole here, so that who reads a tensor later finds what was promised. Neither torch nor
the library is known here.
"""

import json
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

# The longest header that the safetensors library reads, and the longest JSON file read here.
MOST_JSON_BYTES = 100_000_000
_LARGEST = 2**63 - 1  # of what fits in an int64, as all sizes of a tensor must
_OFFSETS = "DCP_SHARDING_INFO"  # torch's key, and below it
_OF_TENSOR = "saved_offsets"
# Bytes of an element, by the codes of safetensors for the dtypes that checkpoints have.
ELEMENT_BYTES = {
    **{"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2},
    **{"I8": 1, "U8": 1, "BOOL": 1},
}

Shape = tuple[int, ...]


class BrokenCheckpoint(Exception):
    """A checkpoint of which something is missing or other than it was written; says what."""


@dataclass(frozen=True)
class Block:
    """A box of a tensor: `shape` elements from `offsets` on, per dimension."""

    offsets: Shape
    shape: Shape

    def overlap(self, other: "Block") -> "Block | None":
        """Return the elements that both have, or None where there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Block(starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))

    def within(self, outer: "Block") -> tuple[slice, ...]:
        """Return the index of this block in a tensor that has the elements of `outer`."""
        starts = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))

    @property
    def stops(self) -> Shape:
        return tuple(a + n for a, n in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class StoredBlock:
    """A block of a tensor, in a file, from byte `start` of it on. `dtype` is the code that
    safetensors has for it."""

    file: Path
    dtype: str
    block: Block
    start: int = 0


def header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], offsets: Mapping[str, Sequence[int]]
) -> bytes:
    """Return what a safetensors file begins with: the length of a JSON text, and that text.

    `tensors` are by name (dtype code, shape, bytes), in the order in which their data follows;
    `offsets` say where they begin in their whole tensors (empty: they are whole).
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if offsets:
        parts = {name: {_OF_TENSOR: list(start)} for name, start in offsets.items()}
        content["__metadata__"] |= {_OFFSETS: json.dumps(parts), "DCP_VERSION": "1.0"}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        data = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        content[name] = data
        end += size
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)  # data is aligned as the format wants it
    return struct.pack("<Q", len(text)) + text


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a checkpoint. Raises BrokenCheckpoint where there is no
    such file, one of more than MOST_JSON_BYTES, or no JSON in it."""
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read as JSON ({error})") from None


def read_text(path: Path) -> str:
    """Return the text of a file of a checkpoint; raises as `read_json`."""
    try:
        size = size_of(path)
        if size > MOST_JSON_BYTES:
            raise BrokenCheckpoint(f"{path} has {size:,} bytes, more than {MOST_JSON_BYTES:,}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BrokenCheckpoint(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BrokenCheckpoint(f"{path} cannot be read ({why})") from None


def size_of(path: Path) -> int:
    """Return the bytes of a file. Raises OSError for what is none: a reader of a pipe would wait
    for ever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "not a file")
    return found.st_size


def is_whole_number(value: object) -> bool:
    """Return whether a value of JSON is a number from 0 on that fits in 64 bits."""
    return type(value) is int and 0 <= value <= _LARGEST


def stored_blocks(path: Path) -> list[tuple[str, StoredBlock]]:
    """Return what a safetensors file has, by name; without an offset, whole tensors.

    Raises BrokenCheckpoint for what is no such file, or has another size than its header says.
    """
    try:
        return list(_blocks_in(path))
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise BrokenCheckpoint(f"{path} cannot be read as safetensors ({why})") from None


def _blocks_in(path: Path) -> list[tuple[str, StoredBlock]]:
    size = size_of(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MOST_JSON_BYTES:
            raise ValueError(f"its header has {length:,} bytes, more than {MOST_JSON_BYTES:,}")
        if length > size - 8:
            raise ValueError(f"its header has {length:,} bytes, and the file {size:,}")
        content = json.loads(file.read(length))
    if not isinstance(content, dict):
        raise ValueError("its header is no mapping")
    metadata = content.pop("__metadata__", None) or {}
    offsets = json.loads(metadata.get(_OFFSETS, "{}")) if isinstance(metadata, dict) else None
    if not isinstance(offsets, dict):
        raise ValueError("its offsets are no mapping")
    found, spans = [], []
    for name, described in content.items():
        shape = _numbers(described["shape"], f"the shape of {name}")
        begin, end = _numbers(described["data_offsets"], f"the place of {name}")
        dtype = described["dtype"]
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            raise ValueError(f"{name} has the unknown dtype {dtype!r:.40}")
        if end - begin != prod(shape) * ELEMENT_BYTES[dtype]:
            raise ValueError(f"{name} has another size than its shape")
        start = (0,) * len(shape)
        if name in offsets:
            start = _numbers(offsets[name][_OF_TENSOR], f"the offsets of {name}")
        if len(start) != len(shape):
            raise ValueError(f"{name} has {len(shape)} dimensions and {len(start)} offsets")
        found.append((name, StoredBlock(path, dtype, Block(start, shape), 8 + length + begin)))
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ValueError("its tensors do not follow one another")
        at = end
    if 8 + length + at != size:
        raise ValueError(f"the file has {size:,} bytes, and its header says {8 + length + at:,}")
    return found


def _numbers(values: object, what: str) -> Shape:
    """Return a list of whole numbers of a header. Raises ValueError for anything else."""
    if not isinstance(values, list) or not all(map(is_whole_number, values)):
        raise ValueError(f"{what} is {values!r:.40}")
    return tuple(values)


def read_number(stored: StoredBlock) -> float:
    """Return the value of a scalar in fp32. Raises BrokenCheckpoint for anything else."""
    if stored.dtype != "F32" or stored.block.shape:
        raise BrokenCheckpoint(f"{stored.file} has no scalar in fp32 where one is wanted")
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        (value,) = struct.unpack("<f", file.read(4))
    return float(value)


def join_blocks(files: Sequence[Path]) -> dict[str, list[StoredBlock]]:
    """Return the blocks of every tensor in safetensors files, by name.

    Raises BrokenCheckpoint where the blocks of a name do not make up one tensor: of several dtypes,
    with a hole, or with elements twice.
    """
    found: dict[str, list[StoredBlock]] = {}
    for path in files:
        for name, block in stored_blocks(path):
            found.setdefault(name, []).append(block)
    for name, blocks in found.items():
        if why := _unlike_a_tensor([x.block for x in blocks], {x.dtype for x in blocks}):
            raise BrokenCheckpoint(f"{os.path.dirname(blocks[0].file)} {why} {name}")
    return found


def _unlike_a_tensor(blocks: Sequence[Block], dtypes: set[str]) -> str:
    """Return what keeps blocks from being one tensor ('' where they are)."""
    if len(dtypes) > 1:
        return "has several dtypes of"
    if len({len(block.shape) for block in blocks}) > 1:
        return "has blocks of several numbers of dimensions of"
    shape = _whole([block.stops for block in blocks])
    if sum(prod(block.shape) for block in blocks) != prod(shape):
        return "has not all of"
    if not shape or 0 in shape:
        return ""
    # Along the dimension that is cut most often, neighbours alone can have elements in common.
    dim = max(range(len(shape)), key=lambda d: len({block.offsets[d] for block in blocks}))
    ordered = sorted(blocks, key=lambda block: block.offsets[dim])
    for number, block in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if other.offsets[dim] >= block.stops[dim]:
                break
            if block.overlap(other) is not None:
                return "has elements twice of"
    return ""


def whole_shape(stored: Sequence[StoredBlock]) -> Shape:
    """Return the shape of the tensor that the blocks make up."""
    return _whole([block.block.stops for block in stored])


def _whole(stops: Sequence[Shape]) -> Shape:
    return tuple(map(max, zip(*stops, strict=True)))
