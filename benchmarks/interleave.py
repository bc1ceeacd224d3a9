"""Time several sides fairly on a noisy machine, in turns, and print the table.

All ranks of all sides exist at the same time and run in turns of a few steps: A, B, C, A, B, C, ...
They are forked from one process that has imported everything. So the noise of the machine hits all
sides alike, and no side inherits another's memory or thread pools. A step takes as long as its
slowest rank. The ratio of two sides' median steps is computed for each round. The table has the
median ratio, and the quartiles as a measure of certainty.
"""

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from whale_train.runtime.comms.process_groups import join, leave
from whale_train.runtime.process.fork_server import serve
from whale_train.runtime.record.metrics import peak_memory_bytes

PR_SET_THP_DISABLE = 41  # from Linux's <sys/prctl.h>

Seconds = list[list[float]]  # by round and step


class Running(Protocol):
    """One rank of a running side."""

    def step(self, number: int, grad_norm: bool) -> None:
        """Run optimizer step `number`, counted from 0, with the gradient norm if `grad_norm`."""

    def loss(self) -> float:
        """Return the loss of this rank in the last step. The mean over the ranks is compared."""


@dataclass(frozen=True)
class Side:
    """One of the compared ways of training.

    name: name in the tables.
    start: sets the side up on a rank, given the rank's number. The rank has joined the side's
        process group (gloo).
    huge_pages: whether the side uses huge pages, which the host of our ranks turns on for torch
        (runtime/process/fork_server.py). All sides are forked from such a host. False turns huge
        pages off again, as is torch's default.
    """

    name: str
    start: Callable[[int], Running]
    huge_pages: bool


@dataclass(frozen=True)
class Turns:
    """Numbers of turns and steps.

    rounds: number of counted turns of a side.
    steps: number of timed steps in a turn, which follow one untimed step. A turn has them twice:
        without the gradient norm, and with it.
    warm_up: number of first turns that are not counted.
    """

    rounds: int
    steps: int
    warm_up: int = 1

    @property
    def total_steps(self) -> int:
        """Return the number of steps that a side runs in all turns."""
        return (self.rounds + self.warm_up) * (self.steps + 1) * 2


@dataclass(frozen=True)
class Timing:
    """The times of one side, in seconds, by round and step.

    seconds: wall-clock seconds of a step on the slowest rank.
    busy: CPU seconds of a step, as the mean over the side's ranks.
    """

    seconds: Seconds
    busy: Seconds

    @property
    def median_s(self) -> float:
        return median(second for turn in self.seconds for second in turn)

    @property
    def median_busy_s(self) -> float:
        return median(second for turn in self.busy for second in turn)

    def ratios(self, other: "Timing") -> list[float]:
        """Return, for each round, the median step of `other` divided by this side's."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return [median(theirs) / median(own) for own, theirs in pairs]


@dataclass(frozen=True)
class Result:
    """The result of one side.

    name: name of the side.
    plain: times without the gradient norm.
    with_norm: times with the gradient norm.
    memory_bytes: peak memory of the side's heaviest rank.
    loss: loss of the last step, which is equal for sides that train the same.
    """

    name: str
    plain: Timing
    with_norm: Timing
    memory_bytes: int
    loss: float


def interleaved(
    sides: Sequence[Side],
    ranks: int,
    threads: int,
    turns: Turns,
    move: Callable[[int], None] = lambda rank: None,
) -> list[Result]:
    """Run all sides in turns, and return their results in the order of `sides`.

    sides: the sides.
    ranks: number of ranks of each side.
    threads: number of threads of each rank.
    turns: numbers of turns and steps.
    move: called by every rank with its number, before it joins the process group.

    Exits the process where a rank fails.
    """
    # Rank r of a side passes the turn to rank r of the next side through a pipe.
    pipes = [[os.pipe() for _ in range(ranks)] for _ in sides]
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()

        def entry(run_dir: Path, number: int, world_size: int, prepared: None) -> None:
            index, rank = divmod(number, ranks)
            side = sides[index]
            torch.set_num_threads(threads)
            if not side.huge_pages:
                forgo_huge_pages()
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            move(rank)
            join(f"file://{folder}/meet_{index}", rank, ranks, torch.device("cpu"))
            running = side.start(rank)
            if index == 0:
                os.write(pipes[0][rank][1], b".")
            turn = (pipes[index][rank][0], pipes[(index + 1) % len(sides)][rank][1])
            result = _of_all_ranks(side.name, _take_turns(running, turns, *turn), running)
            if rank == 0:
                (folder / f"side_{index}.json").write_text(json.dumps(asdict(result)))
            # DistributedDataParallel's reducer must not hold the last reference to the process
            # group. Freed by it, with the GIL held, the group waits for gloo's threads, which wait
            # for the GIL.
            del running
            leave()

        status = serve(folder, ranks * len(sides), lambda: None, entry, os.getppid())
        for ends in (ends for row in pipes for ends in row):
            os.close(ends[0])
            os.close(ends[1])
        if status:
            failure = folder / "failure.json"
            text = json.loads(failure.read_text())["traceback"] if failure.exists() else status
            sys.exit(f"a rank failed: {text}")
        side_results = [
            json.loads((folder / f"side_{i}.json").read_text()) for i in range(len(sides))
        ]
    for values in side_results:
        values |= {key: Timing(**values[key]) for key in ("plain", "with_norm")}
    return [Result(**values) for values in side_results]


def forgo_huge_pages() -> None:
    """Turn transparent huge pages off for this process, if the system gives them on request.

    The process is then like one that has not asked for them. Under any other setting of the system,
    a request has no effect, and nothing is done.
    """
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[madvise]" in setting.read_text():
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _take_turns(running: Running, turns: Turns, before: int, after: int) -> list[Timing]:
    timings = [Timing([], []), Timing([], [])]  # without norm, with norm
    number = 0
    for turn in range(turns.warm_up + turns.rounds):
        os.read(before, 1)
        dist.barrier()
        for grad_norm, timing in zip((False, True), timings, strict=True):
            seconds, busy = [], []
            for _ in range(turns.steps + 1):
                started, busy_before = time.perf_counter(), time.process_time()
                running.step(number, grad_norm)
                seconds.append(time.perf_counter() - started)
                busy.append(time.process_time() - busy_before)
                number += 1
            if turn >= turns.warm_up:
                timing.seconds.append(seconds[1:])
                timing.busy.append(busy[1:])
        dist.barrier()
        os.write(after, b".")
    return timings


def _of_all_ranks(name: str, timings: list[Timing], running: Running) -> Result:
    together = []
    for timing in timings:
        seconds = torch.tensor(timing.seconds, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        busy = torch.tensor(timing.busy, dtype=torch.float64) / dist.get_world_size()
        dist.all_reduce(busy)
        together.append(Timing(seconds.tolist(), busy.tolist()))
    memory = torch.tensor(peak_memory_bytes(torch.device("cpu")))
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    loss = torch.tensor(running.loss(), dtype=torch.float64)
    dist.all_reduce(loss)
    plain, with_norm = together
    mean_loss = float(loss) / dist.get_world_size()
    return Result(name, plain, with_norm, int(memory), mean_loss)


def show(title: str, results: Sequence[Result], baselines: Sequence[str], console: Console) -> None:
    """Print two tables with a row for each side: without the gradient norm, and with it.

    title: start of the tables' titles.
    results: the results of all sides.
    baselines: names of the sides with which each side's speed is compared.
    console: prints the tables.
    """
    for words, key in (("without the gradient's norm", "plain"), ("with it", "with_norm")):
        table = Table(title=f"{title}, {words}", title_justify="left", title_style="bold")
        table.add_column("side")
        for column in ("step", "busy", "memory", "last loss"):
            table.add_column(column, justify="right")
        for name in baselines:
            table.add_column(f"times as fast as\n{name}", justify="right")
        timings = {result.name: getattr(result, key) for result in results}
        for result in results:
            timing: Timing = timings[result.name]
            cells = [f"{timing.median_s * 1e3:.1f} ms", f"{timing.median_busy_s * 1e3:.1f} ms"]
            cells += [f"{result.memory_bytes / 1e6:.0f} MB", f"{result.loss:.5f}"]
            for name in baselines:
                own = name == result.name
                cells.append("" if own else _spread(timing.ratios(timings[name])))
            table.add_row(result.name, *cells)
        console.print(table)


def _spread(ratios: list[float]) -> str:
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.3f} [{low:.2f}, {high:.2f}]"
