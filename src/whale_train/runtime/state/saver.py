"""Write checkpoints in a thread, during the steps that follow them.

Every rank copies the blocks it saves and continues (a synchronous save copies nothing and waits); a
thread writes the blocks. Rank 0's thread then waits until all ranks have reported their files,
writes the manifest and gives the folder its final name. Until then the folder is not a checkpoint.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from whale_train.checkpoints.checkpoint_files import (
    BEST,
    MANIFEST,
    SAVED,
    STOP,
    FileRecord,
    Manifest,
    best_step,
    checkpoints_in,
    folder_of,
    unfinished,
    unfinished_before,
)
from whale_train.checkpoints.checkpoint_state import STATE
from whale_train.config import CheckpointOptions
from whale_train.runtime.state.carrier import Carrier
from whale_train.runtime.state.held import LocalBlock, RankState
from whale_train.runtime.state.parts import SavedPart, write_blocks, written
from whale_train.runtime.state.random_states import RankRandom
from whale_train.runtime.state.tensor_files import record_json, record_text
from whale_train.runtime.state.votes import CheckpointRequest, RequestConsensus

_COPIED = ("plan.json", "request.json")


class Saver:
    """Saves the state that `rank` holds; all ranks save at the same steps.

    `is_asked_to_stop` returns True once this process was told to end. `data` is the data's
    fingerprint, as plain JSON data. `wants_to_delink` is True if this rank requests that shared
    layers continue separately, and `asked` is this rank's other request. `on_saved` is called on
    rank 0, in the thread that writes, with the step and the folder of every complete checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        options: CheckpointOptions,
        state: RankState,
        random: RankRandom,
        rank: int,
        carrier: Carrier,
        votes: RequestConsensus,
        is_asked_to_stop: Callable[[], bool],
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._run_dir, self._options, self._state = run_dir, options, state
        self._random = random
        self._rank, self._carrier = rank, carrier
        self._votes, self._is_asked_to_stop = votes, is_asked_to_stop
        self._data = data
        self._saved_s = time.monotonic()
        self._writing: threading.Thread | None = None
        self.wants_to_delink = False
        self.asked = CheckpointRequest.NOTHING
        self.on_saved: Callable[[int, Path], None] = lambda step, folder: None
        # The checkpoint begun last; after `close`, None unless it is complete.
        self.last: Path | None = None

    def wanted(self, step: int) -> CheckpointRequest:
        """Return the request that all ranks follow after `step` steps. A collective.

        It is the largest request of any rank, or a save if one is due.
        """
        every = self._options.every_steps
        is_due = every is not None and step % every == 0
        return max(
            self._votes.cast(self._wish()),
            CheckpointRequest.SAVE if is_due else CheckpointRequest.NOTHING,
        )

    def _wish(self) -> CheckpointRequest:
        """Return this rank's request, and clear `asked`."""
        request, self.asked = self.asked, CheckpointRequest.NOTHING
        return max(request, self._own_wish())

    def _own_wish(self) -> CheckpointRequest:
        """Return the request of this rank, apart from `asked`.

        Rank 0 also requests a save when `every_s` has passed, and a stop when the launcher requests
        one.
        """
        if self._is_asked_to_stop() or (self._rank == 0 and (self._run_dir / STOP).exists()):
            return CheckpointRequest.SAVE_AND_STOP
        if self.wants_to_delink:
            return CheckpointRequest.SAVE_AND_DELINK
        every_s = self._options.every_s
        if self._rank == 0 and every_s is not None and time.monotonic() - self._saved_s >= every_s:
            self._saved_s = time.monotonic()
            return CheckpointRequest.SAVE
        return CheckpointRequest.NOTHING

    def close(self) -> None:
        """Wait until everything is written. A collective."""
        self._votes.close()
        self.wait()
        is_complete = [self.last is not None and (self.last / MANIFEST).exists()]
        dist.broadcast_object_list(is_complete, src=0)
        self.last = self.last if is_complete[0] else None

    def save(
        self,
        step: int,
        scalars: Mapping[str, Any],
        trackers: Callable[[], Mapping[str, Any]] | None = None,
        best: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the state after `step` steps.

        scalars: the part of the state that is in no tensor.
        trackers: waits for the states of trackers and returns them; None: no trackers.
        best: the metric by which the checkpoint is the best so far; None: it is not the best.

        Returns once the blocks are copied. A synchronous save copies nothing, and returns once all
        files are written.
        """
        self.wait()
        blocks = owned(self._state.blocks())
        if self._options.asynchronous:
            blocks = [_copy(block) for block in blocks]
        self._writing = threading.Thread(
            target=self._write,
            args=(step, blocks, dict(scalars), self._random.read(), trackers, best),
            daemon=True,
        )
        self._writing.start()
        self.last = folder_of(self._run_dir, step)
        if not self._options.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint begun last is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(
        self,
        step: int,
        blocks: list[LocalBlock],
        scalars: dict[str, Any],
        random: dict[str, Any],
        trackers: Callable[[], Mapping[str, Any]] | None,
        best: Mapping[str, Any] | None,
    ) -> None:
        started = time.monotonic()
        checkpoint = folder_of(self._run_dir, step)
        folder = unfinished(checkpoint)
        own = written(folder, self._rank, lambda: self._own_files(folder, blocks, random))
        if self._rank == 0:
            if trackers is not None:
                scalars["trackers"] = trackers()
            self._finish(step, folder, checkpoint, scalars, started, own, best)
        else:
            self._carrier.hand_over(folder, own)

    def _own_files(
        self, folder: Path, blocks: list[LocalBlock], random: dict[str, Any]
    ) -> Iterator[FileRecord]:
        yield from write_blocks(folder, blocks, self._rank)
        yield record_json(folder, f"random/rank_{self._rank}.json", random)

    def _finish(
        self,
        step: int,
        folder: Path,
        checkpoint: Path,
        scalars: dict[str, Any],
        started: float,
        own: SavedPart,
        best: Mapping[str, Any] | None,
    ) -> None:
        """Make a checkpoint of the ranks' files in `folder`, and append its line to the file SAVED.

        `own` is rank 0's part, and `started` the time at which it began. A failure is reported in
        the line.
        """
        line: dict[str, Any] = {"step": step, "path": str(checkpoint)}
        try:
            files = self._carrier.gathered(folder, own)
            files.append(record_json(folder, STATE, {"step": step, **scalars, "data": self._data}))
            files += [
                record_text(
                    folder,
                    name,
                    (self._run_dir / name).read_text(encoding="utf-8"),
                )
                for name in _COPIED
            ]
            manifest = Manifest(step, time.monotonic() - started, tuple(files))
            record_text(folder, MANIFEST, manifest.to_json())
            if checkpoint.exists():  # left by an earlier run of the same steps
                shutil.rmtree(checkpoint)
            folder.rename(checkpoint)
            if best is not None:
                record_json(checkpoint.parent, BEST, {"step": step, **best})
            line |= {"bytes": manifest.bytes, "seconds": manifest.seconds}
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            line["error"] = error.strerror or str(error)
        if "error" not in line:
            self.on_saved(step, checkpoint)
        for stale in unfinished_before(self._run_dir, step):
            shutil.rmtree(stale, ignore_errors=True)  # left by a rank that was late with its part
        with suppress(OSError), (self._run_dir / SAVED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if "error" not in line and self._options.keep is not None:
            best_at = best_step(checkpoint.parent)
            others = [x for x in checkpoints_in(checkpoint.parent) if x.name != f"step_{best_at}"]
            for old in others[self._options.keep :]:
                shutil.rmtree(old, ignore_errors=True)


def owned(blocks: Sequence[LocalBlock]) -> list[LocalBlock]:
    """Return the blocks that this rank saves, each once."""
    return list({(x.folder, x.name, x.block): x for x in blocks if x.is_owner}.values())


def _copy(block: LocalBlock) -> LocalBlock:
    """Return the block with its own copy of the tensor, on the host."""
    tensor = block.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return replace(block, tensor=tensor)
