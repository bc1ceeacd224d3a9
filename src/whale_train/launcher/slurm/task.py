"""Run as the task of each rank of a job of Slurm: start the command, and heed Slurm's signals.

    python -m whale_train.launcher.slurm.task --folder=FOLDER [--notice=requeue] -- ARGUMENTS

Slurm sends SIGUSR2 before it takes the nodes away. Rank 0's task then has the command save and end
(SIGUSR1), and the job queued again (`scontrol requeue`) or ended. SIGTERM is passed on. A job that
runs again continues from its newest checkpoint. Rank 0's task writes the exit status of its command
into `FOLDER/JOB.status`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_POLL_S = 0.2
_ANSWER_S = 60.0  # how long scontrol may take
_INTERRUPTED = 130  # the exit status of a command that has saved and ended
# The status of a command that did not listen yet, or not any more: it had nothing to save, or was
# done. When the job runs again, it goes on from its newest checkpoint, if it has one.
_DEAF = -signal.SIGUSR1
_MOST_RESTARTS = 1000  # of a job that may never come as far as a checkpoint
_RESUMES = "train.resume="


@dataclass(frozen=True)
class TaskOptions:
    """How a task runs its command.

    folder: the folder of the job's files.
    notice: the answer to SIGUSR2. `requeue` has the job save, and queued again; `end` has it save
        and end; `ignore` does nothing, for a job that cannot save.
    grace_s: seconds after which a job is queued again whose command has not saved.
    log: the file that the output of rank 0's command is appended to; None for the task's own.
    """

    folder: Path
    notice: str = "ignore"
    grace_s: float = 0.0
    log: Path | None = None


def main() -> None:
    """Run the command of this task, and exit."""
    parser = argparse.ArgumentParser(prog="python -m whale_train.launcher.slurm.task")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--notice", choices=("ignore", "end", "requeue"), default="ignore")
    parser.add_argument("--grace-s", type=float, default=0.0)
    parser.add_argument("--log", type=Path)
    parser.add_argument(
        "--commands", type=Path, help="JSON: the arguments of each task of an array"
    )
    parser.add_argument("arguments", nargs="*")
    given = parser.parse_args()
    arguments = given.arguments
    if given.commands is not None:
        commands = json.loads(given.commands.read_text(encoding="utf-8"))
        arguments = commands[int(os.environ["SLURM_ARRAY_TASK_ID"])]
    options = TaskOptions(given.folder, given.notice, given.grace_s, given.log)
    sys.exit(run_task(options, arguments, os.environ))


def run_task(
    options: TaskOptions,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    program: Sequence[str] = (sys.executable, "-m", "whale_train.launcher.cli"),
) -> int:
    """Run the command until it ends, and return the exit status of the task.

    arguments: command-line arguments of the job.
    variables: the environment of the task.
    program: the program of the command.
    """
    is_first = variables.get("SLURM_PROCID", "0") == "0"
    restarts = int(variables.get("SLURM_RESTART_COUNT") or 0)
    status_path = options.folder / f"{job_id_of(variables)}.status"
    if is_first:
        status_path.unlink(missing_ok=True)
    # The command inherits that SIGUSR2 is ignored, since the signal would end it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with _output(options.log if is_first else None) as output:
        command = subprocess.Popen(
            (*program, *with_resume(arguments, restarts)),
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
    # Only rank 0 heeds SIGUSR2. Another rank's command may not handle signals yet, and rank 0's
    # tells all others.
    heard = _signals_heard(listens=is_first and options.notice != "ignore")
    is_told = _follow(command, heard, options)
    if not is_first:
        command.wait()
        return 0  # the status of a job is rank 0's
    has_saved = is_told and command.poll() in (None, _INTERRUPTED, _DEAF)  # None: it never will
    requeues = options.notice == "requeue" and restarts < _MOST_RESTARTS
    if has_saved and requeues and _requeue(variables):
        return 0
    status = command.wait()
    if is_told and status == _DEAF:
        status = _INTERRUPTED
    _write(status_path, f"{status}\n")
    # Other ranks of a job that is not queued again would be ended with the first bad exit.
    return 0 if options.notice == "end" else status if status >= 0 else 1


def _signals_heard(*, listens: bool) -> list[int]:
    """Handle SIGTERM from here on, and return the list that every signal is appended to.

    listens: whether SIGUSR2 is handled as well.
    """
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2) if listens else (signal.SIGTERM,):
        signal.signal(number, lambda number, frame: heard.append(number))
    return heard


def _follow(command: "subprocess.Popen[bytes]", heard: list[int], options: TaskOptions) -> bool:
    """Pass signals on until the command has ended, or has been told to and has had its time.

    heard: signals, in the order of arrival, which are removed.

    Returns whether the command has been told to save and end.
    """
    told_s: float | None = None
    while command.poll() is None:
        requeues = told_s is not None and options.notice == "requeue"
        if requeues and time.monotonic() - (told_s or 0.0) > options.grace_s:
            break
        while heard:
            if heard.pop(0) == signal.SIGTERM:
                command.send_signal(signal.SIGTERM)
            elif told_s is None:  # a second notice would end the command unsaved
                command.send_signal(signal.SIGUSR1)
                told_s = time.monotonic()
        time.sleep(_POLL_S)
    return told_s is not None


def job_id_of(variables: Mapping[str, str]) -> str:
    """Return the id of a task's job, as `squeue --array` prints it."""
    if "SLURM_ARRAY_JOB_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def with_resume(arguments: Sequence[str], restarts: int) -> list[str]:
    """Return the arguments of a job that Slurm has started `restarts` times before: from the second
    start on, they continue from the newest checkpoint."""
    if not restarts:
        return list(arguments)
    others = [text for text in arguments if not text.lstrip("+").startswith(_RESUMES)]
    return [*others, f"{_RESUMES}auto"]


def _requeue(variables: Mapping[str, str]) -> bool:
    """Have Slurm queue the job again, and return whether it does."""
    try:
        done = subprocess.run(
            ["scontrol", "requeue", variables["SLURM_JOB_ID"]],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"warning: the job is not queued again ({error})\n")
        return False
    if done.returncode:
        sys.stderr.write(f"warning: the job is not queued again ({done.stderr.strip()})\n")
    return not done.returncode


@contextmanager
def _output(log: Path | None) -> Iterator[IO[bytes] | None]:
    """Yield the file for the command's output, or None for this program's own."""
    if log is None:
        yield None
        return
    with log.open("ab") as file:
        yield file


def _write(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the text, or no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
