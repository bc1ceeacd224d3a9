"""Report the resources of a host, or run ranks on it: the program that `launcher=ssh` runs on every
host.

    python -m whale_train.launcher.ranks.host_agent

The first line of standard input is an order in JSON: report (`RankRequest`), or start ranks
(`Start`). Each rank runs the `whale-train` command, and finds its rank in environment variables, as
under torchrun. A further line of input asks the ranks to end. The end of the input, which follows
the end of the connection, ends the ranks as well. The exit status is 0, or the status of the first
rank that failed, in the order of ranks.
"""

import json
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from whale_train.launcher.ranks.host_ranks import LEAVE_S, HostRanks, Start
from whale_train.launcher.ranks.run_dir import installed_version
from whale_train.machine.hosts import Seen

# Packages that must have the same version on all hosts.
PACKAGES = ("whale-train", "torch", "deepspeed", "transformers")
_POLL_S = 0.1
# Seconds that ranks have to end after the connection ended.
_KILL_S = 5.0


@dataclass(frozen=True)
class RankRequest:
    """An order to report a host, with the paths and modules that the job needs on every host.

    paths: files and folders.
    modules: Python modules.
    """

    paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostReport:
    """The report of one host.

    seen: the cores, memory and GPUs that a rank would see, a `Seen` as JSON.
    versions: the installed version of each package in PACKAGES; None for a missing package.
    port: a free TCP port.
    missing: the requested paths and modules that do not exist on the host.
    """

    seen: str
    versions: Mapping[str, str | None]
    port: int
    missing: tuple[str, ...]


def order_of(content: RankRequest | Start) -> str:
    """Return the line of JSON that gives an order to an agent."""
    return json.dumps({type(content).__name__: asdict(content)}) + "\n"


def main() -> int:
    """Run the agent: read an order, carry it out, and return the exit status."""
    ((name, content),) = json.loads(sys.stdin.readline()).items()
    if name == RankRequest.__name__:
        sys.stdout.write(json.dumps(asdict(look(RankRequest(**content)))) + "\n")
        return 0
    return _run(Start(**content))


def look(wanted: RankRequest) -> HostReport:
    """Return the report of this host."""
    missing = [path for path in wanted.paths if not Path(path).exists()]
    missing += [f"the module {name}" for name in wanted.modules if not _is_there(name)]
    versions = {name: installed_version(name) for name in PACKAGES}
    return HostReport(Seen.here(shares=False).to_json(), versions, _free_port(), tuple(missing))


def _is_there(module: str) -> bool:
    """Return whether a Python module can be found. The module itself is not imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package does not exist
        return False


def _free_port() -> int:
    """Return a TCP port that is free on all interfaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


class _Orders:
    """The lines of standard input that follow the order to start ranks."""

    def __init__(self) -> None:
        self._input = selectors.DefaultSelector()
        self._input.register(sys.stdin, selectors.EVENT_READ)
        self._is_cut_off = False

    def next(self) -> str | None:
        """Return a new line of standard input, '' once at the end of the input, or None without new
        input."""
        if self._is_cut_off or not self._input.select(timeout=0):
            return None
        line = sys.stdin.readline()
        self._is_cut_off = not line
        return line


def _run(start: Start) -> int:
    """Run ranks until all have ended, and return the exit status as `HostRanks.poll` does."""
    ranks, orders = HostRanks(start), _Orders()
    while (status := ranks.poll()) is None:
        line = orders.next()
        if line is None:
            time.sleep(_POLL_S)
        else:  # a request to end, or the end of the input
            ranks.end(LEAVE_S if line else _KILL_S)
    return status


if __name__ == "__main__":
    sys.exit(main())
