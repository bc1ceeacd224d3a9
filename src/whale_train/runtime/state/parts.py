"""Write files of several ranks to one folder, and report them to rank 0.

Ranks communicate through the file system only. They write during later steps, and only the steps
may wait for collectives.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from whale_train.checkpoints.checkpoint_files import FileRecord
from whale_train.runtime.state.held import LocalBlock
from whale_train.runtime.state.tensor_files import write_tensors

_POLL_S = 0.05
_AFTER_OWN_S = 2.0  # rank 0's wait for the others after a failure of its own


@dataclass(frozen=True)
class SavedPart:
    """The files of one rank.

    rank: the rank.
    files: records of the files that the rank wrote.
    error: the reason that it could not write them, or ''.
    """

    rank: int
    files: tuple[FileRecord, ...] = ()
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SavedPart":
        content = json.loads(text)
        files = tuple(FileRecord(**file) for file in content["files"])
        return cls(content["rank"], files, content["error"])


def written(folder: Path, rank: int, write: Callable[[], Iterable[FileRecord]]) -> SavedPart:
    """Write the files of `rank` to `folder` by calling `write`, and return them as a part.

    If `write` raises, the part has the error, and the rank's files are removed: on a full disk
    there would be no room to report the error.
    """
    try:
        return SavedPart(rank, tuple(write()))
    except Exception as error:  # any exception: rank 0 waits for a report
        for path in folder.glob(f"*/rank_{rank}[_.]*"):
            path.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else None
        return SavedPart(rank, error=why or f"{type(error).__name__}: {error}")


def hand_over(folder: Path, part: SavedPart) -> None:
    """Report a rank's part to rank 0, by a file that is created atomically.

    If that file cannot be written either, rank 0 waits until its timeout.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".part_{part.rank}.partial"
        partial.write_text(part.to_json(), encoding="utf-8")
        partial.replace(folder / f".part_{part.rank}")


def gathered(folder: Path, own: SavedPart, ranks: int, timeout_s: float) -> list[FileRecord]:
    """Wait for the files of all `ranks` ranks, and return their records, rank 0's part `own` first.

    Raises OSError if a rank could not write, or reported nothing within `timeout_s` seconds. The
    error is raised only after all other ranks have ended, so that their files can be removed.
    """
    wait_s = min(timeout_s, _AFTER_OWN_S) if own.error else timeout_s
    deadline = time.monotonic() + wait_s
    parts = [own]
    for rank in range(1, ranks):
        path = folder / f".part_{rank}"
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if path.exists():
            parts.append(SavedPart.from_json(path.read_text(encoding="utf-8")))
            path.unlink()
        else:
            parts.append(SavedPart(rank, error=f"had not written its part after {timeout_s:g} s"))
    for part in parts:
        if part.error:
            raise OSError(f"rank {part.rank}: {part.error}")
    return [file for part in parts for file in part.files]


def write_blocks(folder: Path, held: Sequence[LocalBlock], rank: int) -> Iterator[FileRecord]:
    """Write the blocks `held` to files, and yield the files' records.

    A file contains a name only once, so a tensor's second block goes to a second file.
    """
    files: dict[tuple[str, int], list[LocalBlock]] = {}
    count: dict[tuple[str, str], int] = {}
    for block in held:
        number = count[block.folder, block.name] = count.get((block.folder, block.name), -1) + 1
        files.setdefault((block.folder, number), []).append(block)
    for (kind, number), blocks in files.items():
        yield write_tensors(
            folder,
            f"{kind}/rank_{rank}_{number}.safetensors",
            {x.name: (x.tensor.dtype, x.block.shape) for x in blocks},
            (x.tensor for x in blocks),
            {x.name: x.block.offsets for x in blocks},
        )
