"""What ranks that somebody else started tell each other of their failures: their hosts may share no
files, and no process watches them all."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from whale_train.machine.hosts import read_hosts
from whale_train.runtime.base.job_key import JobKey
from whale_train.runtime.failures.failure import (
    FAILURE_FILE,
    RankError,
    failure_among,
    read_errors,
    write_record,
)

_ANY = "failures"  # the number of ranks that have failed
_WATCH_S = 0.3
# How long the others may take to say what they failed of, or that they live.
_SETTLE_S = 3.0
# From a failure of another rank's to the end of one that does not notice it.
_NOTICE_S = 5.0
# From the end of the store to that of a rank that notices no other end.
_LOST_S = 10.0


class FailureExchange:
    """The failures of a job of `world_size` ranks, in its store. A store that is gone says none:
    the process it lived in has ended."""

    def __init__(self, store: Store, key: JobKey, world_size: int) -> None:
        self._store, self._key, self._world_size = store, key, world_size

    def tell(self, error: RankError) -> None:
        """Tell the others of a rank's failure."""
        with suppress(dist.DistError):
            message = self._key.signed(json.dumps(asdict(error)))
            self._store.set(f"failed/{error.rank}", message)  # type: ignore[arg-type]
            self._store.add(_ANY, 1)

    def heard(self) -> dict[int, RankError]:
        """Return the failures that were told so far, by rank."""
        found = {}
        with suppress(dist.DistError):
            for rank in range(self._world_size):
                if self._store.check([f"failed/{rank}"]):
                    said = self._key.checked(self._store.get(f"failed/{rank}"), f"rank {rank}")
                    found[rank] = RankError.from_json(said)
        return found

    def living(self) -> set[int]:
        """Return the ranks that have said, after a failure, that they live."""
        with suppress(dist.DistError):
            ranks = range(self._world_size)
            return {rank for rank in ranks if self._store.check([f"lives/{rank}"])}
        return set()

    def settle(self, run_dir: Path) -> None:
        """Write what the run failed of, once the others had their time to say what they failed
        of."""
        deadline = time.monotonic() + _SETTLE_S
        errors, living = self._known(run_dir), self.living()
        while all(found.communication for found in errors.values()):
            if len(errors) == self._world_size or time.monotonic() > deadline:
                break
            time.sleep(_WATCH_S)
            errors, living = self._known(run_dir), self.living()
        with suppress(OSError):
            if errors and not (run_dir / FAILURE_FILE).exists():
                hosts = read_hosts(run_dir)
                failure = failure_among(errors, self._world_size, hosts, living)
                write_record(run_dir / FAILURE_FILE, asdict(failure))

    def watch(self, run_dir: Path, rank: int) -> Callable[[], None]:
        """Say after a failure of another rank's that `rank` lives, and end it, with status 1, some
        seconds later, as after the end of the store: where it waits for who does not come it may
        notice none for long. Returns what ends the watch."""
        over = threading.Event()
        # A connection of its own: a thread that waits for a key keeps the store to itself.
        connection: Store = self._store.clone()  # type: ignore[attr-defined]  # torch's stub has none
        own = FailureExchange(connection, self._key, self._world_size)
        watching = threading.Thread(target=own._watch, args=(run_dir, rank, over), daemon=True)
        watching.start()
        return over.set

    def _watch(self, run_dir: Path, rank: int, over: threading.Event) -> None:
        notice_s = _NOTICE_S
        try:
            while not self._store.check([_ANY]):
                if over.wait(_WATCH_S):
                    return
            self._store.set(f"lives/{rank}", "")
        except dist.DistError:  # the store ended, and rank 0 or who started the ranks with it
            notice_s = _LOST_S
        if not over.wait(notice_s):
            self.settle(run_dir)
            os._exit(1)

    def _known(self, run_dir: Path) -> dict[int, RankError]:
        """Return the failures that were told, and those that are in files alone."""
        return {**self.heard(), **read_errors(run_dir)}
