"""Files that several ranks write to one folder, and what they tell rank 0 of them.

Between the ranks there is the file system alone: they write beside the steps that follow, and a
collective of a step is never waited for by two.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from whale_train.checkpoints.checkpoint_files import FileRecord
from whale_train.runtime.state.held import HeldBlock
from whale_train.runtime.state.tensor_files import write_tensors

_POLL_S = 0.05
_AFTER_OWN_S = 2.0  # rank 0 waits so long for the others where it has failed itself


@dataclass(frozen=True)
class Part:
    """What `rank` wrote, or the `error` that kept it from it."""

    rank: int
    files: tuple[FileRecord, ...] = ()
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Part":
        content = json.loads(text)
        files = tuple(FileRecord(**file) for file in content["files"])
        return cls(content["rank"], files, content["error"])


def written(folder: Path, rank: int, write: Callable[[], Iterable[FileRecord]]) -> Part:
    """Return what `rank` has written to `folder` by `write`. Of one that failed nothing is left
    there: on a full disk there would be no room to say so."""
    try:
        return Part(rank, tuple(write()))
    except Exception as error:  # of any kind: rank 0 waits for a word of it
        for path in folder.glob(f"*/rank_{rank}[_.]*"):
            path.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else None
        return Part(rank, error=why or f"{type(error).__name__}: {error}")


def hand_over(folder: Path, part: Part) -> None:
    """Tell rank 0 of a rank's part: all of it or no file. Where not even that can be written, rank
    0 will wait in vain."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".part_{part.rank}.partial"
        partial.write_text(part.to_json(), encoding="utf-8")
        partial.replace(folder / f".part_{part.rank}")


def gathered(folder: Path, own: Part, ranks: int, timeout_s: float) -> list[FileRecord]:
    """Return the records of the files of all `ranks`, rank 0's `own` first, once all have written.
    Raises OSError where one could not, or said nothing within `timeout_s`; that is once the others
    have ended too, so that what they wrote can be removed."""
    wait_s = min(timeout_s, _AFTER_OWN_S) if own.error else timeout_s
    deadline = time.monotonic() + wait_s
    parts = [own]
    for rank in range(1, ranks):
        path = folder / f".part_{rank}"
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if path.exists():
            parts.append(Part.from_json(path.read_text(encoding="utf-8")))
            path.unlink()
        else:
            parts.append(Part(rank, error=f"had not written its part after {timeout_s:g} s"))
    for part in parts:
        if part.error:
            raise OSError(f"rank {part.rank}: {part.error}")
    return [file for part in parts for file in part.files]


def write_blocks(folder: Path, held: Sequence[HeldBlock], rank: int) -> Iterator[FileRecord]:
    """Write blocks to files that have a name once each; yield the files' records."""
    files: dict[tuple[str, int], list[HeldBlock]] = {}
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
