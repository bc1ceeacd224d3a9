"""Run the ranks of one host as `whale-train` commands, and end them together.

Each rank runs the command, and finds its rank in environment variables, as under torchrun. Who
orders the start, and by which connection, is decided elsewhere (`host_agent.py` for ssh,
`on_ray/node_ranks.py` for Ray).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

# Seconds that ranks have to end after one of them failed.
LEAVE_S = 15.0


@dataclass(frozen=True)
class Start:
    """An order to start ranks.

    arguments: command-line arguments of every rank.
    environment: environment variables of all ranks.
    ranks: further environment variables of each rank.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    ranks: tuple[Mapping[str, str], ...]


class HostRanks:
    """The running ranks of this host. Creating it starts them.

    The calling thread must live as long as the ranks, since they end with the thread that started
    them.

    start: the ranks.
    inherited: the environment that the variables of `start` are added to.
    outputs: for each rank, the descriptors of its standard output and its standard error; empty
        where ranks write to those of this process.
    """

    def __init__(
        self,
        start: Start,
        inherited: Mapping[str, str] = os.environ,
        outputs: Sequence[tuple[int, int]] = (),
    ) -> None:
        program = (sys.executable, "-m", "whale_train.launcher.cli", *start.arguments)
        self._processes = [
            subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=outputs[number][0] if outputs else None,
                stderr=outputs[number][1] if outputs else None,
                env={**inherited, **start.environment, **rank},
                start_new_session=True,
            )
            for number, rank in enumerate(start.ranks)
        ]
        self._deadline = float("inf")
        self._status: int | None = None

    def end(self, leave_s: float) -> None:
        """Ask the ranks to end. `poll` kills those that run after `leave_s` seconds."""
        self._signal(signal.SIGTERM)
        self._deadline = min(self._deadline, time.monotonic() + leave_s)

    def poll(self) -> int | None:
        """Return the exit status once all ranks have ended, or None while one runs.

        The status is 0, or that of the first rank that failed, in the order of ranks. A rank that
        signal n killed has the status 128 + n. Ranks that still run LEAVE_S seconds after another
        failed are killed.
        """
        if self._status is not None:
            return self._status
        codes = [process.poll() for process in self._processes]
        if None in codes:
            if any(codes):
                self._deadline = min(self._deadline, time.monotonic() + LEAVE_S)
            if time.monotonic() > self._deadline:
                self._signal(signal.SIGKILL)
            return None
        self._signal(signal.SIGKILL)  # for the processes that the ranks started
        code = next((code for code in codes if code), 0)
        self._status = code if code >= 0 else 128 - code
        return self._status

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to every running rank. SIGKILL is also sent to the processes that the ranks
        started."""
        for process in self._processes:
            if number == signal.SIGKILL:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)
