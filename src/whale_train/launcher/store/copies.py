"""Copy a run's checkpoints into a store, one after another, while the run trains.

The launcher on rank 0's host copies, since the files of all ranks are there and no step has to
wait. A thread copies. The main thread gives it the new checkpoints, and prints each finished copy.
"""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rich.console import Console
from rich.text import Text

from whale_train.checkpoints.checkpoint_files import (
    CHECKPOINTS,
    MANIFEST,
    MODEL,
    checkpoints_in,
)
from whale_train.checkpoints.copy_to_store import (
    HELD,
    copy_best,
    copy_checkpoint,
    copy_model,
    hold,
    prune,
    release,
    remove_after,
)
from whale_train.checkpoints.url_path import StoreError, UrlPath
from whale_train.launcher.job_end import JobEnd, summary_of
from whale_train.launcher.ranks.run_dir import write_json
from whale_train.launcher.store.refuse_url import claim, run_of
from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import in_bytes, in_seconds

_LOOK_S = 0.5  # between looks for new checkpoints
_SAY_S = 10.0  # between lines of progress, once the run has ended
_POLL_S = 0.1


@dataclass(frozen=True)
class Copied:
    """The outcome of one copy, of a checkpoint or of the trained weights.

    name: `step_N` or `model`.
    bytes: size of the copied files, in bytes.
    seconds: duration of the copy, in seconds.
    error: the reason of a failed copy; '' for a copy that is in the store.
    """

    name: str
    bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class StoreCopies:
    """The copies of one run's checkpoints, over all attempts of the run.

    to: the folder of the store.
    keep: number of the newest checkpoints that stay in the store; None keeps all.
    console: prints a line for each copy.
    """

    def __init__(self, to: UrlPath, keep: int | None, console: Console) -> None:
        self._to, self._keep, self._console = to, keep, console
        self._run_dir = Path()
        self._thread: threading.Thread | None = None
        self._wanted: SimpleQueue[Path | None] = SimpleQueue()
        self._done: SimpleQueue[Copied | None] = SimpleQueue()  # None: removed before its turn
        self._asked: set[tuple[str, int]] = set()
        self._left = self._bytes = 0  # copies that are not done; bytes copied so far
        self._looked_s = 0.0
        self._results: dict[str, Copied] = {}
        self._said = ""
        self._steps: list[int] = []  # of the checkpoints in the store

    def begin(self, run_dir: Path, step: int) -> None:
        """Start the thread that copies the checkpoints of `run_dir`. Further calls do nothing.

        run_dir: the run directory.
        step: the step after which the run starts or continues.

        Raises ConfigError where the store cannot be written to.
        """
        if self._thread is not None:
            return
        self._run_dir = run_dir
        claim(self._to, run_dir)
        self._thread = threading.Thread(target=self._work, args=(step,), daemon=True)
        self._thread.start()

    def poll(self, *, at_once: bool = True) -> None:
        """Queue new checkpoints for copying, and print finished copies. To be called often.

        at_once: whether to look for new checkpoints even if the last look was a moment ago.
        """
        if self._thread is None:
            return
        if at_once or time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            for checkpoint in reversed(checkpoints_in(self._run_dir / CHECKPOINTS)):
                try:
                    key = (checkpoint.name, (checkpoint / MANIFEST).stat().st_mtime_ns)
                except OSError:  # not whole, or being removed
                    continue
                if key not in self._asked:
                    self._asked.add(key)
                    self._ask(checkpoint)
        try:
            while True:
                copied = self._done.get_nowait()
                self._left -= 1
                if copied is not None:
                    self._say(copied)
        except Empty:
            return

    def finished(self, end: JobEnd, poll: Callable[[], None]) -> JobEnd:
        """Wait for all copies of a job that has ended, and return the job's final end.

        poll: called while waiting; raises KeyboardInterrupt where the job must not wait longer.

        A job fails if the last checkpoint or the trained weights are not in the store. The summary
        gets the steps of the checkpoints in the store, and the errors of the others.
        """
        if self._thread is None:
            return end
        self.poll()
        if end.status == "done" and (self._run_dir / MODEL).is_dir():
            self._ask(self._run_dir / MODEL)
        self._wanted.put(None)
        said_s = float("-inf")
        while self._thread.is_alive():
            if self._left and time.monotonic() - said_s >= _SAY_S:
                copied = f"{self._left} left, {in_bytes(self._bytes)} copied so far"
                self._console.print(Text(f"copying to {self._to}: {copied}"), soft_wrap=True)
                said_s = time.monotonic()
            poll()
            self._thread.join(_POLL_S)
            self.poll(at_once=False)
        self.poll()
        return self._judged(end)

    def _ask(self, path: Path) -> None:
        self._left += 1
        self._wanted.put(path)

    def _judged(self, end: JobEnd) -> JobEnd:
        """Add the outcome of all copies to the summary, and return the job's final end."""
        results = self._results.values()
        content: dict[str, Any] = {"to": str(self._to), "steps": self._steps}
        if MODEL in self._results:
            content["model"] = not self._results[MODEL].error
        content["errors"] = {x.name: x.error for x in results if x.error}
        if (self._run_dir / "summary.json").exists():
            summary = summary_of(self._run_dir) | {"copies": content}
            write_json(self._run_dir / "summary.json", summary)
            end = replace(end, summary=summary if end.status == "done" else {})
        local = checkpoints_in(self._run_dir / CHECKPOINTS)
        last = [x.name for x in local if (x / MANIFEST).exists()][:1]
        last += [MODEL] if MODEL in self._results else []
        missing = [x for x in last if x not in self._results or self._results[x].error]
        if not missing:
            return end
        said = f"{' and '.join(missing)} of {self._run_dir} could not be copied to {self._to}"
        if end.status != "done":
            return replace(end, said=f"{end.said}\n{said}" if end.said else said)
        return replace(end, status="failed", said=said, reason=said, summary={})

    def _say(self, copied: Copied) -> None:
        """Print the outcome of a copy. An error of the store is printed once, until another error
        follows."""
        self._results[copied.name] = copied
        place = self._to / copied.name
        if not copied.error:
            size, seconds = in_bytes(copied.bytes), in_seconds(copied.seconds)
            line = Text(f"copied: {place} ({size} in {seconds})")
            self._console.print(Portable(line), soft_wrap=True)
        elif copied.error != self._said:
            self._said = copied.error
            said = f"warning: {copied.name} is not copied to {self._to}: {copied.error}"
            self._console.print(Text(said, style="yellow"), soft_wrap=True)

    def _work(self, step: int) -> None:
        """Run the thread: copy each queued path until the queue gives None.

        step: the step after which the run starts or continues. Later checkpoints in the store are
            removed.
        """
        shutil.rmtree(self._run_dir / CHECKPOINTS / HELD, ignore_errors=True)
        begun = False
        while (path := self._wanted.get()) is not None:
            started = time.monotonic()
            try:
                if run_of(self._to) != run_of(self._run_dir):
                    raise StoreError(f"{self._to}: another run has begun to copy to it")
                if not begun:
                    remove_after(self._to, step)
                    self._steps = prune(self._to, None)
                    begun = True
                size = self._copied(path)
            except Exception as error:  # a thread that ends would leave the others uncopied
                self._done.put(Copied(path.name, error=str(error).strip() or repr(error)))
            else:
                seconds = time.monotonic() - started
                self._done.put(None if size is None else Copied(path.name, size, seconds))

    def _copied(self, path: Path) -> int | None:
        """Copy a checkpoint or the trained weights, and return the size in bytes; None where the
        run has removed the checkpoint before its turn."""
        if path.name == MODEL:
            return copy_model(self._run_dir, self._to, self._count)
        held = hold(path)
        if held is None:
            return None
        try:
            size = copy_checkpoint(held, self._to / path.name, self._count)
        except FileNotFoundError:
            if path.exists():
                raise
            return None
        finally:
            release(held)
        copy_best(path.parent, self._to)
        self._steps = prune(self._to, self._keep)
        return size

    def _count(self, size: int) -> None:
        self._bytes += size
