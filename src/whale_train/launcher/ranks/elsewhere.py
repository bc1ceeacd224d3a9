"""What launchers share that start ranks on other hosts by an agent on each: `launcher=ssh` and
`launcher=ray`.

The agents report their hosts, which must have what the ranks need. Each gets an order to start its
ranks. A job that failed is started again from its newest checkpoint.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex

from rich.console import Console

from whale_train.config import AUTO, Request
from whale_train.errors import RequestError
from whale_train.launcher.ranks.host_agent import HostReport, RankRequest
from whale_train.launcher.ranks.host_ranks import Start
from whale_train.launcher.ranks.job_key import SECRET
from whale_train.launcher.ui.show_error import error_text, terminal_width
from whale_train.machine.parents import STARTER

FAILED = 1  # the exit status of a run that failed
# The environment variables of this command that are passed to the ranks.
_PASSED = ("COLUMNS", "OMP_NUM_THREADS", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE")


def with_restarts(
    restarts: int,
    arguments: Sequence[str],
    console: Console,
    attempt: Callable[[Sequence[str]], int],
) -> int:
    """Run a job in at most `restarts` + 1 attempts, and return the exit status of the last one.

    A further attempt follows only one that failed. It goes on from the job's newest checkpoint. If
    it is refused, the refusal is printed and the job has failed.

    restarts: the value of `launcher.max_restarts`.
    arguments: command-line arguments of the first attempt.
    attempt: runs the job with the given arguments once, and returns the exit status.

    Raises what the first attempt raises.
    """
    status = attempt(arguments)
    for left in range(restarts, 0, -1):
        if status != FAILED:
            break
        said = f"warning: an attempt failed; {left} more may follow"
        console.print(said, style="yellow", soft_wrap=True)
        arguments = [x for x in arguments if not x.startswith("train.resume=")]
        arguments = [*arguments, f"train.resume={AUTO}"]
        try:
            status = attempt(arguments)
        except RequestError as error:
            sys.stderr.write(error_text(error, terminal_width(sys.stderr)) + "\n")
            break
    return status


def wanted_on_hosts(request: Request) -> RankRequest:
    """Return the paths and the modules that ranks need on their hosts."""
    folder, target = request.model.pretrained, request.model.target
    given = [getattr(request.data, "path", None), folder if folder and os.sep in folder else None]
    paths = tuple(str(Path(path).absolute()) for path in given if path is not None)
    return RankRequest(paths, (target.rpartition(".")[0],))


def lacks(look: HostReport, other_host: str, other: HostReport) -> list[tuple[str, str]]:
    """Return the rule and the remedy for each path, module or version that a host lacks.

    look: the report of the host.
    other_host, other: the name and the report of another host, whose package versions are required.
    """
    wrong = [(f"has no {missing}", "put it there: nothing is copied") for missing in look.missing]
    for package, version in look.versions.items():
        if version != other.versions[package]:
            rule = f"has {package} {version}, and {other_host} has {other.versions[package]}"
            wrong.append((rule, "install the same on all hosts"))
    return wrong


def starts_of(
    arguments: Sequence[str], counts: Sequence[int], address: str, port: int
) -> list[Start]:
    """Return the order to start the ranks of each host. All orders have a new secret in common.

    arguments: command-line arguments of the ranks.
    counts: number of ranks on each host. Ranks are numbered host by host.
    address: the address of the first host.
    port: the TCP port of the rendezvous on the first host.
    """
    shared = {name: os.environ[name] for name in _PASSED if name in os.environ}
    shared |= {SECRET: token_hex(32), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(sum(counts)), STARTER: "whale-train"}
    starts, first = [], 0
    for number, count in enumerate(counts):
        of_host = {"GROUP_RANK": str(number), "LOCAL_WORLD_SIZE": str(count)}
        places = tuple(
            {**of_host, "RANK": str(first + local), "LOCAL_RANK": str(local)}
            for local in range(count)
        )
        starts.append(Start(tuple(arguments), shared, places))
        first += count
    return starts
