"""Compare sums of gradients over two hosts in one ring and in two levels, measured and as planned.

python benchmarks/hierarchical_sums.py

Four processes stand for two hosts of two devices, whose network is slower than the links inside by
a given ratio (`launcher.link_speed=true`). First, they make bare sums. Then the command trains a
model so small that steps mostly wait for the network, in turns with `train.all_reduce=flat` and
`hierarchical`. The planner prices both sums with the bandwidth that each run measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from whale_train.runtime.comms.hierarchical_sum import HierarchicalSum
from whale_train.runtime.comms.process_groups import join, leave
from whale_train.runtime.emulate.emulated_links import EmulatedLinks
from whale_train.strategies.cost.collectives import sum_time_s
from whale_train.strategies.cost.hierarchical_sum import hierarchical_sum_time_s
from whale_train.strategies.hardware.cluster import CPU_PROCESS, Cluster, Device, Link, Node

RANKS, WARM_UP = 4, 4  # first steps do not count
MEGABYTES = (0.25, 1.0, 4.0, 16.0)
SIDES = ("flat", "hierarchical")


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--ratio", type=float, default=24.0, help="of a link inside to the network")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=14, help="of a run")
    options = parser.parse_args()
    console = Console(width=130)
    console.print(_bare_sums(options.ratio))
    console.print(_steps(options))


def planned_s(num_bytes: float, bytes_s: float, ratio: float) -> dict[str, float]:
    """Return the planner's seconds, by side, of a sum of `num_bytes` over two hosts of two.

    bytes_s: bandwidth of the links inside hosts; the network's is `ratio` times lower. Emulated
        links have no latency.
    """
    process = Device(CPU_PROCESS, {}, 1.0, 1.0)
    host = Node((process, process), Link("inside", bytes_s, 0.0))
    cluster = Cluster("two hosts", (host, host), Link("network", bytes_s / ratio, 0.0))
    return {
        "flat": sum_time_s(cluster, range(RANKS), num_bytes),
        "hierarchical": hierarchical_sum_time_s(cluster, range(RANKS), num_bytes),
    }


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ("flat", "planned", "hierarchical", "planned", "gain", "planned gain")
    for name in (first, *columns):
        table.add_column(name, justify="right")
    return table


def _row(name: str, measured: dict[str, float], planned: dict[str, float]) -> tuple[str, ...]:
    """Return the cells of a row: for each side the measured and the planned time, and the gains."""
    times = [f"{1e3 * x[side]:.1f} ms" for side in SIDES for x in (measured, planned)]
    gains = [f"{x['flat'] / x['hierarchical']:.2f}x" for x in (measured, planned)]
    return (name, *times, *gains)


def _bare_sums(ratio: float) -> Table:
    """Return a table of bare sums of several sizes."""
    table = _table(f"A sum over two hosts of two, network {ratio:g} times slower, medians", "size")
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        answers = context.SimpleQueue()
        ranks = [
            context.Process(target=_sums, args=(folder, rank, ratio, answers))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        measured, bytes_s = answers.get()
        for process in ranks:
            process.join()
    for megabytes, seconds in measured.items():
        planned = planned_s(megabytes * 1e6, bytes_s, ratio)
        table.add_row(*_row(f"{megabytes:g} MB", seconds, planned))
    return table


def _sums(folder: str, rank: int, ratio: float, answers: Any) -> None:
    """Measure the sums as rank `rank`; rank 0 adds the seconds, by size and side, and the bandwidth
    of the links inside to the queue `answers`."""
    torch.set_num_threads(1)
    nodes = [i // 2 for i in range(RANKS)]
    relative = [[1.0 if i == j else 1 / ratio for j in nodes] for i in nodes]
    links = EmulatedLinks(relative, sharing={(0, 2): 2, (1, 3): 2})
    join(f"file://{folder}/meet", rank, RANKS, torch.device("cpu"), links=links)
    inside = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    levels = HierarchicalSum(inside, across)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "flat": dist.all_reduce,
        "hierarchical": lambda tensor: levels.begin(tensor).wait(),
    }
    seconds = {}
    for megabytes in MEGABYTES:
        tensor = torch.zeros(int(megabytes * 1e6 / 4))
        taken: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(12):
            for side in SIDES:
                dist.barrier()
                started = perf_counter()
                ways[side](tensor)
                taken[side].append(perf_counter() - started)
        seconds[megabytes] = {side: median(x[2:]) for side, x in taken.items()}
    if rank == 0:
        answers.put((seconds, links.full_bytes_s))
    leave()


def _steps(options: argparse.Namespace) -> Table:
    """Return a table of the steps of training, a row for each round."""
    title = "A step of GPT, medians of a run; planned: the sum of gradients alone"
    table = _table(title, "gradients")
    for _ in range(options.rounds):
        measured, planned = {}, {}
        for side in SIDES:
            measured[side], num_bytes, bytes_s = _run(side, options.ratio, options.steps)
            planned[side] = planned_s(num_bytes, bytes_s, options.ratio)[side]
        table.add_row(*_row(f"{num_bytes / 1e6:.1f} MB", measured, planned))
    return table


def _run(side: str, ratio: float, steps: int) -> tuple[float, float, float]:
    """Return the median step of a run in seconds, the gradients of a rank in bytes, and the
    bandwidth of links inside hosts in bytes/s. Exits the process where the run fails."""
    link = f"{{bandwidth_bytes_s: {ratio}e9, latency_s: 1e-6}}"
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "whale_train.launcher.cli", "strategy=dp", "optimizer=sgd"),
            *("model=gpt", "model.width=256", "model.depth=4", "model.sequence_length=16"),
            *("data.sequence_length=16", "train.global_batch=4", "hardware=v100_p100_mix"),
            f"hardware.nodes=[{{count: 2, devices: 2, device: v100_sxm2_32gb, link: {link}}}]",
            "hardware.network={bandwidth_bytes_s: 1e9, latency_s: 1e-5}",
            *("launcher=emulate", "launcher.link_speed=true", f"train.all_reduce={side}"),
            *("train.precision=fp32", f"train.steps={steps}", f"hydra.run.dir={run_dir}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((run_dir / "summary.json").read_text())
        plan = json.loads((run_dir / "plan.json").read_text())
    num_bytes = plan["ranks"][0]["memory_bytes"]["gradients"]
    seconds = [json.loads(line)["step_time_s"] for line in lines[WARM_UP:]]
    return median(seconds), num_bytes, summary["full_bandwidth_bytes_s"]


if __name__ == "__main__":
    main()
