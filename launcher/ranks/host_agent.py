"""What `launcher=ssh` runs on every host: it says what is there, or is the host's ranks.

    python -m whale_train.launcher.ranks.host_agent

The first line of its input is an order, as JSON: to look (`Wanted`), or to start ranks (`Start`).
Ranks are commands like the one that was given, told by their environment which of the job they are,
as torchrun's are. They are told to end by a further line, and are ended when the input does, which
it does with the connection. Exit status: that of the first rank, else of one that ended badly,
else 0.
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

# Those that ranks have to have in the same version.
PACKAGES = ("whale-train", "torch", "deepspeed", "transformers")
_POLL_S = 0.1
# From the end of a rank that failed, or from being told to, to the end of the others.
_LEAVE_S = 15.0
_KILL_S = 5.0


@dataclass(frozen=True)
class Wanted:
    """What a job reads on every host: paths, and Python modules."""

    paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a host has: what a rank would see there (`Seen`, as JSON), its versions of PACKAGES, a
    free port, and what is `missing` of what is wanted."""

    seen: str
    versions: Mapping[str, str | None]
    port: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Ranks to start: their command's `arguments`, and the variables that all have, and each."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    ranks: tuple[Mapping[str, str], ...]


def order_of(content: Wanted | Start) -> str:
    """Return the line that orders it."""
    return json.dumps({type(content).__name__: asdict(content)}) + "\n"


def main() -> int:
    """Run the command of this module; return its exit status."""
    ((name, content),) = json.loads(sys.stdin.readline()).items()
    if name == Wanted.__name__:
        sys.stdout.write(json.dumps(asdict(look(Wanted(**content)))) + "\n")
        return 0
    return _Ranks(Start(**content)).wait()


def look(wanted: Wanted) -> Found:
    """Return what is here."""
    missing = [path for path in wanted.paths if not Path(path).exists()]
    missing += [f"the module {name}" for name in wanted.modules if not _is_there(name)]
    versions = {name: installed_version(name) for name in PACKAGES}
    return Found(Seen.here(shares=False).to_json(), versions, _free_port(), tuple(missing))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


class _Ranks:
    """The ranks of this host, started."""

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
        """Return the exit status once all have ended."""
        deadline = float("inf")
        while any(process.poll() is None for process in self._processes):
            said = self._said()
            if said is not None:  # to end, or nothing any more
                self._signal(signal.SIGTERM)
                deadline = min(deadline, time.monotonic() + (_LEAVE_S if said else _KILL_S))
            if any(process.poll() for process in self._processes):
                deadline = min(deadline, time.monotonic() + _LEAVE_S)
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            if said is None:
                time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)  # what they started
        codes = (process.returncode for process in self._processes)
        code = next((code for code in codes if code), 0)
        return code if code >= 0 else 128 - code

    def _said(self) -> str | None:
        """Return the line that was said, '' where there will be none any more, None for neither."""
        if self._is_cut_off or not self._input.select(timeout=0):
            return None
        line = sys.stdin.readline()
        self._is_cut_off = not line
        return line

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if number == signal.SIGKILL:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            elif process.poll() is None:
                process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main())
