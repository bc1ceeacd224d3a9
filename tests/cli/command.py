"""Runs the command as a user does: in a process of its own, in a folder of its own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "WHALE_TRAIN_TEST"  # in the environment of the command and of all it starts


@dataclass(frozen=True)
class Answer:
    """What the command said, and the processes that outlived it."""

    status: int
    stdout: str
    stderr: str
    left_running: tuple[int, ...]


def whale_train(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = 240.0,
) -> Answer:
    """`whale-train ARGUMENTS` in `folder`, its output piped, on a machine without GPUs.

    Raises subprocess.TimeoutExpired after `deadline_s`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "whale_train.launcher.cli", *arguments],
        cwd=folder,
        env=environment_for(folder) | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline_s,
    )
    return Answer(done.returncode, done.stdout, done.stderr, processes_of(folder))


def environment_for(folder: Path) -> dict[str, str]:
    """This process's environment for a command in `folder`: ours first on the path, no GPUs, no
    place among ranks, no colours asked for, and nothing of what was measured of this machine."""
    dropped = ("RANK", "WORLD_SIZE", "SLURM_", "MASTER_", "LOCAL_", "COMP_", "FORCE_COLOR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])])
    absent = {"WHALE_TRAIN_CALIBRATIONS": str(folder / "no calibrations")}
    return kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", MARK: str(folder)} | absent


def processes_of(folder: Path) -> tuple[int, ...]:
    """The living processes that were started for `folder`, by the mark they inherited."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # ended meanwhile, or somebody else's
                continue
            if f"{MARK}={folder}".encode() in variables:
                found.append(int(entry.name))
    return tuple(found)


def files_in(folder: Path) -> set[str]:
    """The files below `folder` by relative path, and empty folders; no compiled Python."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and (path.is_file() or not any(path.iterdir()))
    }
