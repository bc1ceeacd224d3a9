"""Start the process of a host before its run directory is known, so that it imports meanwhile.

This file imports nothing that takes time: a command begins with it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

HOST_PROGRAM = (sys.executable, "-m", "whale_train.runtime.process.fork_server")
# Variables of programs that start ranks themselves (`rank_env.py`).
_OF_STARTERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
_ELSEWHERE = ("launcher=ssh", "launcher=slurm")
DOCTOR = "doctor"  # the word that asks for a report of this machine


def asks_for_ranks(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command line looks like one that trains on this host.

    Config files may say otherwise, and the command line may be wrong: an early host that nobody
    takes is ended.
    """
    if any(name in environment for name in _OF_STARTERS):
        return False
    other_modes = (x for x in arguments if x.startswith("mode=") and x != "mode=train")
    has_flags = any(x.startswith("-") and not x.startswith("--config-") for x in arguments)
    elsewhere = {*_ELSEWHERE, DOCTOR} & set(arguments)
    return not has_flags and not any(other_modes) and not elsewhere


class EarlyHost:
    """The process of a host that imports, and waits to be told its run directory.

    It is taken at most once. Every `start` needs a `stop`, which does nothing where it was taken.
    `pid` is the id of the process.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process: subprocess.Popen[bytes] | None = process
        self.pid = process.pid
        self._began_with = _surroundings()

    @classmethod
    def start(cls) -> "EarlyHost":
        """Start a host, as `HostProcess.start` does. Returns at once."""
        process = subprocess.Popen(
            [*HOST_PROGRAM, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    def take(self, run_dir: Path) -> "subprocess.Popen[bytes] | None":
        """Return the process, as the host of `run_dir`, an absolute path that has `logs/`.

        Returns None where there is none any more: it was taken or has ended, or a host started
        here would have another working directory or environment.
        """
        process = self._process
        if process is None or self._began_with != _surroundings():
            self.stop()
            return None
        assert process.stdin is not None
        try:
            process.stdin.write(os.fsencode(run_dir))
            process.stdin.close()
        except BrokenPipeError:
            self.stop()
            return None
        self._process = None
        return process

    def stop(self) -> None:
        """End the process, unless it was taken."""
        process, self._process = self._process, None
        if process is None:
            return
        # Not reaped, so that the process group is its own: the host, and what its imports started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]


def _surroundings() -> tuple[str, dict[str, str]]:
    """Return the working directory and the environment that a process started here would have."""
    return os.getcwd(), dict(os.environ)
