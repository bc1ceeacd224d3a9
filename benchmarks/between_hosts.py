"""Provide the options, the hosts and the comparison for benchmarks of several hosts."""

import argparse
from collections.abc import Sequence

from hosts import Hosts
from interleave import Side, Turns, interleaved, show
from rich.console import Console

from whale_train.runtime.cpu.threads import num_threads
from whale_train.runtime.process.preload import preload


def options_of(description: str | None, hosts: int, gbit: float) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks of several hosts. Callers add their own.

    description: the description in the parser's help.
    hosts, gbit: the defaults of the options `--hosts` and `--gbit`.
    """
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=words)
    parser.add_argument("--hosts", type=int, default=hosts, help="of a rank each")
    parser.add_argument("--gbit", type=float, default=gbit, help="rate of a host's link, Gbit/s")
    parser.add_argument("--rounds", type=int, default=5, help="turns a side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn")
    return parser


class Bench:
    """The hosts that `options` ask for, and the turns of the sides that run on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._hosts = Hosts.make(options.hosts, options.gbit)  # before any thread is started
        preload()
        self._console = Console(width=150)
        self.turns = Turns(options.rounds, options.steps)
        measured = self._hosts.measured_gbit_s()
        said = f"{options.hosts} hosts at {options.gbit:g} Gbit/s; measured {measured:.2f}"
        self._console.print(said)

    def compare(self, title: str, sides: Sequence[Side], against: str) -> None:
        """Run the sides in turns, and show how fast each is compared with the side `against`."""
        count = self._options.hosts
        results = interleaved(sides, count, num_threads(count), self.turns, self._hosts.move)
        show(f"{title}, {self._options.gbit:g} Gbit/s", results, [against], self._console)
