"""Compare links that are slowed to an inventory's proportions with the nominal times.

python benchmarks/emulated_links.py

The inventory has two nodes of two devices, with a fast link inside a node and a network between
nodes that is slower by a given ratio. First, four processes make bare transfers. Then the command
trains models so small that steps mostly wait for the network, in turns without and with
`launcher.link_speed=true`. The nominal time follows from the bandwidth that each run measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from whale_train.runtime.comms.process_groups import join, leave
from whale_train.runtime.emulate.emulated_links import EmulatedLinks, wire_bytes

RANKS = 4
WARM_UP = 4  # number of first steps that do not count
MICRO_BATCHES = 4
BATCH, SEQUENCE, WIDTH = 8, 64, 256
PIPELINE = f"{{pipeline: {{stages: 4, schedule: 1f1b, micro_batches: {MICRO_BATCHES}}}}}"


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=14, help="of a run")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(_bare_transfers(24.0))
    console.print(_steps(options))


def _bare_transfers(ratio: float) -> Table:
    """Return a table of transfers on fast links and on links that are `ratio` times slower."""
    table = Table(title="A transfer of 4 MB, medians", title_justify="left")
    for name in ("transfer", "fast link", "slow link", "nominal", "slow / nominal"):
        table.add_column(name, justify="left" if name == "transfer" else "right")
    context = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        answers = context.SimpleQueue()
        ranks = [
            context.Process(target=_transfers, args=(folder, rank, ratio, answers))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        seconds = answers.get()
        for process in ranks:
            process.join()
    for name, (fast_s, slow_s, nominal_s) in seconds.items():
        table.add_row(name, *map(_ms, (fast_s, slow_s, nominal_s)), f"{slow_s / nominal_s:.2f}")
    return table


def _transfers(folder: str, rank: int, ratio: float, answers: Any) -> None:
    """Measure the transfers as rank `rank`.

    folder: the folder in which ranks meet.
    rank: the rank.
    ratio: the slowdown of the slow links.
    answers: the queue to which rank 0 adds the (fast, slow, nominal) seconds of each transfer, by
        name.
    """
    torch.set_num_threads(1)
    nodes = [i // 2 for i in range(RANKS)]
    links = EmulatedLinks([[1.0 if i == j else 1 / ratio for j in nodes] for i in nodes])
    join(f"file://{folder}/meet", rank, RANKS, torch.device("cpu"), links=links)
    inside = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    value = torch.zeros(1 << 20)
    half = torch.zeros(1 << 19)

    def message(group: dist.ProcessGroup, peer: int) -> None:
        """Send `value` from the lower rank of the pair to the other, and one number back.

        The answer makes the sender wait until the message has arrived.
        """
        if rank < peer:
            dist.send(value, peer, group)
            dist.recv(value[:1], peer, group)
        else:
            dist.recv(value, peer, group)
            dist.send(value[:1], peer, group)

    def all_reduce(group: dist.ProcessGroup, peer: int) -> None:
        dist.all_reduce(value, group=group)

    def all_gather(group: dist.ProcessGroup, peer: int) -> None:
        dist.all_gather_single(value, half, group=group)

    bytes_s = links.full_bytes_s
    assert bytes_s is not None
    kinds = {
        "all-reduce": (all_reduce, wire_bytes("allreduce", ([value],), 2)),
        "all-gather": (all_gather, wire_bytes("all_gather_single", (value, half), 2)),
        "message": (message, wire_bytes("send", ([value], 1, 0), 2)),
    }
    seconds = {}
    for name, (transfer, moved) in kinds.items():
        fast = _median_s(transfer, inside, rank ^ 1)
        slow = _median_s(transfer, across, rank ^ 2)
        seconds[name] = fast, slow, moved * ratio / bytes_s
    if rank == 0:
        answers.put(seconds)
    leave()


def _median_s(
    transfer: Callable[[dist.ProcessGroup, int], None], group: dist.ProcessGroup, peer: int
) -> float:
    """Return the median seconds of twelve transfers in `group`, after three that do not count."""
    taken = []
    for _ in range(15):
        dist.barrier()
        started = perf_counter()
        transfer(group, peer)
        taken.append(perf_counter() - started)
    return median(taken[3:])


@dataclass(frozen=True)
class Row:
    """A strategy, with the links on which it is measured.

    name: name in the table.
    overrides: overrides of the command.
    ratio: the bandwidth of a fast link divided by that of the network.
    moved: maps the bytes of a rank's parameters to the bytes that go over the network one after
        another in a step.
    """

    name: str
    overrides: tuple[str, ...]
    ratio: float
    moved: Callable[[float], float]


ROWS = (
    Row("copies: the sum of gradients", ("strategy=dp",), 24.0, lambda size: size * 3 / 2),
    # The values of all micro-batches, and the gradient of the last. Other gradients overlap with
    # the values.
    Row(
        f"pipeline of 4, {MICRO_BATCHES} micro-batches",
        (f"strategy.graph={PIPELINE}",),
        600.0,
        lambda _: 4 * BATCH * SEQUENCE * WIDTH * (MICRO_BATCHES + 1) / MICRO_BATCHES,
    ),
)


def _steps(options: argparse.Namespace) -> Table:
    """Return a table of every row's steps, with fast and with slow links."""
    table = Table(title="A step of GPT, AdamW, medians of a run", title_justify="left")
    names = ("all fast", "slow links", "longer by", "nominal", "longer / nominal", "full MB/s")
    for name in ("strategy", "ratio", *names):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for row in ROWS:
        for _ in range(options.rounds):
            fast, _, _ = _run(row, options.steps, slowed=False)
            slow, parameter_bytes, bytes_s = _run(row, options.steps, slowed=True)
            nominal = row.moved(parameter_bytes) * row.ratio / bytes_s
            cells = map(_ms, (fast, slow, slow - fast, nominal))
            words = (f"{(slow - fast) / nominal:.2f}", f"{bytes_s / 1e6:.0f}")
            table.add_row(row.name, f"{row.ratio:g}", *cells, *words)
    return table


def _run(row: Row, steps: int, slowed: bool) -> tuple[float, float, float]:
    """Return the median step of a run in seconds, the parameters of a rank in bytes, and the full
    bandwidth in bytes/s.

    The bandwidth is 0 if links are not `slowed`. Exits the process where the run fails.
    """
    link = f"{{bandwidth_bytes_s: {row.ratio}e9, latency_s: 1e-6}}"
    nodes = ", ".join([f"{{devices: 2, device: v100_sxm2_32gb, link: {link}}}"] * 2)
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "whale_train.launcher.cli", *row.overrides),
            *("model=gpt", f"model.width={WIDTH}", "model.depth=4", f"train.global_batch={BATCH}"),
            *(f"model.sequence_length={SEQUENCE}", f"data.sequence_length={SEQUENCE}"),
            *("hardware=v100_p100_mix", f"hardware.nodes=[{nodes}]"),
            "hardware.network={bandwidth_bytes_s: 1e9, latency_s: 1e-5}",
            *("launcher=emulate", f"launcher.link_speed={str(slowed).lower()}"),
            *(f"train.steps={steps}", f"hydra.run.dir={run_dir}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((run_dir / "summary.json").read_text())
        plan = json.loads((run_dir / "plan.json").read_text())
    parameter_bytes = plan["ranks"][0]["memory_bytes"]["parameters"]
    seconds = [json.loads(line)["step_time_s"] for line in lines[WARM_UP:]]
    return median(seconds), parameter_bytes, summary.get("full_bandwidth_bytes_s", 0.0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


if __name__ == "__main__":
    main()
