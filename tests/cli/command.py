"""Runs the command as a user does: in a process of its own, in a folder of its own.

That process is a fork of one that is kept (`whale_train`), or one as a shell starts it
(`whale_train_process`, a few seconds of imports slower).
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
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
    """Answer `whale-train ARGUMENTS` in `folder` on a machine without GPUs, by a fork of a process
    that has imported what the command imports.

    Raises TimeoutError after `deadline_s`.
    """
    return _WARM.answer(arguments, folder, environment or {}, deadline_s)


def whale_train_process(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = 240.0,
) -> Answer:
    """Answer `whale-train ARGUMENTS` as a user's shell would start it, its output piped.

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


class _Warm:
    """The process of `warm.py`, started when first asked; it ends with this one, whose end closes
    its stdin."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def answer(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        deadline_s: float,
    ) -> Answer:
        with tempfile.TemporaryDirectory() as written:
            paths = {name: Path(written) / name for name in ("stdout", "stderr")}
            for path in paths.values():
                path.touch()
            question = {
                "arguments": list(arguments),
                "folder": str(folder.resolve()),
                "environment": environment_for(folder) | dict(environment),
                **{name: str(path) for name, path in paths.items()},
            }
            status = self._ask(json.dumps(question), deadline_s)
            said = (path.read_text() for path in paths.values())
            return Answer(status, *said, processes_of(folder))

    def _ask(self, question: str, deadline_s: float) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.warm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment_for(ROOT),
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            answered = bool(selector.select(deadline_s))
        answer = self._process.stdout.readline() if answered else ""
        if not answer:
            self._process.kill()
            self._process.wait()
            self._process = None
            raise TimeoutError(f"the command had not ended after {deadline_s:.0f} s")
        return int(answer)


_WARM = _Warm()


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
