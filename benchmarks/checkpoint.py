"""Measure the cost of checkpoints to steps, and the speed of writing and reading a large state.

python benchmarks/checkpoint.py --gigabytes 1
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

DEADLINE_S = 1800.0
EVERY = 20  # steps between checkpoints
FEATURES = 512  # number of input features of the large state's head
GPT = (
    *("model=gpt", "model.width=320", "model.depth=8", "model.heads=8"),
    f"train.steps={5 * EVERY + EVERY // 2}",
)
_CHUNK = os.urandom(2**24)


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary one")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the large state")
    parser.add_argument("--rounds", type=int, default=3, help="turns of what is compared")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="whale-bench-", dir=options.folder))
    try:
        console.print(beside_steps(folder, options.ranks, options.rounds))
        console.print(large_state(folder, options.ranks, options.gigabytes, options.rounds))
    finally:
        shutil.rmtree(folder)


def beside_steps(folder: Path, ranks: int, rounds: int) -> Table:
    """Return a table of a GPT's steps: without checkpoints, with asynchronous checkpoints every
    EVERY steps, and with synchronous ones.

    folder: the folder of the runs.
    ranks: number of ranks.
    rounds: number of runs of each kind.
    """
    sides = {
        "no checkpoints": ("checkpoint.every=null",),
        "beside the steps": (f"checkpoint.every={EVERY}",),
        "before the next step": (f"checkpoint.every={EVERY}", "checkpoint.async=false"),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, more in sides.items():
            run_dir = folder / f"steps_{number}"
            summary = train(run_dir, ranks, *GPT, *more)
            # A run copies its state between steps. The time of a step leaves that out, and this
            # mean includes it.
            times[name].append(summary["trained_s"] / summary["steps"])
            shutil.rmtree(run_dir)
    table = Table("", title=f"GPT of 10 M, AdamW, {ranks} ranks, a checkpoint every {EVERY} steps")
    for column in ("mean step", "of that without"):
        table.add_column(column, justify="right")
    without = times["no checkpoints"]
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, without, strict=True)]
        table.add_row(name, f"{1e3 * median(seconds):.1f} ms", f"{median(ratios):.3f}")
    return table


def large_state(folder: Path, ranks: int, gigabytes: float, rounds: int) -> Table:
    """Return a table of the speeds of saving and resuming a large state, beside those of the disk.

    The disk is measured in turns with the state, on a file of the same size. All speeds are medians
    over `rounds`.

    folder: the folder of the runs and the file.
    ranks: number of ranks.
    gigabytes: size of the weights and Adam's moments, in GB.
    rounds: number of measurements.
    """
    classes = round(gigabytes * 1e9 / 12 / FEATURES)  # three values of 4 bytes each
    head = ("model=class_head", "data=classes", f"model.num_classes={classes}")
    head += ("train.grad_norm=false",)
    size, ours, its = 0, list[tuple[float, float]](), list[tuple[float, float]]()
    for number in range(rounds):
        saved, read = folder / f"saved_{number}", folder / f"read_{number}"
        train(saved, ranks, *head, "train.steps=1", "checkpoint.every=1")
        (text,) = (saved / "checkpoints.jsonl").read_text().splitlines()
        line = json.loads(text)
        size = line["bytes"]
        forget(saved)
        going_on = train(read, ranks, *head, "train.steps=2", f"train.resume={saved}")
        ours.append((line["seconds"], going_on["resumed_s"]))
        its.append(disk(folder / "file", size))
        shutil.rmtree(saved)
        shutil.rmtree(read)
    table = Table("", title=f"a state of {size / 1e9:.2f} GB, {ranks} ranks")
    for column in ("checkpoint", "the disk", "of the disk's speed"):
        table.add_column(column, justify="right")
    for name, one, other in (
        ("written", [x for x, _ in ours], [x for x, _ in its]),
        ("read", [x for _, x in ours], [x for _, x in its]),
    ):
        rates = [f"{size / median(seconds) / 1e6:,.0f} MB/s" for seconds in (one, other)]
        table.add_row(name, *rates, f"{median(other) / median(one):.2f}")
    return table


def train(run_dir: Path, ranks: int, *overrides: str) -> dict[str, Any]:
    """Run the command, and return the run's summary. Exits the process where the command fails."""
    command = [sys.executable, "-m", "whale_train.launcher.cli", "strategy=dp", "hardware=cpu"]
    command += [f"hardware.devices={ranks}", f"train.global_batch={2 * ranks}", *overrides]
    command += [f"hydra.run.dir={run_dir}", "checkpoint.final=false"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def disk(path: Path, size: int) -> tuple[float, float]:
    """Return the seconds to write a file of `size` bytes to the disk, and to read it back."""
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(_CHUNK)):
            file.write(_CHUNK)
        os.fsync(file.fileno())
    written_s = time.perf_counter() - started
    forget(path.parent)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(len(_CHUNK)):
            pass
    return written_s, time.perf_counter() - started


def forget(folder: Path) -> None:
    """Drop all files below `folder` from the page cache, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
