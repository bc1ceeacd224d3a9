"""The run directory: making it, and the files the parent writes into it.

One run, one directory. Hydra has already made it (with `.hydra/` and the job log) when our code
starts. The parent writes `request.json`, `environment.json`, `plan.json` (or `plans/`, of a
comparison) and, where ranks wait for it, last `ready`; the ranks write the rest.
"""

import json
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from whale_train.errors import ConfigError, Fault

# Any of these says that a run has been here.
PLANS = "plans"  # of a comparison, a file each
RUN_FILES = ("request.json", "plan.json", "metrics.jsonl", "ready", "failure.json", PLANS)

# The packages a run's numbers may depend on.
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


def create_run_dir(path: Path) -> Path:
    """Make `path` a run directory with an empty `logs/`, and return it, absolute.

    Raises ConfigError when it belongs to another run or cannot be made.
    """
    run_dir = path.absolute()
    found = [name for name in RUN_FILES if (run_dir / name).exists()]
    if found:
        raise ConfigError(
            [
                Fault(
                    "hydra.run.dir",
                    str(path),
                    f"already holds a run ({found[0]})",
                    "name a directory that does not exist yet, or remove this one",
                )
            ]
        )
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
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


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or no file (or the one before)."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """`write_text` of plain data as JSON. NaN and infinities are refused (ValueError): they are
    not JSON."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def mark_ready(run_dir: Path) -> None:
    """Tell the waiting hosts that everything they need is written."""
    write_text(run_dir / "ready", "")


def write_environment(run_dir: Path) -> None:
    """Write `environment.json`: what the run ran on, without importing any of it."""
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
    """Return the installed version of a distribution, None when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
