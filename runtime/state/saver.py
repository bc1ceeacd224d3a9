"""Checkpoints written beside the steps that follow them.

Every rank copies the blocks it saves and goes on (or waits, and copies nothing); a thread writes
them. Rank 0's then waits until all ranks have said what they wrote, writes the manifest and gives
the folder its name: until then it is no checkpoint. Between ranks there is the file system alone,
so that a collective of the next step is never waited for by two.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from whale_train.checkpoint_files import (
    MANIFEST,
    SAVED,
    STOP,
    FileRecord,
    Manifest,
    checkpoints_in,
    folder_of,
    unfinished,
)
from whale_train.config import CheckpointOptions
from whale_train.runtime.state.held import HeldBlock, RankState
from whale_train.runtime.state.random_states import RandomStates
from whale_train.runtime.state.tensor_files import write_json, write_tensors, write_text
from whale_train.runtime.state.votes import Votes, Wish

_POLL_S = 0.05
_COPIED = ("plan.json", "request.json")


class Saver:
    """Saves what `rank` of `ranks` holds; all of them save at the same steps. A wait for the others
    ends after `timeout_s`. `is_asked_to_stop` says whether this process was told to end."""

    def __init__(
        self,
        run_dir: Path,
        options: CheckpointOptions,
        state: RankState,
        random: RandomStates,
        rank: int,
        ranks: int,
        timeout_s: float,
        votes: Votes,
        is_asked_to_stop: Callable[[], bool],
    ) -> None:
        self._run_dir, self._options, self._state = run_dir, options, state
        self._random = random
        self._rank, self._ranks, self._timeout_s = rank, ranks, timeout_s
        self._votes, self._is_asked_to_stop = votes, is_asked_to_stop
        self._saved_s = time.monotonic()
        self._writing: threading.Thread | None = None
        self.last: Path | None = None  # the checkpoint begun last; at the end, if it is whole

    def wanted(self, step: int) -> Wish:
        """Return what all ranks are to do now that `step` steps are done; a collective."""
        every = self._options.every_steps
        is_due = every is not None and step % every == 0
        return max(self._votes.cast(self._wish()), Wish.SAVE if is_due else Wish.NOTHING)

    def _wish(self) -> Wish:
        """Return what this rank wants: rank 0 has the clock, and sees what the launcher asks."""
        if self._is_asked_to_stop() or (self._rank == 0 and (self._run_dir / STOP).exists()):
            return Wish.SAVE_AND_STOP
        every_s = self._options.every_s
        if self._rank == 0 and every_s is not None and time.monotonic() - self._saved_s >= every_s:
            self._saved_s = time.monotonic()
            return Wish.SAVE
        return Wish.NOTHING

    def close(self) -> None:
        """Return when everything is written; a collective."""
        self._votes.close()
        self.wait()
        whole = [self.last is not None and (self.last / MANIFEST).exists()]
        dist.broadcast_object_list(whole, src=0)
        self.last = self.last if whole[0] else None

    def save(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Save the state after `step` steps; `scalars` are what no tensor has of it. Returns when
        it is copied, or, if not `async`, written without a copy."""
        self.wait()
        blocks = owned(self._state.blocks())
        if self._options.asynchronous:
            blocks = [_copy(block) for block in blocks]
        self._writing = threading.Thread(
            target=self._write,
            args=(step, blocks, dict(scalars), self._random.read()),
            daemon=True,
        )
        self._writing.start()
        self.last = folder_of(self._run_dir, step)
        if not self._options.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return when what was begun is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(
        self, step: int, blocks: list[HeldBlock], scalars: dict[str, Any], random: dict[str, Any]
    ) -> None:
        started = time.monotonic()
        checkpoint = folder_of(self._run_dir, step)
        folder = unfinished(checkpoint)
        try:
            said: dict[str, Any] = {
                "files": [asdict(file) for file in self._own_files(folder, blocks, random)]
            }
        except OSError as error:
            said = {"error": f"{error.strerror or error}"}
        except Exception as error:  # or rank 0 would wait for a word of it
            said = {"error": f"{type(error).__name__}: {error}"}
        if self._rank == 0:
            self._finish(step, folder, checkpoint, scalars, started, said)
            return
        with suppress(OSError):  # where not even that can be written, rank 0 cannot write either
            write_said(folder, self._rank, said)

    def _own_files(
        self, folder: Path, blocks: list[HeldBlock], random: dict[str, Any]
    ) -> Iterator[FileRecord]:
        yield from write_blocks(folder, blocks, self._rank)
        yield write_json(folder, f"random/rank_{self._rank}.json", random)

    def _finish(
        self,
        step: int,
        folder: Path,
        checkpoint: Path,
        scalars: dict[str, Any],
        started: float,
        said: dict[str, Any],
    ) -> None:
        """Make a checkpoint of what the ranks wrote to `folder`, rank 0 what it `said`, and say so,
        or why not."""
        line: dict[str, Any] = {"step": step, "path": str(checkpoint)}
        try:
            files = [*files_of(0, said), *said_by(folder, range(1, self._ranks), self._timeout_s)]
            files.append(write_json(folder, "state.json", {"step": step, **scalars}))
            files += [
                write_text(folder, name, (self._run_dir / name).read_text()) for name in _COPIED
            ]
            manifest = Manifest(step, time.monotonic() - started, tuple(files))
            write_text(folder, MANIFEST, manifest.to_json())
            if checkpoint.exists():  # of a run that went the same steps before
                shutil.rmtree(checkpoint)
            folder.rename(checkpoint)
            line |= {"bytes": manifest.bytes, "seconds": manifest.seconds}
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            line["error"] = error.strerror or str(error)
        with (self._run_dir / SAVED).open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "error" not in line and self._options.keep is not None:
            for old in checkpoints_in(checkpoint.parent)[self._options.keep :]:
                shutil.rmtree(old, ignore_errors=True)


def owned(blocks: Sequence[HeldBlock]) -> list[HeldBlock]:
    """Return the blocks that this rank saves, each once."""
    return list({(x.folder, x.name, x.block): x for x in blocks if x.is_owner}.values())


def _copy(block: HeldBlock) -> HeldBlock:
    """Return the block with a tensor of its own, on the host."""
    tensor = block.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return replace(block, tensor=tensor)


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


def write_said(folder: Path, rank: int, said: dict[str, Any]) -> None:
    """Tell rank 0 what `rank` wrote, or what kept it from it: all of it or no file."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".said_{rank}.partial"
    partial.write_text(json.dumps(said))
    partial.replace(folder / f".said_{rank}")


def said_by(folder: Path, ranks: Iterable[int], timeout_s: float) -> list[FileRecord]:
    """Return the records of the files that `ranks` wrote, once they have. Raises OSError when one
    could not, or said nothing within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    files: list[FileRecord] = []
    for rank in ranks:
        path = folder / f".said_{rank}"
        while not path.exists():
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} had not written its part after {timeout_s:g} s")
            time.sleep(_POLL_S)
        files += files_of(rank, json.loads(path.read_text()))
        path.unlink()
    return files


def files_of(rank: int, said: dict[str, Any]) -> list[FileRecord]:
    """Return the records of the files that `rank` says it wrote. Raises OSError where it says that
    it could not."""
    if "error" in said:
        raise OSError(f"rank {rank}: {said['error']}")
    return [FileRecord(**file) for file in said["files"]]
