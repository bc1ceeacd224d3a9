"""Describe the hosts of a job whose ranks others started: their hardware, and their ranks.

Every rank reports its host. Rank 0 joins the reports into hosts and writes them to the run
directory, for the launcher that plans.
"""

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from whale_train.machine.limits import cores, memory_bytes
from whale_train.machine.nvml import visible_gpus
from whale_train.strategies.hardware.gpu_facts import GpuFacts

# Files in the run directory.
HOSTS = "hosts.json"
MEETING = "meeting"  # a random word, which tells rank 0's directory from others of its name
REFUSED = "refused"  # the launcher writes it where there will be no plan
# Variables of torchrun and Slurm with the number of a rank's host in the job.
_NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Seen:
    """The report of one rank about its host.

    node: the id of the host, which no other host of the job has.
    name: the name of the host.
    cores: number of cores that the rank may use.
    memory_bytes: bytes of memory that ranks may hold on the host.
    cards: the GPUs that the rank may open.
    shares: whether the host shares rank 0's run directory.
    """

    node: str
    name: str
    cores: int
    memory_bytes: int
    cards: tuple[GpuFacts, ...]
    shares: bool = True

    @classmethod
    def here(cls, shares: bool, environment: Mapping[str, str] = os.environ) -> "Seen":
        """Return the report of this process. The host's id is its number by torchrun's or Slurm's
        variables, or else its name."""
        name = socket.gethostname()
        numbers = [environment[key] for key in _NODE_NUMBERS if key in environment]
        node = numbers[0] if numbers else name
        return cls(node, name, cores(), memory_bytes(), visible_gpus(), shares)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return _seen().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Seen":
        """Return the report in a text that `to_json` wrote."""
        return _seen().validate_json(text)


@dataclass(frozen=True)
class Host:
    """A host of a job, and its ranks.

    node: the id of the host, which no other host of the job has.
    name: the name of the host.
    cores: number of cores that the host's first rank may use.
    memory_bytes: bytes of memory that the host's ranks may hold together.
    cards: all GPUs that the host's ranks may open.
    ranks: the ranks on the host.
    visible: for each of `ranks`, the UUIDs of the GPUs that it may open.
    shares: whether the host shares rank 0's run directory. Otherwise it has a run directory of its
        own, under the same name.
    """

    node: str
    name: str
    cores: int
    memory_bytes: int
    cards: tuple[GpuFacts, ...]
    ranks: tuple[int, ...]
    visible: tuple[frozenset[str], ...]
    shares: bool = True


def joined(seen: Iterable[Seen]) -> tuple[Host, ...]:
    """Return the hosts of a job, in the order of their first ranks. `seen` are the reports of all
    ranks, in rank order."""
    by_node: dict[str, dict[int, Seen]] = {}
    for rank, report in enumerate(seen):
        by_node.setdefault(report.node, {})[rank] = report
    return tuple(_host(node, ranks) for node, ranks in by_node.items())


def host_of(hosts: Iterable[Host], rank: int) -> Host:
    """Return the host of `rank`."""
    return next(host for host in hosts if rank in host.ranks)


def this_host(cards: tuple[GpuFacts, ...]) -> Host:
    """Return this host, with `cards` as its GPUs, and without ranks."""
    name = socket.gethostname()
    return Host(name, name, cores(), memory_bytes(), cards, (), ())


def _host(node: str, reports: Mapping[int, Seen]) -> Host:
    """Return the host that the reports of its ranks describe."""
    first = next(iter(reports.values()))
    cards = {card.uuid: card for report in reports.values() for card in report.cards}
    visible = tuple(frozenset(card.uuid for card in report.cards) for report in reports.values())
    of_host = (node, first.name, first.cores, first.memory_bytes)
    shares = all(report.shares for report in reports.values())
    return Host(*of_host, tuple(cards.values()), tuple(reports), visible, shares)


def hosts_to_json(hosts: tuple[Host, ...]) -> str:
    """Return the text of `hosts.json`."""
    return _hosts().dump_json(hosts, indent=1).decode() + "\n"


def hosts_from_json(text: str | bytes) -> tuple[Host, ...]:
    """Return the hosts in a text that `hosts_to_json` wrote."""
    return _hosts().validate_json(text)


def read_hosts(run_dir: Path) -> tuple[Host, ...]:
    """Return the hosts in `hosts.json` of a run directory, or nothing where the launcher started
    the ranks and the file does not exist."""
    try:
        return hosts_from_json((run_dir / HOSTS).read_bytes())
    except FileNotFoundError:
        return ()


@cache
def _seen() -> TypeAdapter[Seen]:
    return TypeAdapter(Seen)


@cache
def _hosts() -> TypeAdapter[tuple[Host, ...]]:
    return TypeAdapter(tuple[Host, ...])
