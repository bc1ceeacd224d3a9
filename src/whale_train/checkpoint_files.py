"""A checkpoint as files: which there are, and whether all of it is there.

    checkpoints/step_N/
        model/, optimizer/    safetensors, each with the blocks that one rank saved
        random/rank_R.json    the states of a rank's random generators
        state.json            step, samples seen, loss scale
        plan.json, request.json
        manifest.json         every file with its size and CRC-32: written last

A checkpoint is written in a folder with another name, and gets its own when it has its manifest.
Each safetensors file says in its header where in the whole tensor its blocks begin, as
`torch.distributed.checkpoint`'s safetensors storage does, whose reader reads these files; it has
one block of a name, so a rank has several files where it saves several. Ranks write the files and
the launcher checks them: neither torch nor hydra is known here.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHECKPOINTS = "checkpoints"  # in the run directory
MODEL = "model"  # in it as well: the trained weights
PARTS_OF_MODEL = ".parts_of_model"  # what ranks hand to rank 0 at the end of a run
UNFINISHED_MODEL = ".unfinished_model"  # and what that makes of it
STOP = "stop"  # where the launcher asks the ranks to save and end
SAVED = "checkpoints.jsonl"  # a line a checkpoint, written or failed
MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished_"
_OFFSETS = "DCP_SHARDING_INFO"  # torch's key, and below it
_OF_TENSOR = "saved_offsets"
_CRC = "crc32"  # of a manifest
_CHUNK_BYTES = 2**22

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file: its path in the checkpoint, size, and CRC-32."""

    path: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """`step` optimizer steps were done. `seconds` is how long the files took to write. In its file
    there is a checksum of the rest beside that."""

    step: int
    seconds: float
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        content = json.loads(json.dumps(asdict(self)))
        return json.dumps({**content, _CRC: _checksum_of(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Return the manifest of a checkpoint. Raises BrokenCheckpoint."""
        try:
            content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
            if content.pop(_CRC) != _checksum_of(content):
                raise ValueError("its checksum is another")
            files = tuple(FileRecord(**file) for file in content["files"])
            return cls(int(content["step"]), float(content["seconds"]), files)
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{checkpoint / MANIFEST} is missing") from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise BrokenCheckpoint(f"{checkpoint / MANIFEST} cannot be read ({error})") from None


def _checksum_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


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
    """A block of a tensor, in a file. `dtype` is the code that safetensors has for it."""

    file: Path
    dtype: str
    block: Block


def folder_of(run_dir: Path, step: int) -> Path:
    """Return where the checkpoint after `step` steps is kept."""
    return run_dir / CHECKPOINTS / f"step_{step}"


def unfinished(checkpoint: Path) -> Path:
    """Return the folder in which a checkpoint is written."""
    return checkpoint.with_name(f"{_UNFINISHED}{checkpoint.name}")


def unfinished_in(run_dir: Path) -> list[Path]:
    """Return what is left of checkpoints and of trained weights that were never finished."""
    model = [run_dir / name for name in (PARTS_OF_MODEL, UNFINISHED_MODEL)]
    return [*unfinished_checkpoints(run_dir), *(path for path in model if path.exists())]


def unfinished_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders in which checkpoints are written, or were when the writing ended."""
    return sorted((run_dir / CHECKPOINTS).glob(f"{_UNFINISHED}*"))


def unfinished_before(run_dir: Path, step: int) -> list[Path]:
    """Return the folders in which checkpoints of earlier steps were written. Into one of a later
    step another rank may be writing: it goes on once its own part of this one is written."""
    found = _numbered(run_dir / CHECKPOINTS, f"{_UNFINISHED}step_")
    return [path for number, path in found if number < step]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first, whole or not."""
    return [path for _, path in sorted(_numbered(folder, "step_"), reverse=True)]


def _numbered(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return what in a folder is named `prefix` and a number, by that number."""
    found = [(path.name.removeprefix(prefix), path) for path in folder.glob(f"{prefix}*")]
    return [(int(number), path) for number, path in found if number.isdigit()]


def check(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint of which every byte is as it was written.

    Raises BrokenCheckpoint, which names the file that is not.
    """
    manifest = Manifest.read(checkpoint)
    with ThreadPoolExecutor() as pool:  # which zlib lets compute at once
        for fault in pool.map(lambda file: _fault(checkpoint, file), manifest.files):
            if fault:
                raise BrokenCheckpoint(fault)
    return manifest


def _fault(checkpoint: Path, record: FileRecord) -> str:
    """Return what is wrong with a file of a checkpoint, '' if nothing is."""
    path = checkpoint / record.path
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{path} has {size:,} of {record.bytes:,} bytes"
        if checksum(path) != record.crc32:
            return f"{path} is damaged: its checksum is not the manifest's"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return ""


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


# --- Safetensors ---------------------------------------------------------------------------------


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


def stored_blocks(path: Path) -> Iterator[tuple[str, StoredBlock]]:
    """Yield what a safetensors file has, by name; without an offset, whole tensors.

    Raises BrokenCheckpoint for what is no such file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            content = json.loads(file.read(length))
        metadata = content.pop("__metadata__", None) or {}
        offsets = json.loads(metadata.get(_OFFSETS, "{}"))
        for name, found in content.items():
            shape = tuple(found["shape"])
            start = offsets[name][_OF_TENSOR] if name in offsets else (0,) * len(shape)
            yield name, StoredBlock(path, found["dtype"], Block(tuple(start), shape))
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise BrokenCheckpoint(f"{path} cannot be read as safetensors ({error})") from None


def stored_tensors(folder: Path) -> dict[str, list[StoredBlock]]:
    """Return the blocks of every tensor in the safetensors files of a folder, by name."""
    found: dict[str, list[StoredBlock]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, block in stored_blocks(path):
            found.setdefault(name, []).append(block)
    return found


def whole_shape(stored: Sequence[StoredBlock]) -> Shape:
    """Return the shape of the tensor that the blocks make up."""
    return tuple(map(max, zip(*(each.block.stops for each in stored), strict=True)))
