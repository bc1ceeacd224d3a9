"""Run the ranks of a job on a Ray cluster, for `launcher=ray`.

The job is one placement group, and each bundle of it one actor (`node_ranks.py`), which starts the
bundle's ranks as `whale-train` commands. They find their ranks as under torchrun, and know nothing
of Ray. However the command ends, the group is removed, and the ranks with it.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.console import Console

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.ranks.elsewhere import lacks, starts_of, wanted_on_hosts, with_restarts
from whale_train.launcher.ranks.host_agent import HostReport
from whale_train.launcher.ranks.host_process import INTERRUPTED
from whale_train.launcher.ranks.host_ranks import LEAVE_S, Start
from whale_train.launcher.ranks.on_ray.bundles import RayNode, bundles_of
from whale_train.launcher.ranks.on_ray.node_ranks import News
from whale_train.launcher.ranks.on_ray.ray_cluster import (
    LOST,
    RayActors,
    connected,
    living_nodes,
    placed,
)
from whale_train.launcher.ranks.stop_signals import StopSignals

_POLL_S = 0.1
_BY_SIGTERM = 128 + signal.SIGTERM
_KILL_S = 5.0


def run_on_ray(
    request: Request, arguments: Sequence[str], console: Console, signals: StopSignals
) -> int:
    """Run the ranks of a job on the Ray cluster that `launcher.address` names, and return the exit
    status.

    Rank 0, on the node of the first bundle, prints the reason of a failure. A failed job is started
    again from the newest checkpoint, at most `launcher.max_restarts` times.

    request: the request of the job.
    arguments: command-line arguments that make the request.

    Raises ConfigError where there is no Ray or no cluster, where the cluster has not what the job
    needs within `launcher.placement_s` seconds, and where a node lacks something.
    """

    def attempt(arguments: Sequence[str]) -> int:
        return _attempt(request, arguments, console, signals)

    with connected(request.launcher.address):
        return with_restarts(request.launcher.max_restarts, arguments, console, attempt)


def _attempt(
    request: Request, arguments: Sequence[str], console: Console, signals: StopSignals
) -> int:
    """Run the job once, and return the exit status. Raises ConfigError as `run_on_ray`."""
    nodes = living_nodes()
    asked = bundles_of(request, nodes)
    with placed(asked, nodes, request.launcher.placement_s, signals.poll) as group:
        actors = RayActors(group)
        by_host = bundles_by_host([node.id for node in group.nodes])
        reports = _look(request, actors, group.nodes, signals)
        counts = [sum(asked.ranks[bundle] for bundle in bundles) for bundles in by_host]
        first = by_host[0][0]
        hosts = [group.nodes[bundles[0]] for bundles in by_host]
        said = ", ".join(f"{n} on {host.address}" for n, host in zip(counts, hosts, strict=True))
        console.print(f"ranks: {said}", soft_wrap=True, markup=False, highlight=False)
        starts = starts_of(arguments, counts, hosts[0].address, reports[first].port)
        # Ray has set the variable to all CPUs of the bundle, which its ranks share.
        threads = {"OMP_NUM_THREADS": str(asked.threads)}
        starts = [replace(x, environment={**x.environment, **threads}) for x in starts]
        by_bundle = starts_by_bundle(starts, by_host, asked.ranks)
        codes = _run(actors, by_bundle, signals, request.checkpoint.grace_s)
    lost = [group.nodes[bundle].address for bundle, code in enumerate(codes) if code == LOST]
    if lost:
        sys.stderr.write(f"error: the Ray actors on {', '.join(lost)} have died\n")
    if signals.count and codes[first] == _BY_SIGTERM:  # before rank 0 could handle it
        return INTERRUPTED
    return codes[first] if codes[first] not in (0, LOST) else int(any(codes))


def bundles_by_host(nodes: Sequence[str]) -> list[list[int]]:
    """Return the numbers of the bundles on each node, with the node of the first bundle first.

    nodes: the id of the node of each bundle.
    """
    hosts = dict.fromkeys(nodes)
    return [[number for number, node in enumerate(nodes) if node == host] for host in hosts]


def starts_by_bundle(
    starts: Sequence[Start], by_host: Sequence[Sequence[int]], ranks: Sequence[int]
) -> list[Start]:
    """Divide the orders of hosts among the bundles on each, and return the order of each bundle.

    starts: the order of each host.
    by_host: the numbers of the bundles on each host.
    ranks: number of ranks of each bundle.
    """
    by_bundle: dict[int, Start] = {}
    for start, bundles in zip(starts, by_host, strict=True):
        places = iter(start.ranks)
        for bundle in bundles:
            by_bundle[bundle] = replace(start, ranks=tuple(islice(places, ranks[bundle])))
    return [by_bundle[bundle] for bundle in range(len(ranks))]


def _look(
    request: Request, actors: RayActors, nodes: Sequence[RayNode], signals: StopSignals
) -> list[HostReport]:
    """Return the report of the node of each bundle. Raises ConfigError with all that is missing."""
    variables = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    order = (wanted_on_hosts(request), str(Path.cwd()), variables)
    looks = actors.all("look", [order] * len(nodes), signals.poll)
    faults: list[Fault] = []
    reports: list[HostReport] = []
    for node, look in zip(nodes, looks, strict=True):
        if isinstance(look, HostReport):
            reports.append(look)
            wrong = lacks(look, nodes[0].address, reports[0])
        elif isinstance(look, str):
            wrong = [(f"has no {look}", "make it there: nothing is copied")]
        else:
            reason = str(look).strip().splitlines()[-1]
            wrong = [(f"cannot run whale-train ({reason})", "install there what is installed here")]
        faults += (
            Fault("launcher", "ray", f"has a node {node.address} that {rule}", remedy)
            for rule, remedy in wrong
        )
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return reports


def _run(
    actors: RayActors, starts: Sequence[Start], signals: StopSignals, grace_s: float
) -> list[int]:
    """Start the ranks, show what they print, and return the exit status of each bundle.

    The first signal lets the ranks save and end within `grace_s` seconds. Raises KeyboardInterrupt
    where they are to end at once; they have ended then.
    """
    asked = [False]  # Ray is not called in a handler of signals, which may interrupt Ray

    def ask() -> None:
        asked[0] = True

    signals.asks(ask, grace_s + LEAVE_S)
    actors.all("start", [(start,) for start in starts], signals.poll)
    codes: list[int | None] = [None] * len(starts)
    deadline = float("inf")
    try:
        while None in codes and time.monotonic() < deadline:
            signals.poll()
            if asked[0]:
                asked[0] = False
                actors.end(grace_s + LEAVE_S)
            _hear(actors, codes)
            if any(codes):
                deadline = min(deadline, time.monotonic() + LEAVE_S + _KILL_S)
            time.sleep(_POLL_S)
    finally:
        if None in codes:
            actors.end(_KILL_S)
            deadline = time.monotonic() + 2 * _KILL_S
            while None in codes and time.monotonic() < deadline:
                _hear(actors, codes)
                time.sleep(_POLL_S)
    return [LOST if code is None else code for code in codes]


def _hear(actors: RayActors, codes: list[int | None]) -> None:
    """Show what ranks have printed, and take note of the exit status of bundles that have ended."""
    for bundle, news in enumerate(actors.news()):
        if news is None or codes[bundle] is not None:
            continue
        _show(news)
        codes[bundle] = news.status


def _show(news: News) -> None:
    for stream, content in ((sys.stdout, news.out), (sys.stderr, news.err)):
        if content:
            stream.write(content.decode(errors="replace"))
            stream.flush()
