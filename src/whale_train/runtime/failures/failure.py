"""Record the failures of ranks, and choose the one that a run failed by.

A rank that fails leaves `logs/rank_N.failure.json`. When it ends, every other rank's collectives
break, and they fail too. `first_failure` distinguishes the cause from its echoes, and the host
writes it to `failure.json`, the only one of these files that the parent reads. This module does not
import torch.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whale_train.machine.hosts import Host
from whale_train.runtime.failures.timeouts import StackCall, Wait, find_hang, stack_text

FAILURE_FILE = "failure.json"
HOST_LOG = "logs/host.log"

# torch's own type for all errors between ranks. gloo raises bare RuntimeErrors, which are
# recognised by their text.
COMMUNICATION_TYPE = "torch.distributed.DistError"
COMMUNICATION_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connect timeout",
    "broken pipe",
)
TIMEOUT_TEXTS = ("timed out", "timeout")


class CollectiveTimeout(RuntimeError):
    """A wait of this rank timed out; `wait` describes it. The cause is torch's error."""

    def __init__(self, wait: Wait) -> None:
        super().__init__(str(wait))
        self.wait = wait


@dataclass(frozen=True)
class RankError:
    """The exception that a rank failed with (`logs/rank_N.failure.json`).

    rank: the rank.
    time_s: seconds since the epoch.
    type: the exception's class.
    message: the exception's text.
    communication: whether another rank's end may have caused it.
    step: as in `Failure`.
    traceback: the exception's traceback.
    wait: the wait that timed out; None for other exceptions.
    host: as in `Failure`.
    """

    rank: int
    time_s: float
    type: str
    message: str
    communication: bool
    step: int | None
    traceback: str
    wait: Wait | None = None
    host: str | None = None

    @classmethod
    def from_json(cls, text: str) -> "RankError":
        """Return the error in the `text` of a file."""
        content = json.loads(text)
        wait = content["wait"]
        return cls(**{**content, "wait": wait and Wait.from_json(wait)})


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's process.

    rank: the rank.
    code: its exit status, or minus the signal that killed it.
    time_s: seconds since the epoch, when the host noticed the end.
    """

    rank: int
    code: int
    time_s: float


@dataclass(frozen=True)
class Failure:
    """The failure that a run ended by (`failure.json`).

    rank: the rank that failed; None where the host itself failed.
    kind: `signal`, `exception`, `timeout`, `exit` or `host`. A `timeout` is a wait of `rank` for
        the ranks `absent`. `host` is the end of all ranks of a host without a report, of which
        `rank` is the first.
    log: the path of the log, relative to the run directory (of `host`, if that is given).
    step: the optimizer step in progress; None before the first one is done.
    signal: the signal's name, for a `signal`.
    exit_status: the exit status, for an `exit`.
    type: the exception's class, for an `exception`, a `timeout` or a `host`.
    message: the exception's text; for a `timeout` or a `host`, a sentence without its subject.
    traceback: the traceback of an exception. For a `timeout`, the stack of the first absent rank
        that was seen, else the waiting rank's.
    absent: the ranks that did not come, for a `timeout`.
    host: the host of `rank`, where every host has a run directory of its own.
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


def record_failure(
    run_dir: Path, rank: int, error: BaseException, step: int | None, host: str | None = None
) -> RankError:
    """Write a rank's failure to its own file, print the traceback to stderr (the rank's log), and
    return the record.

    A full disk prevents the file without an error.

    step: the step in progress, unless `error` has its own.
    host: the rank's host, where it has a run directory of its own.
    """
    wait = error.wait if isinstance(error, CollectiveTimeout) else None
    own = getattr(error if wait is None else wait, "step", None)
    record = RankError(
        rank=rank,
        time_s=time.time(),
        type=type(error).__qualname__,
        message=str(error),
        communication=is_communication_error(error),
        step=own if isinstance(own, int) else step,
        traceback="".join(traceback.format_exception(error)),
        wait=wait,
        host=host,
    )
    with suppress(OSError):  # a full disk
        write_record(run_dir / "logs" / f"rank_{rank}.failure.json", asdict(record))
    with suppress(OSError):
        sys.stderr.write(record.traceback)
    return record


def record_host_failure(run_dir: Path, error: BaseException) -> None:
    """Write a failure of the host itself, before it had ranks or outside of them, to `run_dir`."""
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # a full disk
        sys.stderr.write(text)
    failure = Failure(
        rank=None,
        kind="exception",
        log=HOST_LOG,
        type=type(error).__qualname__,
        message=str(error),
        traceback=text,
    )
    write_failure(run_dir, failure)


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Write the failure that a run ended by to `run_dir`.

    A full disk prevents it without an error. The launcher then reports that there is no file.
    """
    with suppress(OSError):
        write_record(run_dir / FAILURE_FILE, asdict(failure))


def read_errors(run_dir: Path) -> dict[int, RankError]:
    """Return the failures that ranks have recorded in `run_dir` so far, by rank."""
    files = (run_dir / "logs").glob("rank_*.failure.json")
    return {
        e.rank: e for e in (RankError.from_json(file.read_text(encoding="utf-8")) for file in files)
    }


def is_communication_error(error: BaseException) -> bool:
    """Return whether `error`, or an error it was raised `from`, may be the echo of another rank's
    end."""
    cause: BaseException | None = error
    while cause is not None:
        if _is_of_torch(cause) or isinstance(cause, ConnectionError) or is_timeout(cause):
            return True
        if type(cause) is RuntimeError and _says(cause, COMMUNICATION_TEXTS):
            return True
        cause = cause.__cause__
    return False


def is_timeout(error: BaseException) -> bool:
    """Return whether `error` itself may be the end of a wait for other ranks."""
    is_candidate = _is_of_torch(error) or type(error) is RuntimeError
    return is_candidate and _says(error, TIMEOUT_TEXTS)


def _is_of_torch(error: BaseException) -> bool:
    """Return whether `error` has torch's type for errors between ranks."""
    types = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
    return COMMUNICATION_TYPE in types


def _says(error: BaseException, texts: Sequence[str]) -> bool:
    """Return whether the text of `error` contains one of the lower-case `texts`, ignoring case."""
    message = str(error).lower()
    return any(text in message for text in texts)


def is_decisive(end: RankEnd) -> bool:
    """Return whether `end` is the cause, whatever other ranks report.

    An end by a signal is, unless the process aborted: communication libraries abort a process when
    a peer is lost.
    """
    return end.code < 0 and -end.code != signal.SIGABRT


def first_failure(
    ends: Iterable[RankEnd],
    errors: Mapping[int, RankError],
    step: int | None,
    stacks: Mapping[int, Sequence[StackCall]] | None = None,
) -> Failure:
    """Return the failure that caused the others.

    A decisive signal comes first, then any error that is not a communication error, then a
    timed-out wait, then other communication errors; the earliest of each.

    ends: the ranks that ended before any was told to, at least one of them badly.
    errors: the errors that ranks recorded.
    step: the step of a rank that could not record its own.
    stacks: the calls of ranks that have not ended.
    """
    end_of = {end.rank: end for end in ends}
    failed = {end.rank for end in end_of.values() if end.code != 0}
    failed |= errors.keys() - end_of.keys()

    def order(rank: int) -> tuple[int, float, int]:
        error = errors.get(rank)
        if error is not None:
            return (2 if error.communication else 1, error.time_s, rank)
        end = end_of[rank]
        return (0 if is_decisive(end) else 1, end.time_s, rank)

    rank = min(failed, key=order)
    log = f"logs/rank_{rank}.log"
    error = errors.get(rank)
    if error is not None:
        if error.communication and any(recorded.wait for recorded in errors.values()):
            return hang_among(errors, step, stacks or {})
        return Failure(
            rank,
            "exception",
            log,
            step=error.step,
            type=error.type,
            message=error.message,
            traceback=error.traceback,
            host=error.host,
        )
    code = end_of[rank].code
    if code < 0:
        return Failure(rank, "signal", log, step=step, signal=signal_name(-code))
    return Failure(rank, "exit", log, step=step, exit_status=code)


def hang_among(
    errors: Mapping[int, RankError],
    step: int | None,
    stacks: Mapping[int, Sequence[StackCall]],
) -> Failure:
    """Return the failure of ranks whose waits timed out, at least one of `errors`.

    The arguments are those of `first_failure`.
    """
    ordered = sorted(errors.values(), key=lambda error: (error.time_s, error.rank))
    waits = {error.rank: error.wait for error in ordered if error.wait is not None}
    hang = find_hang(waits, errors.keys() - waits.keys(), stacks, step)
    witness = errors[hang.rank]
    stack = next((stacks[rank] for rank in hang.absent if stacks.get(rank)), None)
    return Failure(
        hang.rank,
        "timeout",
        f"logs/rank_{hang.rank}.log",
        step=witness.step,
        type=witness.type,
        message=hang.message,
        traceback=stack_text(stack) if stack else witness.traceback,
        absent=hang.absent,
        host=witness.host,
    )


def failure_among(
    errors: Mapping[int, RankError],
    world_size: int,
    hosts: Sequence[Host] = (),
    living: Iterable[int] = (),
) -> Failure:
    """Return the failure that caused the others, where no host saw how the ranks ended.

    Ranks that recorded no error, and are not known to live, are silent. They are the cause, killed
    or cut off, if all errors are communication errors other than timed-out waits, and the silent
    ranks are a single one or all ranks of one of several `hosts`. Otherwise the failure is the
    `first_failure` of the errors.

    errors: the errors that ranks recorded, at least one.
    living: ranks that are known to live without an error.
    """
    silent = sorted(set(range(world_size)) - errors.keys() - set(living))
    lost_some = all(error.communication and not error.wait for error in errors.values())
    lost = next((host for host in hosts if len(hosts) > 1 and sorted(host.ranks) == silent), None)
    if not lost_some or not (lost or len(silent) == 1):
        return first_failure([], errors, None)
    witness = min(errors.values(), key=lambda error: (error.time_s, error.rank))
    message = "ended without a word: it was killed, or its host was cut off"
    if lost is not None:
        ranks = f"ranks {silent[0]} to {silent[-1]}" if silent[1:] else f"rank {silent[0]}"
        message = f"ended without a word, and {ranks} with it: it was killed, or cut off"
    return Failure(
        silent[0],
        "exception" if lost is None else "host",
        f"logs/rank_{silent[0]}.log",
        step=witness.step,
        type=witness.type,
        message=message,
        traceback=f"{message}; what rank {witness.rank} met:\n{witness.traceback}",
        host=None if lost is None else lost.name,
    )


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL` for 9. Real-time signals are named by
    number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def step_in_progress(run_dir: Path) -> int | None:
    """Return the step after the last one in `metrics.jsonl`.

    The result is None if there is no step yet, or the run's last step is done.
    """
    try:
        lines = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    # Text after the last newline is a line that is still being written.
    done = int(json.loads(lines[-2])["step"]) if len(lines) > 1 else None
    return None if done is None or done == _steps(run_dir) else done + 1


def _steps(run_dir: Path) -> int | None:
    """Return the number of steps of the request, or None if it is unknown."""
    with suppress(OSError, ValueError, KeyError):
        return int(
            json.loads((run_dir / "request.json").read_text(encoding="utf-8"))["train"]["steps"]
        )
    return None


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON atomically: a reader sees all of it or no file."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` atomically: a reader sees all of it or no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
