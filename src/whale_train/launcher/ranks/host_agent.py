"""Report what a host has, or be its ranks: the program that `launcher=ssh` runs on every host.

    python -m whale_train.launcher.ranks.host_agent

The first line of its input is an order, as JSON: to look (`RankRequest`), or to start ranks
(`Start`). Ranks are commands like the one that was given. Their environment tells them which rank
of the job they are, as torchrun's does. A further line of input tells them to end. They are ended
when the input ends, which it does with the connection. The exit status is that of the first rank
that ended badly, in the order of ranks, else 0.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from whale_train.launcher.ranks.run_dir import installed_version
from whale_train.machine.hosts import Seen

# Packages of which all hosts have to have the same version.
PACKAGES = ("whale-train", "torch", "deepspeed", "transformers")
_POLL_S = 0.1
# Seconds that ranks have to end after one failed, or after they were told to.
_LEAVE_S = 15.0
_KILL_S = 5.0


@dataclass(frozen=True)
class RankRequest:
    """What a job reads on every host.

    paths: files and folders.
    modules: Python modules.
    """

    paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostReport:
    """The report of one host.

    seen: what a rank would see there, a `Seen` as JSON.
    versions: the installed version of each of PACKAGES; None where it is not installed.
    port: a free TCP port.
    missing: the wanted paths and modules that are not there.
    """

    seen: str
    versions: Mapping[str, str | None]
    port: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """An order to start ranks.

    arguments: the arguments of their command.
    environment: the environment variables that all ranks have.
    ranks: the environment variables of each rank alone.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    ranks: tuple[Mapping[str, str], ...]


def order_of(content: RankRequest | Start) -> str:
    """Return the line of JSON that orders an agent to look, or to start ranks."""
    return json.dumps({type(content).__name__: asdict(content)}) + "\n"


def main() -> int:
    """Run the command of this module. Returns its exit status."""
    ((name, content),) = json.loads(sys.stdin.readline()).items()
    if name == RankRequest.__name__:
        sys.stdout.write(json.dumps(asdict(look(RankRequest(**content)))) + "\n")
        return 0
    return _Ranks(Start(**content)).wait()


def look(wanted: RankRequest) -> HostReport:
    """Return the report of this host."""
    missing = [path for path in wanted.paths if not Path(path).exists()]
    missing += [f"the module {name}" for name in wanted.modules if not _is_there(name)]
    versions = {name: installed_version(name) for name in PACKAGES}
    return HostReport(Seen.here(shares=False).to_json(), versions, _free_port(), tuple(missing))


def _is_there(module: str) -> bool:
    """Return whether a Python module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would contain it
        return False


def _free_port() -> int:
    """Return a TCP port that is free on all interfaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


class _Ranks:
    """The running ranks of this host. Creating it starts them."""

    def __init__(self, start: Start) -> None:
        program = (sys.executable, "-m", "whale_train.launcher.cli", *start.arguments)
        self._processes = [
            subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **start.environment, **rank},
                start_new_session=True,
            )
            for rank in start.ranks
        ]
        self._input = selectors.DefaultSelector()
        self._input.register(sys.stdin, selectors.EVENT_READ)
        self._is_cut_off = False

    def wait(self) -> int:
        """Wait until all ranks have ended, and return the exit status of the first that ended
        badly, or 0.

        A signal's number n gives the status 128 + n.
        """
        deadline = float("inf")
        while any(process.poll() is None for process in self._processes):
            said = self._said()
            if said is not None:  # a line to end, or the end of the input
                self._signal(signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + (_LEAVE_S if said else _KILL_S))
            if any(process.poll() for process in self._processes):
                deadline = min(deadline, time.monotonic() + _LEAVE_S)
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            if said is None:
                time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)  # for the processes that the ranks started
        codes = (process.returncode for process in self._processes)
        code = next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code

    def _said(self) -> str | None:
        """Return the line that was written to standard input, '' at its end, or None where nothing
        is new."""
        if self._is_cut_off or not self._input.select(timeout=0):
            return None
        line = sys.stdin.readline()
        self._is_cut_off = not line
        return line

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to every running rank. SIGKILL goes to the processes that the ranks
        started, too."""
        for process in self._processes:
            if number == signal.SIGKILL:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
