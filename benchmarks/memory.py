"""Measure the peak memory of ranks that hold parts of a model, and of a billion-parameter model.

python benchmarks/memory.py                 # every strategy against one process
python benchmarks/memory.py --parts billion # needs some 20 GiB

Every line is a run of the command, whose processes are observed from outside
(/proc/PID/smaps_rollup). *Own* is the memory that a rank has written and shares with no process:
weights, gradients, optimizer state, activations. It leaves out memory that a rank has inherited
unchanged from the host that forked it. *With files* adds the pages of mapped files that the rank
has read: its part of the initial weights, which the host keeps in one file for all ranks. RSS would
count both, and the inherited memory as well. The memory of the same run with a tiny model (Python,
torch, DeepSpeed) is subtracted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

PARTS = ("shares", "billion")
MIB, GIB = 2**20, 2**30
STRATEGIES = {
    "split": "{split: {}}",
    "pipeline": "{pipeline: {stages: RANKS, schedule: 1f1b, micro_batches: RANKS}}",
    "zero3": "{replicate: {zero: 3}}",
}
TINY = ("model.width=64", "model.depth=4")


@dataclass(frozen=True)
class Amount:
    """The memory of one process, in bytes.

    own: memory that the process has written and shares with no process.
    with_files: `own`, and the pages of mapped files that the process has read.
    part: the process's proportional share of memory (PSS), which can be summed over processes.
    """

    own: int
    with_files: int
    part: int


@dataclass
class Watch:
    """An observer of the memory of a run's processes, which looks repeatedly until `stop`.

    command: the process id of the command.
    interval_s: seconds between looks.
    ranks: the times (ns since the epoch) and amounts of each rank.
    highest_total_bytes: the largest total memory of all processes.
    low_bytes: the smallest available memory of the machine.
    first_bytes: the available memory of the machine at the first look.
    """

    command: int
    interval_s: float
    ranks: dict[int, list[tuple[int, Amount]]] = field(default_factory=dict)
    highest_total_bytes: int = 0
    low_bytes: int = 0
    first_bytes: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Observe the processes until `stop` is called. To be run in a thread."""
        self.first_bytes = self.low_bytes = available_bytes()
        while not self._ended.wait(self.interval_s):
            total = 0
            for pid in descendants(self.command):
                with suppress(OSError):  # the process has just ended
                    amount, name = amount_of(pid), Path(f"/proc/{pid}/comm").read_text().strip()
                    total += amount.part
                    if name.startswith("whale-rank-"):
                        seen = self.ranks.setdefault(int(name.rpartition("-")[2]), [])
                        seen.append((time.time_ns(), amount))
            self.highest_total_bytes = max(self.highest_total_bytes, total)
            self.low_bytes = min(self.low_bytes, available_bytes())

    def stop(self) -> None:
        self._ended.set()


@dataclass(frozen=True)
class Peaks:
    """The peaks of a run's memory.

    start: the highest amounts of any rank before the first step.
    steps: the highest amounts of any rank from the first step on.
    total_bytes: the largest total memory of all processes of the run.
    fell_bytes: the largest fall of the machine's available memory, in bytes.
    """

    start: Amount
    steps: Amount
    total_bytes: int
    fell_bytes: int


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=words)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["shares"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--billion-width", type=int, default=2048)
    parser.add_argument("--billion-depth", type=int, default=20)
    parser.add_argument("--interval", type=float, default=0.02, help="seconds between looks")
    options = parser.parse_args()
    console = Console(width=130)
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        if "shares" in options.parts:
            compare_shares(options, Path(folder), console)
        if "billion" in options.parts:
            measure_billion(options, Path(folder), console)


def compare_shares(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Print the memory of ranks under each strategy, beside that of one process with the whole
    model."""
    model = (f"model.width={options.width}", f"model.depth={options.depth}", "model.heads=8")
    table = Table(title=f"GPT of {elements(options.width, options.depth)}, AdamW, MiB a rank")
    table.title_justify = "left"
    columns = [
        name
        for phase in ("start-up", "steps")
        for kind in ("own", "with files")
        for name in (f"{phase}, {kind}", "of the whole")
    ]
    table.add_column("ours")
    for name in columns:
        table.add_column(name, justify="right")
    single_process: list[int] = []
    lines = [("single", 1)]
    lines += [(name, ranks) for ranks in options.ranks for name in options.strategies]
    for name, ranks in lines:
        given = measure(name, ranks, model, options, folder)
        empty = measure(name, ranks, TINY, options, folder)
        amounts = [
            given.start.own - empty.start.own,
            given.start.with_files - empty.start.with_files,
            given.steps.own - empty.steps.own,
            given.steps.with_files - empty.steps.with_files,
        ]
        single_process = single_process or amounts
        cells = []
        for amount, theirs in zip(amounts, single_process, strict=True):
            cells += [f"{amount / MIB:.0f}", f"{amount / theirs:.2f}"]
        table.add_row(f"{name}, {ranks} rank{'s' * (ranks > 1)}", *cells)
    console.print(table)


def measure_billion(options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Print the memory of one step of a billion-parameter model on two ranks."""
    width, depth = options.billion_width, options.billion_depth
    model = (f"model.width={width}", f"model.depth={depth}", "model.heads=16")
    table = Table(title=f"GPT of {elements(width, depth)} on 2 ranks, AdamW, one step, GiB")
    table.title_justify = "left"
    for name in ("ours", "largest rank, own", "all processes, with files", "available fell by"):
        table.add_column(name, justify="left" if name == "ours" else "right")
    for name in options.strategies:
        if name == "split":
            continue
        measured = measure(name, 2, model, options, folder, steps=1)
        own = max(measured.start.own, measured.steps.own)
        table.add_row(
            name, *(f"{x / GIB:.1f}" for x in (own, measured.total_bytes, measured.fell_bytes))
        )
    console.print(table)


def measure(
    strategy: str,
    ranks: int,
    model: tuple[str, ...],
    options: argparse.Namespace,
    folder: Path,
    steps: int | None = None,
) -> Peaks:
    """Run the command, and return the peaks of its memory. Exits the process where the command
    fails.

    strategy: a strategy of STRATEGIES, or the name of a strategy file.
    ranks: number of ranks.
    model: overrides of the model.
    options: the command line's options.
    folder: the folder of run directories.
    steps: number of steps; None for the number in the options.
    """
    run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
    graph = STRATEGIES.get(strategy, "").replace("RANKS", str(ranks))
    command = [
        *(sys.executable, "-m", "whale_train.launcher.cli", "model=gpt", *model),
        f"strategy.graph={graph}" if graph else f"strategy={strategy}",
        *("hardware=cpu", f"hardware.devices={ranks}", "optimizer=adamw"),
        *(f"train.steps={steps or options.steps}", "train.global_batch=4", "train.trace=true"),
        f"hydra.run.dir={run_dir}",
    ]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        watch = Watch(process.pid, options.interval)
        looking = threading.Thread(target=watch.run)
        looking.start()
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # the command then ends its ranks
            process.wait()
            raise
        finally:
            watch.stop()
            looking.join()
        if status:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{output.read()}")
    return peaks(watch, run_dir)


def peaks(watch: Watch, run_dir: Path) -> Peaks:
    """Return the peaks that `watch` observed, before and after the first step of each rank
    began."""
    before, after = [], []
    for rank, seen in watch.ranks.items():
        first = first_step_ns(run_dir, rank)
        before.append(highest([amount for at, amount in seen if at < first]))
        after.append(highest([amount for at, amount in seen if at >= first]))
    return Peaks(
        highest(before),
        highest(after),
        watch.highest_total_bytes,
        watch.first_bytes - watch.low_bytes,
    )


def highest(amounts: list[Amount]) -> Amount:
    """Return the largest of each amount, which may be from different times; zeros for an empty
    list."""
    rows = [(amount.own, amount.with_files, amount.part) for amount in amounts]
    return Amount(*(max(column) for column in zip((0, 0, 0), *rows, strict=True)))


def first_step_ns(run_dir: Path, rank: int) -> int:
    """Return the time at which a rank began its first step, in ns since the epoch, from the rank's
    timeline."""
    events = json.loads((run_dir / "trace" / f"rank_{rank}.json").read_text())["traceEvents"]
    return min(int(event["ts"] * 1e3) for event in events if event["ph"] == "X")


def amount_of(pid: int) -> Amount:
    """Return the memory of a process. Raises OSError when the process has ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    rollup = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    own = rollup["Private_Dirty"]
    return Amount(own, own + rollup["Rss"] - rollup["Anonymous"], rollup["Pss"])


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of a process and of all its descendants."""
    yield pid
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from descendants(int(child))


def available_bytes() -> int:
    """Return the available memory of this machine, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say MemAvailable")


def elements(width: int, depth: int) -> str:
    """Return the number of parameters in a GPT's blocks, as text: 12 x width^2 for each block."""
    count = 12 * width * width * depth
    return f"{count / 1e9:.2f} B" if count > 5e8 else f"{count / 1e6:.0f} M"


if __name__ == "__main__":
    main()
