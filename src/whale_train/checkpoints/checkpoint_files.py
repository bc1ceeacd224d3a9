"""A checkpoint as files: which there are, and whether all of it is there.

    checkpoints/step_N/
        model/, optimizer/    safetensors, each with the blocks that one rank saved
        random/rank_R.json    the states of a rank's random generators
        state.json            step, samples seen, loss scale
        plan.json, request.json
        manifest.json         every file with its size and CRC-32: written last

A checkpoint is written in a folder with another name, and gets its own when it has its manifest.
A safetensors file (`checkpoints/safetensors_files.py`) has one block of a name, so a rank has
several files where it saves several. Ranks write the files and the launcher checks them: neither
torch nor hydra is known here.
"""

import json
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from whale_train.checkpoints.safetensors_files import (
    BrokenCheckpoint,
    StoredBlock,
    is_whole_number,
    join_blocks,
    read_json,
    size_of,
)

CHECKPOINTS = "checkpoints"  # in the run directory
MODEL = "model"  # in it as well: the trained weights
PARTS_OF_MODEL = ".parts_of_model"  # what ranks hand to rank 0 at the end of a run
UNFINISHED_MODEL = ".unfinished_model"  # and what that makes of it
STOP = "stop"  # where the launcher asks the ranks to save and end
SAVED = "checkpoints.jsonl"  # a line a checkpoint, written or failed
MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished_"
_CRC = "crc32"  # of a manifest
_CHUNK_BYTES = 2**22


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
        path = checkpoint / MANIFEST
        content = read_json(path)
        try:
            if content.pop(_CRC) != _checksum_of(content):
                raise ValueError("its checksum is another")
            files = tuple(_record(**file) for file in content["files"])
            step, seconds = content["step"], float(content["seconds"])
            if not is_whole_number(step) or not math.isfinite(seconds):
                raise ValueError("its numbers are none")
            if len({file.path for file in files}) < len(files):
                raise ValueError("it has a file twice")
            return cls(step, seconds, files)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BrokenCheckpoint(f"{path} cannot be read ({error})") from None


def _record(path: object, bytes: object, crc32: object) -> FileRecord:
    """Return a manifest's record of a file. Raises ValueError for one that is none, or names a file
    outside of the checkpoint."""
    if not isinstance(path, str) or not is_whole_number(bytes) or not is_whole_number(crc32):
        raise ValueError("a file's path, size or checksum is none")
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r:.80} is no path in it")
    assert isinstance(bytes, int)
    assert isinstance(crc32, int)
    return FileRecord(path, bytes, crc32)


def _checksum_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


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
    return [(int(number), path) for number, path in found if number.isdecimal()]


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
        size = size_of(path)
        if size != record.bytes:
            return f"{path} has {size:,} of {record.bytes:,} bytes"
        if checksum(path) != record.crc32:
            return f"{path} is damaged: its checksum is not the manifest's"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
    return ""


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files in a folder of a checkpoint that its manifest has: whatever else
    lies there is not the checkpoint's. In a folder of none, all of them."""
    if not (folder.parent / MANIFEST).exists():
        return sorted(folder.glob("*.safetensors"))
    paths = (folder.parent / file.path for file in Manifest.read(folder.parent).files)
    return sorted(x for x in paths if x.parent == folder and x.suffix == ".safetensors")


def stored_tensors(folder: Path) -> dict[str, list[StoredBlock]]:
    """Return the blocks of every tensor of a folder of a checkpoint, by name. Raises
    BrokenCheckpoint."""
    return join_blocks(tensor_files(folder))
