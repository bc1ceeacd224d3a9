"""Exchange failures between ranks that were started by another tool than this launcher.

Their hosts may share no files, and no process watches them all.
"""

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

from whale_train.errors import LaunchError
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
# The time for other ranks to publish their failures, or to report that they are alive.
_SETTLE_S = 3.0
# The time from another rank's failure to the end of a rank that does not notice it.
_NOTICE_S = 5.0
# The time from the end of the store to the end of a rank that notices nothing else.
_LOST_S = 10.0


class FailureExchange:
    """The failures of a job of `world_size` ranks, exchanged through its store.

    If the store is gone because its process has ended, no failures are read.
    """

    def __init__(self, store: Store, key: JobKey, world_size: int) -> None:
        self._store, self._key, self._world_size = store, key, world_size

    def tell(self, error: RankError) -> None:
        """Publish a rank's failure to the others."""
        with suppress(dist.DistError):
            message = self._key.signed(json.dumps(asdict(error)))
            self._store.set(f"failed/{error.rank}", message)  # type: ignore[arg-type]
            self._store.add(_ANY, 1)

    def heard(self) -> dict[int, RankError]:
        """Return the failures that were published so far, by rank.

        A failure that no rank of this job signed is ignored.
        """
        errors = {}
        with suppress(dist.DistError):
            for rank in range(self._world_size):
                if self._store.check([f"failed/{rank}"]):
                    message = self._store.get(f"failed/{rank}")
                    with suppress(LaunchError):
                        text = self._key.checked(message, f"rank {rank}")
                        errors[rank] = RankError.from_json(text)
        return errors

    def living(self) -> set[int]:
        """Return the ranks that have reported, after a failure, that they are alive; empty without
        a store."""
        with suppress(dist.DistError):
            ranks = range(self._world_size)
            return {rank for rank in ranks if self._store.check([f"lives/{rank}"])}
        return set()

    def settle(self, run_dir: Path) -> None:
        """Write the failure that the run ended by to `run_dir`, unless it is written already.

        Before that, wait for the cause: until a failure is known that is not a communication error,
        all ranks have failed, or three seconds have passed.
        """
        deadline = time.monotonic() + _SETTLE_S
        errors, living = self._known(run_dir), self.living()
        while all(error.communication for error in errors.values()):
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
        """Start a thread that ends this process after a failure of another rank, or after the end
        of the store.

        After a failure the thread reports that `rank` is alive. Five seconds after a failure, and
        ten after the end of the store, it settles the cause (`settle`) and ends the process with
        status 1: a rank that waits for another may not notice a failure for long. Returns a
        function that stops the watch.
        """
        over = threading.Event()
        # The thread has a connection of its own, as a thread that waits for a key blocks the store.
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
        except dist.DistError:  # the store ended, with rank 0 or the process that started the ranks
            notice_s = _LOST_S
        if not over.wait(notice_s):
            self.settle(run_dir)
            os._exit(1)

    def _known(self, run_dir: Path) -> dict[int, RankError]:
        """Return the failures that were published or recorded in files, by rank."""
        return {**self.heard(), **read_errors(run_dir)}
