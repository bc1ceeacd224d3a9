"""Measure how long a step waits for its batch when reading a batch is slow.

    python benchmarks/prefetch.py --read-ms 20

One rank trains the default model in turns on two datasets: one in memory, and the same one behind a
reader that sleeps for the given time. A thread prefetches batches, so a step should take the same
time on both. The first steps of a turn do not count, since their batches were read during the other
dataset's turn.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from sides import CPU, Ours, resolved

from whale_train.data.dataset import Batch, Dataset, Indices
from whale_train.runtime.comms.process_groups import file_rendezvous, join, leave
from whale_train.runtime.process import rank_main as worker

_SKIPPED = 3  # first steps of a turn: their batches were prefetched, or their reading had begun


class Slow:
    """A dataset that waits `seconds` before it reads a batch of another dataset."""

    def __init__(self, dataset: Dataset, seconds: float) -> None:
        self._dataset, self._seconds = dataset, seconds

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        time.sleep(self._seconds)
        return self._dataset.samples(indices, draws)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--read-ms", type=float, default=20.0, help="to read a batch")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    options = parser.parse_args()
    total = 2 * options.rounds * options.steps
    overrides = ["hardware=cpu", "hardware.devices=1", "train.global_batch=8", "model.width=64"]
    request, plan = resolved(overrides, total)
    prepared = worker.prepare(request)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        join(file_rendezvous(run_dir), 0, 1, CPU)
        slow = Slow(prepared.data.training, options.read_ms / 1e3)
        datasets: dict[str, Callable[[], Any]] = {
            "there at once": lambda: prepared,
            f"{options.read_ms:g} ms a batch": lambda: replace(
                worker.prepare(request), data=replace(prepared.data, training=slow)
            ),
        }
        sides = {}
        for number, (name, prepare) in enumerate(datasets.items()):
            (run_dir / str(number)).mkdir()
            sides[name] = Ours(run_dir / str(number), plan, prepare(), 0)
        times: dict[str, list[float]] = {name: [] for name in sides}
        done = dict.fromkeys(sides, 0)
        for _ in range(options.rounds):
            for name, side in sides.items():
                for place in range(options.steps):
                    started = time.perf_counter()
                    side.step(done[name], grad_norm=True)
                    done[name] += 1
                    if place >= _SKIPPED:
                        times[name].append(time.perf_counter() - started)
        del sides
        leave()
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("dataset", "step", "longer by"):
        table.add_column(column, justify="left" if column == "dataset" else "right")
    first = median(next(iter(times.values())))
    for name, seconds in times.items():
        step = median(seconds)
        table.add_row(name, f"{step * 1e3:.1f} ms", f"{(step - first) * 1e3:+.1f} ms")
    Console().print(table)


if __name__ == "__main__":
    main()
