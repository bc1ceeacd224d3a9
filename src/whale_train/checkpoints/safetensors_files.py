"""Read the headers of safetensors files: the blocks of tensors in each file, and their places.

The header of a checkpoint's file gives the offsets of each block in the full tensor, in the format
of `torch.distributed.checkpoint`'s safetensors storage, whose reader can read these files. The
header is validated completely, so that later reads of tensors cannot fail by it. Neither torch nor
the safetensors library is imported.
"""

import json
import stat
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

from whale_train.checkpoints.url_path import Place, UrlPath

# Bytes of the longest header that the safetensors library reads, and of the longest JSON file that
# is read here.
MOST_JSON_BYTES = 100_000_000
_HEAD_BYTES = 2**15  # the first read of a file, which has all of most headers
_AT_ONCE = 16  # files of a store whose headers are read at the same time
_LARGEST = 2**63 - 1  # the largest int64: all sizes of a tensor must fit in it
_OFFSETS = "DCP_SHARDING_INFO"  # torch's key of the offsets in a header, and the key below it
_OF_TENSOR = "saved_offsets"
# Bytes of an element, by the codes of safetensors for the dtypes that checkpoints have.
ELEMENT_BYTES = {
    **{"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2},
    **{"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1},
}

Shape = tuple[int, ...]


class BrokenCheckpoint(Exception):
    """A checkpoint lacks something, or differs from what was written. The message says how."""


@dataclass(frozen=True)
class Block:
    """A box of elements of a tensor.

    offsets: the first index, in each dimension.
    shape: the number of elements, in each dimension.
    """

    offsets: Shape
    shape: Shape

    def overlap(self, other: "Block") -> "Block | None":
        """Return the elements that are in both blocks, or None where there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Block(starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))

    def within(self, outer: "Block") -> tuple[slice, ...]:
        """Return the index of this block in a tensor that holds the elements of `outer`."""
        starts = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))

    @property
    def stops(self) -> Shape:
        """Return one more than the last index, in each dimension."""
        return tuple(a + n for a, n in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True)
class StoredBlock:
    """A block of a tensor in a file.

    file: the safetensors file.
    dtype: the code of safetensors for the dtype.
    block: the elements of the tensor that are stored.
    start: the offset of the block's data in the file, in bytes.
    """

    file: Place
    dtype: str
    block: Block
    start: int = 0


def header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], offsets: Mapping[str, Sequence[int]]
) -> bytes:
    """Return the header of a safetensors file: the length of a JSON text, and the text.

    tensors: the dtype code, shape and number of bytes of each tensor, by name, in the order of
        their data.
    offsets: the index at which each stored block begins in its full tensor; empty where all blocks
        are full tensors.
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
    text += b" " * (-len(text) % 8)  # the format aligns data to 8 bytes
    return struct.pack("<Q", len(text)) + text


def read_json(path: Place) -> Any:
    """Return the content of a JSON file of a checkpoint.

    Raises BrokenCheckpoint where the file is missing, has more than MOST_JSON_BYTES, or is not
    JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read as JSON ({error})") from None


def read_text(path: Place) -> str:
    """Return the text of a file of a checkpoint, in UTF-8.

    Raises BrokenCheckpoint where the file is missing, has more than MOST_JSON_BYTES, or cannot be
    read.
    """
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


def size_of(path: Place) -> int:
    """Return the bytes of a file. Raises OSError where the path is not a regular file: reading a
    pipe could block forever."""
    if isinstance(path, UrlPath):
        return path.size()
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "not a file")
    return status.st_size


def read_range(path: Place, start: int, stop: int) -> bytes:
    """Return the bytes of a file from `start` up to but not including `stop`, or fewer where a
    local file ends before. Raises OSError."""
    if isinstance(path, UrlPath):
        return path.read_bytes(start, stop)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def is_whole_number(value: object) -> bool:
    """Return whether a value of JSON is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value <= _LARGEST


def stored_blocks(path: Place) -> list[tuple[str, StoredBlock]]:
    """Return the blocks in a safetensors file, each with the name of its tensor.

    A tensor without offsets is complete in the file. Raises BrokenCheckpoint where the file cannot
    be read, or has another size than its header says.
    """
    try:
        return list(_blocks_in(path))
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise BrokenCheckpoint(f"{path} cannot be read as safetensors ({why})") from None


def _blocks_in(path: Place) -> list[tuple[str, StoredBlock]]:
    """Return the blocks of a file with the names of their tensors. Raises ValueError and other
    exceptions for a header that is not valid."""
    size = size_of(path)
    head = read_range(path, 0, min(size, _HEAD_BYTES))
    (length,) = struct.unpack("<Q", head[:8])
    if length > MOST_JSON_BYTES:
        raise ValueError(f"its header has {length:,} bytes, more than {MOST_JSON_BYTES:,}")
    if length > size - 8:
        raise ValueError(f"its header has {length:,} bytes, and the file {size:,}")
    if len(head) < 8 + length:
        head += read_range(path, len(head), 8 + length)
    content = json.loads(head[8 : 8 + length])
    if not isinstance(content, dict):
        raise ValueError("its header is no mapping")
    metadata = content.pop("__metadata__", None) or {}
    offsets = json.loads(metadata.get(_OFFSETS, "{}")) if isinstance(metadata, dict) else None
    if not isinstance(offsets, dict):
        raise ValueError("its offsets are no mapping")
    blocks, spans = [], []
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
        blocks.append((name, StoredBlock(path, dtype, Block(start, shape), 8 + length + begin)))
        spans.append((begin, end))
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise ValueError("its tensors do not follow one another")
        at = end
    if 8 + length + at != size:
        raise ValueError(f"the file has {size:,} bytes, and its header says {8 + length + at:,}")
    return blocks


def _numbers(values: object, name: str) -> Shape:
    """Return a list of whole numbers in a header as a tuple. Raises ValueError for any other value,
    with `name` in the message."""
    if not isinstance(values, list) or not all(map(is_whole_number, values)):
        raise ValueError(f"{name} is {values!r:.40}")
    return tuple(values)


def read_number(stored: StoredBlock) -> float:
    """Return the value of an fp32 scalar. Raises BrokenCheckpoint for any other block."""
    if stored.dtype != "F32" or stored.block.shape:
        raise BrokenCheckpoint(f"{stored.file} has no scalar in fp32 where one is wanted")
    (value,) = struct.unpack("<f", read_range(stored.file, stored.start, stored.start + 4))
    return float(value)


def join_blocks(files: Sequence[Place]) -> dict[str, list[StoredBlock]]:
    """Return the blocks of every tensor in the safetensors files, by name.

    Raises BrokenCheckpoint where the blocks of a name do not tile one tensor: their dtypes differ,
    elements are missing, or elements are stored twice.
    """
    blocks_by_name: dict[str, list[StoredBlock]] = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        is_remote = any(isinstance(path, UrlPath) for path in files)
        for blocks_of_file in (pool.map if is_remote else map)(stored_blocks, files):
            for name, block in blocks_of_file:
                blocks_by_name.setdefault(name, []).append(block)
    for name, blocks in blocks_by_name.items():
        if why := _unlike_a_tensor([x.block for x in blocks], {x.dtype for x in blocks}):
            raise BrokenCheckpoint(f"{blocks[0].file.parent} {why} {name}")
    return blocks_by_name


def _unlike_a_tensor(blocks: Sequence[Block], dtypes: set[str]) -> str:
    """Return the reason why blocks do not tile one tensor, or '' where they do."""
    if len(dtypes) > 1:
        return "has several dtypes of"
    if len({len(block.shape) for block in blocks}) > 1:
        return "has blocks of several numbers of dimensions of"
    shape = _whole([block.stops for block in blocks])
    if sum(prod(block.shape) for block in blocks) != prod(shape):
        return "has not all of"
    if not shape or 0 in shape:
        return ""
    # Sorted along the dimension with the most cuts, a block is compared only with the blocks that
    # begin before it ends.
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
    """Return the shape of the full tensor that the blocks tile."""
    return _whole([block.block.stops for block in stored])


def _whole(stops: Sequence[Shape]) -> Shape:
    """Return the largest stop in each dimension."""
    return tuple(map(max, zip(*stops, strict=True)))
