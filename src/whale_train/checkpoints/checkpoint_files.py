"""Write and check a checkpoint as files: their names, and whether all of them are there.

    checkpoints/step_N/
        model/, optimizer/    safetensors, each with the blocks that one rank saved
        random/rank_R.json    the states of a rank's random generators
        state.json            step, samples seen, loss scale
        plan.json, request.json
        manifest.json         every file with its size and CRC-32: written last

A checkpoint is written in a folder with another name, which is renamed once the manifest is
written. A safetensors file (`checkpoints/safetensors_files.py`) has at most one block of a name, so
that a rank writes several files where it saves several blocks of a tensor. Ranks write the files,
and the launcher checks them: neither torch nor hydra is imported here.
"""

import json
import math
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from whale_train.checkpoints.safetensors_files import (
    BrokenCheckpoint,
    StoredBlock,
    is_whole_number,
    join_blocks,
    read_json,
    size_of,
)
from whale_train.checkpoints.url_path import Place, UrlPath

CHECKPOINTS = "checkpoints"  # in the run directory
MODEL = "model"  # in the run directory too: the trained weights
PARTS_OF_MODEL = ".parts_of_model"  # the weights that ranks hand to rank 0 at the end of a run
UNFINISHED_MODEL = ".unfinished_model"  # the folder in which rank 0 joins the weights
BEST = "best.json"  # beside the checkpoints: the step of the best one, and its metric
STOP = "stop"  # a file by which the launcher asks the ranks to save and end
SAVED = "checkpoints.jsonl"  # one line for each checkpoint, written or failed
MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished_"
_CRC = "crc32"  # the key of a manifest's own checksum
_CHUNK_BYTES = 2**22
_Folder = TypeVar("_Folder", Path, UrlPath)


@dataclass(frozen=True)
class FileRecord:
    """A file in a manifest.

    path: the path in the checkpoint.
    bytes: the size, in bytes.
    crc32: the CRC-32 of the content.
    """

    path: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint. The file also has a checksum of its own content.

    step: number of optimizer steps done.
    seconds: the time that writing the files took, in seconds.
    files: all other files of the checkpoint.
    """

    step: int
    seconds: float
    files: tuple[FileRecord, ...]

    @property
    def bytes(self) -> int:
        """Return the bytes of all files together."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """Return the text of the manifest's file, with its checksum."""
        content = json.loads(json.dumps(asdict(self)))
        return json.dumps({**content, _CRC: _checksum_of(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Place) -> "Manifest":
        """Return the manifest of a checkpoint. Raises BrokenCheckpoint where the manifest is
        missing, damaged or not valid."""
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
    """Return the record of a file from its entry in a manifest.

    Raises ValueError for values of other types, and for a path outside of the checkpoint.
    """
    if not isinstance(path, str) or not is_whole_number(bytes) or not is_whole_number(crc32):
        raise ValueError("a file's path, size or checksum is none")
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r:.80} is no path in it")
    assert isinstance(bytes, int)
    assert isinstance(crc32, int)
    return FileRecord(path, bytes, crc32)


def _checksum_of(content: Any) -> int:
    """Return the CRC-32 of a manifest's content without its checksum."""
    return zlib.crc32(json.dumps(content).encode())


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run_dir / CHECKPOINTS / f"step_{step}"


def unfinished(checkpoint: Path) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return checkpoint.with_name(f"{_UNFINISHED}{checkpoint.name}")


def unfinished_in(run_dir: Path) -> list[Path]:
    """Return the paths of unfinished checkpoints and unfinished trained weights in a run
    directory."""
    model = [run_dir / name for name in (PARTS_OF_MODEL, UNFINISHED_MODEL)]
    return [*unfinished_checkpoints(run_dir), *(path for path in model if path.exists())]


def unfinished_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of checkpoints that are being written, or whose writing was
    interrupted."""
    return sorted((run_dir / CHECKPOINTS).glob(f"{_UNFINISHED}*"))


def unfinished_before(run_dir: Path, step: int) -> list[Path]:
    """Return the folders of unfinished checkpoints of steps before `step`.

    Later steps are left out, because another rank may be writing them: a rank goes on once its own
    part of this checkpoint is written.
    """
    numbered = _numbered(run_dir / CHECKPOINTS, f"{_UNFINISHED}step_")
    return [path for number, path in numbered if number < step]


def best_step(folder: Place) -> int | None:
    """Return the step of the best checkpoint in a folder of checkpoints, or None where `best.json`
    names none."""
    try:
        return int(json.loads((folder / BEST).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checkpoints_in(folder: _Folder) -> list[_Folder]:
    """Return the checkpoints in a folder, the newest first, including incomplete ones."""
    return [path for _, path in sorted(_numbered(folder, "step_"), reverse=True)]


def _numbered(folder: _Folder, prefix: str) -> list[tuple[int, _Folder]]:
    """Return the number and the path of every entry of a folder whose name is `prefix` followed by
    a number."""
    candidates = [(path.name.removeprefix(prefix), path) for path in folder.glob(f"{prefix}*")]
    return [(int(number), path) for number, path in candidates if number.isdecimal()]


def check(checkpoint: Place) -> Manifest:
    """Read every byte of a checkpoint, and return its manifest.

    In a store, only the sizes of tensor files are checked, since each rank reads parts of them.
    Raises BrokenCheckpoint, which names the first file that differs from the manifest.
    """
    manifest = Manifest.read(checkpoint)
    sizes: Mapping[str, int] | None = None
    if isinstance(checkpoint, UrlPath):
        try:
            sizes = checkpoint.sizes()
        except OSError as error:
            raise BrokenCheckpoint(f"{checkpoint} cannot be listed ({error})") from None
    with ThreadPoolExecutor() as pool:  # zlib computes without the GIL
        for fault in pool.map(lambda file: _fault(checkpoint, file, sizes), manifest.files):
            if fault:
                raise BrokenCheckpoint(fault)
    return manifest


def _fault(checkpoint: Place, record: FileRecord, sizes: Mapping[str, int] | None) -> str:
    """Return the fault of a file of a checkpoint, or '' where the file agrees with its record.

    sizes: the bytes of the files in a store, by path; None for a checkpoint on a disk.
    """
    path = checkpoint / record.path
    try:
        if sizes is not None and record.path not in sizes:
            return f"{path} is missing"
        size = size_of(path) if sizes is None else sizes[record.path]
        if size != record.bytes:
            return f"{path} has {size:,} of {record.bytes:,} bytes"
        if sizes is not None and path.suffix == ".safetensors":
            return ""
        if checksum(path) != record.crc32:
            return f"{path} is damaged: its checksum is not the manifest's"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
    return ""


def checksum(path: Place) -> int:
    """Return the CRC-32 of a file's content."""
    if isinstance(path, UrlPath):
        return zlib.crc32(path.read_bytes())
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def tensor_files(folder: Place) -> list[Place]:
    """Return the safetensors files in a folder of a checkpoint.

    Files that are not in the manifest are left out: they do not belong to the checkpoint. Outside
    of a checkpoint, all safetensors files of the folder are returned.
    """
    if not (folder.parent / MANIFEST).exists():
        return sorted(folder.glob("*.safetensors"))
    paths = [file.path for file in Manifest.read(folder.parent).files]
    inside = sorted(x for x in paths if PurePosixPath(x).parent == PurePosixPath(folder.name))
    return [folder.parent / x for x in inside if x.endswith(".safetensors")]


def stored_tensors(folder: Place) -> dict[str, list[StoredBlock]]:
    """Return the blocks of every tensor in a folder of a checkpoint, by name. Raises
    BrokenCheckpoint where a file is broken, or where blocks do not make up a tensor."""
    return join_blocks(tensor_files(folder))
