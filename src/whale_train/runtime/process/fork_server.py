"""Serve one host: import once, fork the host's ranks, and end them together.

    python -m whale_train.runtime.process.fork_server [--run-dir DIR] --parent PID

The parent starts the server as soon as a run is likely, so that imports overlap with composing the
config and resolving the plan. Without `--run-dir`, the parent writes the run directory to the
server's stdin and closes it. Once the parent has put `ready` into the run directory, the server
forks the ranks, each logging to `logs/rank_N.log`, and waits for them. The first rank that ends
badly ends all.

Exit status: 0 all ranks done; 1 failed (`failure.json` gives the reason); 130 told to stop by
SIGTERM, SIGINT or the parent's death. Ranks never outlive the server.
"""

import argparse
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from whale_train.imports import importing
from whale_train.machine.hosts import REFUSED
from whale_train.machine.parents import STOPPED, end_with_parent
from whale_train.runtime.cpu.threads import num_threads, set_num_threads
from whale_train.runtime.engines.swap_folder import remove_unowned_of
from whale_train.runtime.failures.failure import (
    HOST_LOG,
    RankEnd,
    RankError,
    first_failure,
    is_decisive,
    read_errors,
    record_failure,
    record_host_failure,
    step_in_progress,
    write_failure,
)
from whale_train.runtime.failures.timeouts import StackCall, read_stack, read_watchdog
from whale_train.runtime.process.preload import preload_torch
from whale_train.strategies.plan.plan import Plan

Prepared = TypeVar("Prepared")

READY_DEADLINE_S = 3600.0
POLL_S = 0.02
# The time for other ranks' failures to arrive before the cause is named.
SETTLE_S = 1.0
# The time between SIGTERM and SIGKILL.
GRACE_S = 2.0

# A rank that gets this signal writes its stack to its log, even where Python cannot run.
STACK_SIGNAL = signal.SIGUSR2
STACK_S = 0.5

# The launcher's signal to save and end. Slurm may send it to all processes of a job.
LAUNCHERS_SIGNAL = signal.SIGUSR1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

PR_SET_NAME = 15  # from Linux's <sys/prctl.h>


class StopRequest:
    """A request to stop the host, made by a signal or by the death of the process `parent`."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._signalled = False

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """Record that one of STOP_SIGNALS has arrived."""
        self._signalled = True

    @property
    def made(self) -> bool:
        """Return True once the request is made."""
        return self._signalled or os.getppid() != self._parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of this module, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m whale_train.runtime.process.fork_server")
    parser.add_argument("--run-dir", type=Path, help="default: read from stdin")
    parser.add_argument("--parent", type=int, required=True, help="end with this process")
    options = parser.parse_args(arguments)
    for number in STOP_SIGNALS:
        signal.signal(number, stop_before_ranks)
    signal.signal(LAUNCHERS_SIGNAL, signal.SIG_IGN)
    end_with_parent(options.parent, signal.SIGTERM)
    assigned = AssignedRunDir(options.run_dir)
    try:
        preload_torch()
        with importing():
            from whale_train.config import Request
            from whale_train.runtime.process import rank_main as worker

        run_dir = assigned.wait()
        request = Request.from_json((run_dir / "request.json").read_text(encoding="utf-8"))
        prepared = worker.prepare(request)
        wait_until_ready(run_dir, options.parent)
        world_size = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["world_size"]
        try:
            return serve(
                run_dir,
                world_size,
                lambda: worker.complete(run_dir, prepared),
                worker.run_rank,
                options.parent,
                worker.forget,
            )
        finally:
            remove_unowned_of(run_dir)
    except Exception as error:
        record_host_failure(assigned.wait(), error)
        return 1


class AssignedRunDir:
    """The run directory of this host.

    It is given at the start of the process, or the parent writes it to stdin and closes stdin.
    Until then, the output of the process and its libraries goes to an unnamed file.
    """

    def __init__(self, given: Path | None) -> None:
        self._run_dir = given
        if given is not None:
            return
        self._said, path = tempfile.mkstemp(prefix="whale-train-")
        os.unlink(path)
        send_output_to(self._said)

    def wait(self) -> Path:
        """Wait for the run directory, and return it. Exits the process if the parent gives none.

        After it, stdin is empty, and all output goes to the host's log.
        """
        if self._run_dir is not None:
            return self._run_dir
        with open(0, "rb", closefd=False) as stdin:
            path = stdin.read()
        if not path:
            os._exit(STOPPED)
        self._run_dir = Path(os.fsdecode(path))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.stdout.flush()
        sys.stderr.flush()
        with (self._run_dir / HOST_LOG).open("ab") as log:
            log.write(os.pread(self._said, os.fstat(self._said).st_size, 0))
            log.flush()
            send_output_to(log.fileno())
        os.close(self._said)
        return self._run_dir


def send_output_to(file: int) -> None:
    """Send stdout and stderr, also of child processes and C libraries, to an open file."""
    for stream in (1, 2):
        os.dup2(file, stream)


def stop_before_ranks(number: int, frame: FrameType | None) -> None:
    """Exit with status STOPPED, after ending the process group, in which compilers may be running.

    This is the handler of STOP_SIGNALS before ranks exist.
    """
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpid(), signal.SIGTERM)
    os._exit(STOPPED)


def wait_until_ready(run_dir: Path, parent: int) -> bool:
    """Wait for the launcher's decision; return True for a plan, False for a refused request.

    The decision is the file `ready`, or the file named REFUSED, in the run directory. Exits the
    process when the parent ends. Raises TimeoutError after READY_DEADLINE_S.
    """
    deadline = time.monotonic() + READY_DEADLINE_S
    while not (run_dir / "ready").exists():
        if (run_dir / REFUSED).exists():
            return False
        if os.getppid() != parent:
            sys.exit(STOPPED)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no plan was ready within {READY_DEADLINE_S:.0f} s")
        time.sleep(POLL_S)
    return True


def serve(
    run_dir: Path,
    world_size: int,
    prepare: Callable[[], Prepared],
    entry: Callable[[Path, int, int, Prepared], None],
    parent: int,
    forget: Callable[[Prepared], None] | None = None,
) -> int:
    """Fork `world_size` ranks, wait for them, and return the host's exit status.

    `prepare()` is called once in this process. Every rank inherits its result, and runs
    `entry(run_dir, rank, world_size, prepared)`. After the forks this process calls
    `forget(prepared)`. The ranks may use `run_dir/rendezvous` for their file store. A rank leaves
    by `os._exit`: `entry` must close everything that it opens, as no atexit handler runs.
    """
    prepared = prepare()
    # Ranks share the host's pages until one writes to them, as the garbage collector does.
    gc.freeze()
    rendezvous = run_dir / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    stop = StopRequest(parent)
    living: dict[int, int] = {}
    # A stop signal that arrives while forking is delivered when all ranks exist and are in
    # `living`.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:
        signal.signal(number, stop.signalled)
    try:
        host = os.getpid()
        for rank in range(world_size):
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                become_rank(run_dir, rank, world_size, prepared, entry, host)
            living[pid] = rank
        if forget is not None:
            forget(prepared)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        ends = watch(living, stop)
        if any(end.code != 0 for end in ends):
            step = step_in_progress(run_dir)
            errors = read_errors(run_dir) | aborted_waits(run_dir, ends, step)
            hung = any(error.wait for error in errors.values())
            stacks = ask_for_stacks(run_dir, living) if hung else {}
            failure = first_failure(ends, errors, step, stacks)
            write_failure(run_dir, failure)
            return 1
        return STOPPED if living else 0
    finally:
        end_ranks(living)
        rendezvous.unlink(missing_ok=True)


def watch(living: dict[int, int], stop: StopRequest) -> list[RankEnd]:
    """Wait until all ranks have ended, one has ended badly, or a stop is requested.

    `living` maps pids to ranks; ranks that have ended are removed from it and returned. After a bad
    end the others have SETTLE_S to record their failures, unless the bad end is decisive.
    """
    ends: list[RankEnd] = []
    deadline: float | None = None
    while living:
        ended = reap(living)
        ends += ended
        if any(is_decisive(end) for end in ended):
            break
        if deadline is None and any(end.code != 0 for end in ended):
            deadline = time.monotonic() + SETTLE_S
        if stop.made or (deadline is not None and time.monotonic() > deadline):
            break
        if living:
            time.sleep(POLL_S)
    return ends


def ask_for_stacks(run_dir: Path, living: dict[int, int]) -> dict[int, tuple[StackCall, ...]]:
    """Return the stack of each living rank, the innermost call first.

    A stack is empty if the rank does not write it within STACK_S.
    """
    logs = {rank: run_dir / "logs" / f"rank_{rank}.log" for rank in living.values()}
    read = {rank: log.stat().st_size for rank, log in logs.items()}
    for pid in living:
        os.kill(pid, STACK_SIGNAL)  # the pid is not reaped, so it is still that rank's
    time.sleep(STACK_S)
    dumps = {rank: log.read_bytes()[read[rank] :] for rank, log in logs.items()}
    return {rank: read_stack(text.decode(errors="replace")) for rank, text in dumps.items()}


def aborted_waits(run_dir: Path, ends: Sequence[RankEnd], step: int | None) -> dict[int, RankError]:
    """Return the errors of ranks that NCCL's watchdog aborted, read from their logs."""
    errors = {}
    for end in ends:
        if end.code != -signal.SIGABRT:
            continue
        plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
        log = (run_dir / "logs" / f"rank_{end.rank}.log").read_text(
            errors="replace", encoding="utf-8"
        )
        wait = read_watchdog(log, plan, end.rank, step)
        if wait is not None:
            fields = (str(wait), True, step, str(wait))
            errors[end.rank] = RankError(end.rank, end.time_s, "CollectiveTimeout", *fields, wait)
    return errors


def reap(living: dict[int, int]) -> list[RankEnd]:
    """Remove the ranks that have ended from `living`, without waiting, and return their ends."""
    ends = []
    for pid in list(living):
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            code = os.waitstatus_to_exitcode(status)
            ends.append(RankEnd(living.pop(pid), code, time.time()))
    return ends


def end_ranks(living: dict[int, int]) -> None:
    """End all ranks of `living` by SIGTERM, then by SIGKILL after GRACE_S, and wait for them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # A pid in `living` is not reaped, so it is still that rank's.
        for pid in living:
            os.kill(pid, number)
        deadline = time.monotonic() + GRACE_S
        while living and (number == signal.SIGKILL or time.monotonic() < deadline):
            reap(living)
            time.sleep(POLL_S)


def become_rank(
    run_dir: Path,
    rank: int,
    world_size: int,
    prepared: Prepared,
    entry: Callable[[Path, int, int, Prepared], None],
    host: int,
) -> NoReturn:
    """Run as rank `rank` of the host, in the process just forked for it; never return."""
    status = 1
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        signal.signal(LAUNCHERS_SIGNAL, signal.SIG_IGN)
        end_with_parent(host, signal.SIGKILL)
        name_process(f"whale-rank-{rank}")
        log_to(run_dir / "logs" / f"rank_{rank}.log")
        faulthandler.register(STACK_SIGNAL, file=2)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        set_num_threads(num_threads(world_size))
        entry(run_dir, rank, world_size, prepared)
        status = 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            sys.stderr.write(f"{leaving.code}\n")
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        # This function's own frame says nothing about the failure.
        below = error.__traceback__ and error.__traceback__.tb_next
        try:
            step = step_in_progress(run_dir)
            record_failure(run_dir, rank, error.with_traceback(below), step)
        except BaseException:
            traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def log_to(path: Path) -> None:
    """Send all output to `path`, as `send_output_to` does."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    send_output_to(log)
    os.close(log)
    # The stream objects stay, as loggers made before the fork hold them. They are line-buffered, so
    # that the output of a killed rank is complete.
    for stream_object in (sys.stdout, sys.stderr):
        stream_object.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def name_process(name: str) -> None:
    """Show this process as `name` (15 bytes at most) in ps and top."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
