"""Start a host process, wait for it, end it, and describe its failure.

The host (`runtime/process/fork_server.py`) starts and watches the ranks. The parent process, in
which this file runs, learns the outcome from the exit status and `failure.json`.
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
# Seconds from SIGTERM to SIGKILL of all processes; longer than a host gives its ranks.
STOP_GRACE_S = 5.0
INTERRUPTED = 130


@dataclass(frozen=True)
class RunFailure:
    """The failure of a run: the content of `failure.json`, which the host writes.

    rank: the rank that failed; None where the host process itself failed. For the kind `host`, the
        first rank of the failed host.
    kind: `signal`, `exception`, `timeout`, `exit`, or `host` where all ranks of a host ended
        without reporting a reason.
    log: the path of the log to read, relative to the run directory, or to the run directory of
        `host` if that is given.
    step: the optimizer step that was being computed.
    signal: the name of the signal, for the kind `signal`.
    exit_status: the exit status, for the kind `exit`.
    type: the type of the exception, for the kind `exception`.
    message: the message of the exception. For the kind `timeout`, a sentence without its subject on
        what `rank` waited for. For the kind `host`, a sentence that says that the ranks ended
        without a reason.
    traceback: the traceback of the exception. For the kind `timeout`, the stack of the first absent
        rank if it is known, else the stack of the waiting rank.
    absent: for the kind `timeout`, the ranks that `rank` waited for in vain.
    host: the name of the failed rank's host, if that host has a run directory of its own.
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
    """The outcome of a run.

    status: `done`, `failed` or `interrupted`.
    failure: the failure of a failed run; None for any other status.
    """

    status: Literal["done", "failed", "interrupted"]
    failure: RunFailure | None = None


class HostProcess:
    """The running process of one host, which leads a session of its own."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self._run_dir = run_dir
        self._process = process

    @classmethod
    def start(cls, run_dir: Path, program: Sequence[str] = HOST_PROGRAM) -> "HostProcess":
        """Start a host for a run directory made by `create_run_dir`, and return at once.

        The calling thread must live as long as the run, since the host ends with the thread that
        started it. Every `start` needs a `wait` or a `stop`.
        """
        command = [*program, "--run-dir", str(run_dir.absolute()), "--parent", str(os.getpid())]
        with (run_dir / HOST_LOG).open("ab") as log:
            # In a session of its own the host gets no Ctrl-C from the terminal. The parent decides.
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
        """Return the host of a run directory: `early` if it can be taken, else a newly started
        one."""
        process = early.take(run_dir.absolute()) if early is not None else None
        return cls.start(run_dir) if process is None else cls(run_dir, process)

    @property
    def pid(self) -> int:
        """Return the process id of the host."""
        return self._process.pid

    def wait(self, poll: Callable[[], None]) -> HostOutcome:
        """Wait for the end of the run, and return the outcome.

        poll: called ten times a second, and once after the end; raises KeyboardInterrupt to stop
            the run.

        Ctrl-C stops the run, and a second Ctrl-C kills it. No process is left in any case.
        """
        try:
            while not self.has_ended:
                poll()
                time.sleep(POLL_S)
            poll()
        except KeyboardInterrupt:
            # The program that started the ranks interrupts all of them when one has failed.
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
        """End the host and all its processes. Do nothing if the host was waited for already."""
        if self._process.returncode is not None:
            return
        with suppress(KeyboardInterrupt):
            os.kill(self.pid, signal.SIGTERM)
            deadline = time.monotonic() + STOP_GRACE_S
            while not self.has_ended and time.monotonic() < deadline:
                time.sleep(POLL_S / 5)
        # The host is not reaped yet, so its id still names its process group: the host, the ranks,
        # and the processes that they started (data workers, compilers).
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        """Return whether the host has ended, without reaping it."""
        if self._process.returncode is not None:
            return True
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, look) is not None

    def _recorded(self) -> RunFailure | None:
        """Return the failure in `failure.json`; None where the host wrote none."""
        with suppress(FileNotFoundError):
            content = json.loads((self._run_dir / "failure.json").read_text(encoding="utf-8"))
            return RunFailure(**{**content, "absent": tuple(content["absent"])})
        return None

    def _failure(self, code: int) -> RunFailure:
        """Return the failure of a failed run.

        The failure is the one that the host wrote, or is made from the host's exit status `code` if
        the host wrote none. On a full disk, a failure without an exception names the disk instead.
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
    """Return the message on a failed run: the process that failed, its place in the plan, the
    reason, and the log to read.

    failure: the failure.
    rank_place: the rank's place in the plan, such as `V100_SXM2_32GB, node 0, TaskGraphs 0 and 1`;
        '' without a plan. It is not shown for a failure of the host itself.
    """
    place = f" ({rank_place})" if rank_place else ""
    who = "the host process" if failure.rank is None else f"rank {failure.rank}{place}"
    when = "" if failure.step is None else f" at step {failure.step}"
    log = failure.log if failure.host is None else f"{failure.log}, on host {failure.host}"
    if failure.kind == "host":
        reason = f"host {failure.host} failed{when}:\n{(failure.traceback or '').rstrip()}"
    elif failure.kind == "signal":
        reason = f"{who} was killed by {failure.signal}{when}"
    elif failure.kind == "exit":
        reason = f"{who} ended with exit status {failure.exit_status}{when}"
    elif failure.kind == "timeout":
        reason = f"{who} {failure.message}\n{(failure.traceback or '').rstrip()}"
    elif failure.type == LaunchError.__name__:  # its message says all, without the traceback
        reason = f"{who} failed{when}: {failure.message}"
    else:
        reason = f"{who} failed{when}:\n{(failure.traceback or '').rstrip()}"
    return f"{reason}\nIts log: {log}"
