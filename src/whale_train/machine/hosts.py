"""The hosts of a job whose ranks somebody else started: what each has, and which ranks are there.

Every rank says what it sees; rank 0 writes down what that makes, for the launcher that plans.
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

HOSTS = "hosts.json"  # in the run directory
MEETING = "meeting"  # a word there, by which ranks know rank 0's from one of its name
REFUSED = "refused"  # where the launcher says, after that, that there will be no plan
# The number of a rank's host among those of the job: torchrun's and Slurm's.
_NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")


@dataclass(frozen=True)
class Seen:
    """What a rank sees: its host's `name`, and `node`, which no other host of the job has, the
    cores and bytes of memory there, the GPUs that it may open, and whether it `shares` rank 0's run
    directory."""

    node: str
    name: str
    cores: int
    memory_bytes: int
    cards: tuple[GpuFacts, ...]
    shares: bool = True

    @classmethod
    def here(cls, shares: bool, environment: Mapping[str, str] = os.environ) -> "Seen":
        name = socket.gethostname()
        numbers = [environment[key] for key in _NODE_NUMBERS if key in environment]
        node = numbers[0] if numbers else name
        return cls(node, name, cores(), memory_bytes(), visible_gpus(), shares)

    def to_json(self) -> str:
        return _seen().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Seen":
        return _seen().validate_json(text)


@dataclass(frozen=True)
class Host:
    """A host and its `ranks`; `visible` are the UUIDs of the GPUs that each of them may open, of
    all its `cards`. No other host of the job has its `node`. Where it does not share rank 0's run
    directory (`shares`), it has one of its own under the same name."""

    node: str
    name: str
    cores: int
    memory_bytes: int
    cards: tuple[GpuFacts, ...]
    ranks: tuple[int, ...]
    visible: tuple[frozenset[str], ...]
    shares: bool = True


def joined(seen: Iterable[Seen]) -> tuple[Host, ...]:
    """Return the hosts of ranks that have `seen` so much, one after another, in the order of their
    first ranks."""
    by_node: dict[str, dict[int, Seen]] = {}
    for rank, each in enumerate(seen):
        by_node.setdefault(each.node, {})[rank] = each
    return tuple(_host(node, ranks) for node, ranks in by_node.items())


def host_of(hosts: Iterable[Host], rank: int) -> Host:
    """Return the host that `rank` is on."""
    return next(host for host in hosts if rank in host.ranks)


def this_host(cards: tuple[GpuFacts, ...]) -> Host:
    """Return the host that this is, with `cards` of its GPUs, and no ranks yet."""
    name = socket.gethostname()
    return Host(name, name, cores(), memory_bytes(), cards, (), ())


def _host(node: str, seen: Mapping[int, Seen]) -> Host:
    first = next(iter(seen.values()))
    cards = {card.uuid: card for each in seen.values() for card in each.cards}
    visible = tuple(frozenset(card.uuid for card in each.cards) for each in seen.values())
    of_host = (node, first.name, first.cores, first.memory_bytes)
    shares = all(each.shares for each in seen.values())
    return Host(*of_host, tuple(cards.values()), tuple(seen), visible, shares)


def hosts_to_json(hosts: tuple[Host, ...]) -> str:
    """Return the text of HOSTS."""
    return _hosts().dump_json(hosts, indent=1).decode() + "\n"


def hosts_from_json(text: str | bytes) -> tuple[Host, ...]:
    """Return what `hosts_to_json` was given."""
    return _hosts().validate_json(text)


def read_hosts(run_dir: Path) -> tuple[Host, ...]:
    """Return the hosts that a run directory names: none where ranks are the launcher's own."""
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
