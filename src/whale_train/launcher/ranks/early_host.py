"""Start a host process before the run directory is known, so that the host imports meanwhile.

The command imports this file first, so it imports nothing that takes time.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

HOST_PROGRAM = (sys.executable, "-m", "whale_train.runtime.process.fork_server")
# Variables that programs set for the ranks that they start (`rank_env.py`).
_OF_STARTERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
_ELSEWHERE = ("launcher=ssh", "launcher=slurm", "launcher=ray")
DOCTOR = "doctor"  # the word that asks for a report of this machine


def asks_for_ranks(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command line seems to train on this host.

    The answer may be wrong, since config files and faults of the command line are not considered.
    An early host that is not needed is ended.
    """
    if any(name in environment for name in _OF_STARTERS):
        return False
    other_modes = (x for x in arguments if x.startswith("mode=") and x != "mode=train")
    has_flags = any(x.startswith("-") and not x.startswith("--config-") for x in arguments)
    elsewhere = {*_ELSEWHERE, DOCTOR} & set(arguments)
    return not has_flags and not any(other_modes) and not elsewhere


class EarlyHost:
    """A host process that imports, and waits for its run directory.

    The host can be taken once. Every `start` needs a `stop`, which does nothing after a `take`.

    pid: the id of the process.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process: subprocess.Popen[bytes] | None = process
        self.pid = process.pid
        self._began_with = _surroundings()

    @classmethod
    def start(cls) -> "EarlyHost":
        """Start a host, and return at once. The host ends with the thread that started it."""
        process = subprocess.Popen(
            [*HOST_PROGRAM, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    def take(self, run_dir: Path) -> "subprocess.Popen[bytes] | None":
        """Give the host its run directory, and return the host's process.

        run_dir: the absolute path of a directory that has `logs/`.

        Returns None where the host was taken before or has ended, and where the working directory
        or the environment has changed since the host was started.
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
        # The host is not reaped yet, so its id still names its process group: the host, and the
        # processes that its imports started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]


def _surroundings() -> tuple[str, dict[str, str]]:
    """Return the current working directory and environment, which a new process would inherit."""
    return os.getcwd(), dict(os.environ)
