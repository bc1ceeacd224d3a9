"""Modules split beside copies, between hosts: against copies of all, and a split of all.

sudo python benchmarks/parts.py

The hosts are network namespaces of this machine (hosts.py).
"""

import argparse
import tempfile
from pathlib import Path

import sides
from hosts import Hosts
from interleave import Turns, interleaved, show
from rich.console import Console

from whale_train.runtime.process.fork_server import num_threads, preload

STRATEGIES = {
    "copies": "strategy=dp",
    "MLPs beside copies": (
        'strategy.graph=[{replicate: {}}, {split: {modules: ["*.expand", "*.contract"]}}]'
    ),
    "all weights beside copies": "strategy.graph=[{replicate: {}}, {split: {dim: tensor}}]",
    "split by sequence": "strategy=split_sequence",
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--hosts", type=int, default=2, help="of a rank each")
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of a host's link, Gbit/s")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="sequences a host")
    parser.add_argument("--rounds", type=int, default=5, help="turns a side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn")
    options = parser.parse_args()
    hosts = Hosts.make(options.hosts, options.gbit)  # before there are threads
    preload()
    console = Console(width=150)
    measured = hosts.measured_gbit_s()
    console.print(f"{options.hosts} hosts at {options.gbit:g} Gbit/s; measured {measured:.2f}")
    turns = Turns(options.rounds, options.steps)
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        found = []
        for name, strategy in STRATEGIES.items():
            asked = [
                *("model=gpt", f"model.width={options.width}", f"model.depth={options.depth}"),
                *(
                    f"model.heads={options.width // 64}",
                    f"model.sequence_length={options.sequence}",
                ),
                *("data=text", f"data.sequence_length={options.sequence}", strategy),
                *("optimizer=sgd", "optimizer.lr=0.01", "optimizer.schedule=constant"),
                *("hardware=cpu", f"hardware.devices={options.hosts}"),
                f"train.global_batch={options.batch * options.hosts}",
            ]
            found.append(sides.ours(name, *sides.resolved(asked, turns.total_steps), Path(folder)))
        threads = num_threads(options.hosts)
        results = interleaved(found, options.hosts, threads, turns, hosts.move)
    words = (
        f"GPT of {options.width} x {options.depth}, {options.batch * options.sequence} tokens a "
    )
    show(f"{words}host, {options.gbit:g} Gbit/s", results, ["copies"], console)


if __name__ == "__main__":
    main()
