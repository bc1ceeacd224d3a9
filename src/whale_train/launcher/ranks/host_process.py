"""Start the process of a host, wait for it, end it, and describe its failure: the parent's side.

The host (`runtime/process/fork_server.py`) starts and watches the ranks. The parent knows it by its
run directory, its exit status and `failure.json`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whale_train.disk import has_no_room
from whale_train.errors import LaunchError
from whale_train.launcher.ranks.early_host import HOST_PROGRAM, EarlyHost

EXPORT_PROGRAM = (sys.executable, "-m", "whale_train.runtime.process.export_host")
REHEARSE_PROGRAM = (sys.executable, "-m", "whale_train.runtime.rehearse.main")
HOST_LOG = "logs/host.log"
POLL_S = 0.1
# Seconds from SIGTERM to SIGKILL of all processes; more than a host gives its ranks.
STOP_GRACE_S = 5.0
INTERRUPTED = 130


@dataclass(frozen=True)
class RunFailure:
    """The failure of a run: the content of `failure.json`, as the host wrote it.

    rank: the rank that failed; None where the host itself did. For the kind `host`, the first rank
        of the host that failed.
    kind: `signal`, `exception`, `timeout`, `exit`, or `host` where all ranks of a host ended
        without a word.
    log: the log to read, relative to the run directory. Where `host` is given, it is in the run
        directory of that host.
    step: the optimizer step that was being computed.
    signal: the name of the signal, for the kind `signal`.
    exit_status: the exit status, for the kind `exit`.
    type: the type of the exception, for the kind `exception`.
    message: the message of the exception. For the kind `timeout`, the sentence that says what
        `rank` waited for, without its subject. For the kind `host`, a sentence that says that the
        ranks ended without a word.
    traceback: the traceback of the exception. For the kind `timeout`, the stack of the first absent
        rank where it was seen, else that of the waiting rank.
    absent: the ranks that `rank` waited for in vain, for the kind `timeout`.
    host: the name of the failed rank's host, where that has a run directory of its own.
    """

    rank: int | None
    kind: str
    log: str
    step: int | None = None
    signal: str | None = None
    exit_status: int | None = None
    type: str | None = None
    message: str | None = None
    traceback: str | None = None
    absent: tuple[int, ...] = ()
    host: str | None = None


@dataclass(frozen=True)
class HostOutcome:
    """The end of a run.

    status: `done`, `failed` or `interrupted`.
    failure: the failure of a run that failed; None for any other.
    """

    status: Literal["done", "failed", "interrupted"]
    failure: RunFailure | None = None


class HostProcess:
    """The running process of one host, the leader of a session of its own."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self._run_dir = run_dir
        self._process = process

    @classmethod
    def start(cls, run_dir: Path, program: Sequence[str] = HOST_PROGRAM) -> "HostProcess":
        """Start a host for a run directory made by `create_run_dir`. Returns at once.

        Call it from a thread that lives as long as the run: the host ends with the thread that
        started it. Every `start` needs a `wait` or a `stop`.
        """
        command = [*program, "--run-dir", str(run_dir.absolute()), "--parent", str(os.getpid())]
        with (run_dir / HOST_LOG).open("ab") as log:
            # Its own session: the terminal's Ctrl-C reaches only the parent, which then decides.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(run_dir, process)

    @classmethod
    def of(cls, run_dir: Path, early: EarlyHost | None) -> "HostProcess":
        """Take `early` for a run directory, or start a host where it cannot be taken."""
        process = early.take(run_dir.absolute()) if early is not None else None
        return cls.start(run_dir) if process is None else cls(run_dir, process)

    @property
    def pid(self) -> int:
        """Return the process id of the host."""
        return self._process.pid

    def wait(self, poll: Callable[[], None]) -> HostOutcome:
        """Wait for the run's end, calling `poll` ten times a second and once after it.

        Ctrl-C stops the run, a second one at once. No process is left, whatever happens.
        """
        try:
            while not self.has_ended:
                poll()
                time.sleep(POLL_S)
            poll()
        except KeyboardInterrupt:
            # The program that started the ranks ends them all when one has failed.
            failure = self._recorded()
            return HostOutcome("failed", failure) if failure else HostOutcome("interrupted")
        finally:
            self.stop()
        code = self._process.returncode
        if code == 0:
            return HostOutcome("done")
        if code == INTERRUPTED:
            return HostOutcome("interrupted")
        return HostOutcome("failed", self._failure(code))

    def stop(self) -> None:
        """End the host and all its processes. Does nothing where they have ended."""
        if self._process.returncode is not None:
            return
        with suppress(KeyboardInterrupt):
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_GRACE_S
            while not self.has_ended and time.monotonic() < deadline:
                time.sleep(POLL_S / 5)
        # The host is not reaped yet, so that the process group is still its own: the host, its
        # ranks, and the processes that they started (data workers, compilers).
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Return whether the host has ended. It is not reaped by that."""
        if self._process.returncode is not None:
            return True
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, look) is not None

    def _recorded(self) -> RunFailure | None:
        """Return the failure that the host wrote to `failure.json`, or None."""
        with suppress(FileNotFoundError):
            content = json.loads((self._run_dir / "failure.json").read_text(encoding="utf-8"))
            return RunFailure(**{**content, "absent": tuple(content["absent"])})
        return None

    def _failure(self, code: int) -> RunFailure:
        """Return the failure that the host wrote.

        Where the disk is full, the failure says so instead. Where the host wrote none, the failure
        is made from the exit status `code` of the host.
        """
        failure = self._recorded()
        full = has_no_room(self._run_dir)
        if full and (failure is None or failure.kind == "exit"):
            rank, log = (failure.rank, failure.log) if failure else (None, HOST_LOG)
            return RunFailure(rank, "exception", log, type=LaunchError.__name__, message=full)
        if failure:
            return failure
        if code < 0:
            return RunFailure(None, "signal", HOST_LOG, signal=signal.Signals(-code).name)
        return RunFailure(None, "exit", HOST_LOG, exit_status=code)


def describe_failure(failure: RunFailure, rank_place: str) -> str:
    """Return the message of a failed run: who failed, where in the plan, of what, and which log to
    read.

    failure: the failure.
    rank_place: the rank's place in the plan, such as `V100_SXM2_32GB, node 0, TaskGraphs 0 and 1`;
        '' where there was no plan yet. It is not shown where the host itself failed.
    """
    place = f" ({rank_place})" if rank_place else ""
    who = "the host process" if failure.rank is None else f"rank {failure.rank}{place}"
    when = "" if failure.step is None else f" at step {failure.step}"
    log = failure.log if failure.host is None else f"{failure.log}, on host {failure.host}"
    if failure.kind == "host":
        what = f"host {failure.host} failed{when}:\n{(failure.traceback or '').rstrip()}"
    elif failure.kind == "signal":
        what = f"{who} was killed by {failure.signal}{when}"
    elif failure.kind == "exit":
        what = f"{who} ended with exit status {failure.exit_status}{when}"
    elif failure.kind == "timeout":
        what = f"{who} {failure.message}\n{(failure.traceback or '').rstrip()}"
    elif failure.type == LaunchError.__name__:  # whose traceback would say nothing more
        what = f"{who} failed{when}: {failure.message}"
    else:
        what = f"{who} failed{when}:\n{(failure.traceback or '').rstrip()}"
    return f"{what}\nIts log: {log}"
