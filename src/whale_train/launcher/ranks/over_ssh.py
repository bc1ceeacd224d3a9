"""Run the ranks of a job on hosts that are reached by ssh, for `launcher=ssh`.

First every host reports its resources, and all that is missing is raised as one error. Then each
host runs the same command once for each rank, which finds its rank as under torchrun. Nothing is
copied: every host must have the same Python and the same working directory, or a copy of both.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.ranks.elsewhere import (
    lacks,
    starts_of,
    wanted_on_hosts,
    with_restarts,
)
from whale_train.launcher.ranks.host_agent import HostReport, order_of
from whale_train.launcher.ranks.ranks_on import ranks_on
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.machine.hosts import Seen

_AGENT = "whale_train.launcher.ranks.host_agent"
# ssh gives up on a host that stops answering after 15 s, and on a refused login at once.
_SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_LOOK_S = 120.0
_POLL_S = 0.1
_UNREACHABLE = 255  # ssh's own exit status
_NO_FOLDER, _NO_PYTHON = 41, 42
# Seconds that the ranks on other hosts have to end after the ranks on one host failed.
_LEAVE_S = 20.0


def run_over_ssh(
    request: Request, arguments: Sequence[str], console: Console, signals: StopSignals
) -> int:
    """Run the ranks of a job on `launcher.hosts`, and return the exit status.

    Rank 0, on the first host, prints the reason of a failure. A failed job is started again from
    the newest checkpoint, at most `launcher.max_restarts` times.

    request: the request of the job.
    arguments: command-line arguments that make the request.

    Raises ConfigError where ssh or something that the job needs on a host is missing.
    """
    if shutil.which("ssh") is None:
        rule = "needs the command ssh, which is not here"
        raise ConfigError([Fault("launcher", "ssh", rule, "install OpenSSH's client")])

    def attempt(arguments: Sequence[str]) -> int:
        return _attempt(request, arguments, console, signals)

    return with_restarts(request.launcher.max_restarts, arguments, console, attempt)


def _attempt(
    request: Request, arguments: Sequence[str], console: Console, signals: StopSignals
) -> int:
    """Run the job once on the hosts, and return the exit status. Raises ConfigError as
    `run_over_ssh`."""
    hosts, python = request.launcher.hosts, request.launcher.python or sys.executable
    reports = _look(request, hosts, python)
    counts = ranks_on(request, hosts, [Seen.from_json(report.seen) for report in reports])
    said = ", ".join(f"{n} on {host}" for host, n in zip(hosts, counts, strict=True))
    console.print(f"ranks: {said}", soft_wrap=True, markup=False, highlight=False)
    connections = _start(hosts, counts, arguments, reports[0].port, python)
    try:
        signals.asks(lambda: _say(connections, "end\n"), request.checkpoint.grace_s)
        _wait(connections, signals)
    finally:
        _end(connections)
    lost = [h for h, c in zip(hosts, connections, strict=True) if c.returncode == _UNREACHABLE]
    if lost:
        sys.stderr.write(f"error: {', '.join(lost)} cannot be reached any more\n")
    codes = [connection.returncode or 0 for connection in connections]
    return codes[0] if codes[0] not in (0, _UNREACHABLE) else int(any(codes))


# --- Before anything starts ----------------------------------------------------------------------


def _look(request: Request, hosts: Sequence[str], python: str) -> list[HostReport]:
    """Return the report of every host. Raises ConfigError with all that is missing on hosts."""
    wanted = order_of(wanted_on_hosts(request))
    with ThreadPoolExecutor(len(hosts)) as pool:
        looks = list(pool.map(lambda host: _looked(host, wanted, python), hosts))
    faults: list[Fault] = []
    reports: list[HostReport] = []
    first = ""
    for number, (host, look) in enumerate(zip(hosts, looks, strict=True)):
        if isinstance(look, HostReport):
            reports.append(look)
            first = first or host
            wrong = lacks(look, first, reports[0])
        else:
            wrong = [look]
        faults += (
            Fault(f"launcher.hosts[{number}]", host, *rule_and_remedy) for rule_and_remedy in wrong
        )
    if faults:
        raise ConfigError(faults)
    return reports


def _looked(host: str, wanted: str, python: str) -> HostReport | tuple[str, str]:
    """Return the report of a host, or the rule and the remedy for a host that cannot be used.

    wanted: the line that orders the host's agent to report.
    python: the path of Python on the host.
    """
    try:
        done = subprocess.run(
            [*_SSH, host, _script(python)],
            input=wanted,
            capture_output=True,
            encoding="utf-8",
            timeout=_LOOK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not answer within {_LOOK_S:g} s", "look for what keeps it busy"
    if done.returncode == 0:
        content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return HostReport(**{**content, "missing": tuple(content["missing"])})
    said = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
    if done.returncode == _UNREACHABLE:
        return f"cannot be reached ({said})", f"`ssh {host} true` has to do without a password"
    if done.returncode == _NO_FOLDER:
        return f"has no directory {Path.cwd()}", "make it there: nothing is copied"
    if done.returncode == _NO_PYTHON:
        return f"has no {python}", "install it there, or say where it is by launcher.python"
    return f"cannot run whale-train ({said})", "install there what is installed here"


def _script(python: str) -> str:
    """Return the shell command that runs the agent on a host, in the path of this working
    directory."""
    program, folder = shlex.quote(python), shlex.quote(str(Path.cwd()))
    path = os.environ.get("PYTHONPATH")  # where a user's own modules may be
    modules = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    return (
        f"cd {folder} || exit {_NO_FOLDER}; command -v {program} >/dev/null || exit {_NO_PYTHON}; "
        f"{modules}exec {program} -m {_AGENT}"
    )


# --- The ranks -----------------------------------------------------------------------------------


def _start(
    hosts: Sequence[str],
    counts: Sequence[int],
    arguments: Sequence[str],
    port: int,
    python: str,
) -> list["subprocess.Popen[str]"]:
    """Start the ranks on all hosts, and return the ssh process that connects to each host.

    hosts: the names of the hosts.
    counts: number of ranks on each host.
    arguments: command-line arguments of the ranks.
    port: the TCP port of the rendezvous on the first host.
    python: the path of Python on the hosts.
    """
    connections = []
    starts = starts_of(arguments, counts, _address(hosts[0]), port)
    for host, start in zip(hosts, starts, strict=True):
        connection = subprocess.Popen(
            [*_SSH, host, _script(python)],
            stdin=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,  # so that Ctrl-C in a terminal does not reach ssh
        )
        connections.append(connection)
        # The order has the secret, so it goes through standard input, which nobody else can see.
        _say([connection], order_of(start))
    return connections


def _address(host: str) -> str:
    """Return the address of a host: the host name in ssh's configuration of the host."""
    output = subprocess.run(
        ["ssh", "-G", host], capture_output=True, encoding="utf-8", check=False
    ).stdout
    lines = (line.split(maxsplit=1) for line in output.splitlines())
    options = {words[0]: words[1] for words in lines if len(words) == 2}
    return options.get("hostname", host.rpartition("@")[2])


def _wait(connections: Sequence["subprocess.Popen[str]"], signals: StopSignals) -> None:
    """Wait until the ranks on all hosts have ended, or until _LEAVE_S seconds after a failure."""
    deadline = float("inf")
    while (
        any(connection.poll() is None for connection in connections) and time.monotonic() < deadline
    ):
        signals.poll()
        if any(connection.poll() for connection in connections):
            deadline = min(deadline, time.monotonic() + _LEAVE_S)
        time.sleep(_POLL_S)


def _say(connections: Sequence["subprocess.Popen[str]"], line: str) -> None:
    """Send a line to the agent behind each connection."""
    for connection in connections:
        assert connection.stdin is not None
        with suppress(OSError):  # the connection has ended
            connection.stdin.write(line)
            connection.stdin.flush()


def _end(connections: Sequence["subprocess.Popen[str]"]) -> None:
    """End the connections, and all ranks that still run on the hosts."""
    for connection in connections:
        assert connection.stdin is not None
        with suppress(OSError):
            connection.stdin.close()
    deadline = time.monotonic() + _LEAVE_S
    while any(process.poll() is None for process in connections) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for connection in connections:
        connection.kill()
        connection.wait()
