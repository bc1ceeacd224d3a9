"""Make the run directory, and write the parent process's files into it.

Every run has one directory. Hydra has made it, with `.hydra/` and the job log, before our code
starts. The parent writes `request.json`, `environment.json`, `plan.json` (`plans/` for a
comparison) and finally `ready`, if ranks wait for it. The ranks write all other files.
"""

import fcntl
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from whale_train.checkpoints.checkpoint_files import SAVED, STOP, unfinished_in
from whale_train.disk import writing
from whale_train.errors import ConfigError, Fault
from whale_train.machine.hosts import HOSTS, MEETING, REFUSED

PLANS = "plans"  # a folder with a plan for each strategy of a comparison
METRICS = "metrics.jsonl"
LOGS = "logs"  # a folder of every run directory
# A directory with any of these files holds a run.
RUN_FILES = ("request.json", "plan.json", METRICS, "ready", "failure.json", PLANS)
ATTEMPTS = "attempts"  # a folder with the files of earlier attempts, in 1, 2, ...
# The files that one attempt of a run writes.
ATTEMPT_FILES = (
    *("request.json", "environment.json", "plan.json", "launch.json", "ready", STOP),
    *("failure.json", "strategy.yaml", "predicted_trace.json", "trace.json", "summary.json"),
    *(SAVED, MEETING, HOSTS, REFUSED, "inventory.yaml", "report.html"),
)

# The packages whose versions may change the results of a run.
PACKAGES = (
    "whale-train",
    "torch",
    "deepspeed",
    "transformers",
    "safetensors",
    "numpy",
    "hydra-core",
    "omegaconf",
    "pydantic",
)


def create_run_dir(path: Path, *, goes_on: bool = False) -> Path:
    """Make `path` a run directory with a folder `logs/`, and return the absolute path.

    goes_on: whether to continue a run that the directory may hold. The files of that run's last
        attempt are then moved to a folder of their own.

    Raises ConfigError where the directory holds another run, or cannot be made.
    """
    run_dir = path.absolute()
    if goes_on:
        _set_aside(run_dir)
    taken = taken_by(run_dir, "hydra.run.dir", str(path))
    if taken is not None and not goes_on:
        raise ConfigError([taken])
    try:
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            [
                Fault(
                    "hydra.run.dir",
                    str(path),
                    f"cannot be made a run directory ({reason})",
                    "name a directory that can be written",
                )
            ]
        ) from error
    return run_dir


class RunDirInUse(ConfigError):
    """The error of a run directory in which another command is training."""


@contextmanager
def in_use(run_dir: Path) -> Iterator[None]:
    """Lock a run directory within the context, so that no other command trains in it.

    The lock is needed since a queue may start a command with train.resume=auto twice. Raises
    RunDirInUse where another command has the lock. A file system without locks has no protection.
    """
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule, remedy = "is used by another run now", "wait for its end, or name another"
            raise RunDirInUse([Fault("hydra.run.dir", str(run_dir), rule, remedy)]) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(directory)


def taken_by(run_dir: Path, key: str, shown: str, *, can_go_on: bool = True) -> Fault | None:
    """Return the fault of a directory that holds a run, or None.

    key, shown: the config key of the directory and its value, for messages.
    can_go_on: whether the request is of a mode that goes on with runs.
    """
    held = next((name for name in RUN_FILES if (run_dir / name).exists()), None)
    if held is None:
        return None
    remedy = "name one that does not exist yet"
    if can_go_on:
        remedy += ", or go on with its run by train.resume=auto"
    return Fault(key, shown, f"already holds a run ({held})", remedy)


def _set_aside(run_dir: Path) -> None:
    """Move the files of the last attempt in `run_dir` into a folder of their own.

    Checkpoints and weights that the attempt left incomplete are removed. Metrics and whole
    checkpoints stay, since they belong to the run.
    """
    for path in unfinished_in(run_dir):
        shutil.rmtree(path, ignore_errors=True)
    names = [name for name in (*ATTEMPT_FILES, LOGS) if (run_dir / name).exists()]
    if "request.json" not in names:
        return
    number = len(list((run_dir / ATTEMPTS).glob("*"))) + 1
    folder = run_dir / ATTEMPTS / str(number)
    folder.mkdir(parents=True)
    for name in names:
        (run_dir / name).rename(folder / name)
    if (run_dir / METRICS).exists():
        shutil.copy(run_dir / METRICS, folder / METRICS)


def keep_steps(run_dir: Path, step: int) -> int:
    """Remove the metrics after `step`, the optimizer step from which the run continues.

    Returns the size of the remaining file in bytes; 0 without a file.
    """
    path = run_dir / METRICS
    if not path.exists():
        return 0
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        with suppress(ValueError, KeyError):  # for a line cut off by the end of an attempt
            if json.loads(line)["step"] <= step:
                lines.append(line)
    write_text(path, "".join(lines))
    return path.stat().st_size


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the whole text, the file before, or no file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path, len(text.encode())):
        try:
            partial.write_text(text, encoding="utf-8")
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Write plain data as JSON, atomically. Raises ValueError for NaN and infinities, which JSON
    cannot express."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def mark_ready(run_dir: Path) -> None:
    """Write `ready`, which tells waiting hosts that all their files are written."""
    write_text(run_dir / "ready", "")


def write_environment(run_dir: Path) -> None:
    """Write `environment.json`: the versions of packages and the machine of the run. No package is
    imported."""
    write_json(
        run_dir / "environment.json",
        {
            "python": platform.python_version(),
            "executable": sys.executable,
            "packages": {name: installed_version(name) for name in PACKAGES},
            "platform": platform.platform(),
            "hostname": socket.gethostname(),
            "cpu_count": os.cpu_count(),
        },
    )


def installed_version(package: str) -> str | None:
    """Return the installed version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def remove_unused(run_dir: Path) -> None:
    """Remove the files and the directory of a refused job, unless the directory holds a run."""
    if any((run_dir / name).exists() for name in RUN_FILES if name not in _MADE_BEFORE_A_PLAN):
        return
    working = Path.cwd()
    above = (parent for parent in run_dir.absolute().parents if working in parent.parents)
    with suppress(OSError):  # a folder with other files stays
        for name in _MADE_BEFORE_A_PLAN:
            (run_dir / name).unlink(missing_ok=True)
        for folder in (run_dir / LOGS, run_dir / ".hydra", run_dir.absolute(), *above):
            if folder.is_dir() and folder != working:
                folder.rmdir()


# The files that a run may have before its plan: Hydra's files, the request, and files of the host,
# which prepares while the plan is made and may fail by the same fault.
_MADE_BEFORE_A_PLAN = (
    *(f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")),
    *("request.json", "failure.json", "logs/host.log", MEETING, HOSTS, REFUSED),
)
