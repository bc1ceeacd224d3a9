"""Train a model of three times the memory that it may have, against the same by hand.

    python benchmarks/eight_gigabytes.py             # 1.5 B parameters in 8 GB, and ours in 3 GB
    python benchmarks/eight_gigabytes.py --small     # 0.1 B parameters in 1.7 GB, and in 1.3 GB

Both sides train a GPT in fp32 with AdamW, each in a control group of its own whose memory is
limited. Ours is the command with `recompute: auto` and an `offload` of which everything is `auto`
and which names a folder: the plan finds what to recompute and what to keep in files. By hand it is
torch's checkpoint around every block and DeepSpeed's ZeRO 3 with optimizer and parameters in files
(`offload_by_hand.py`). Initial weights, batches and steps are the same, so losses are equal.

The sides take turns. `anonymous` is the peak of what processes hold: their own memory, and what
they share with each other. `with page cache` is the peak that the kernel counts, which has the
pages of files that were read as well, and is near the limit wherever files are read. The script
needs root, a writable hierarchy of control groups, libaio, and room for 20 bytes a parameter in the
folder of temporary files.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from sides import all_batches, resolved

from whale_train.kernel_cache import VARIABLE, kernel_cache

GB = 1e9
INTERVAL_S = 0.05  # between two looks at the memory of a group
DEADLINE_S = 3000.0
BY_HAND = Path(__file__).with_name("offload_by_hand.py")
SIDES = ("ours", "by hand", "ours in less")
OPTIMIZER = {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True)
class Case:
    """What is trained, and in which memory.

    width, depth, heads: sizes of the GPT.
    limit_bytes: the memory limit of a side's control group.
    less_bytes: the limit of a further run of ours, in which by hand does not fit.
    """

    width: int
    depth: int
    heads: int
    limit_bytes: float
    less_bytes: float


LARGE = Case(1600, 49, 25, 8.0 * GB, 3.0 * GB)
SMALL = Case(1024, 8, 16, 1.7 * GB, 1.3 * GB)


@dataclass(frozen=True)
class Trained:
    """One run of a side.

    losses, seconds: of each step.
    anonymous_bytes: the peak of the group's anonymous and shared memory.
    counted_bytes: the peak that the kernel counted, with page cache.
    """

    losses: Sequence[float]
    seconds: Sequence[float]
    anonymous_bytes: int
    counted_bytes: int


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=words)
    parser.add_argument("--small", action="store_true", help="a model of 0.1 B parameters")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--batch", type=int, default=2, help="samples of a step")
    parser.add_argument("--sequence", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options = parser.parse_args()
    case = SMALL if options.small else LARGE
    limits = dict.fromkeys(SIDES, case.limit_bytes) | {"ours in less": case.less_bytes}
    runs: dict[str, list[Trained]] = {side: [] for side in options.sides}
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as name:
        folder = Path(name)
        settings = settings_of(case, options, folder)
        # A compiler needs more memory than some groups have.
        compiling = [sys.executable, str(BY_HAND), "compile"]
        subprocess.run(compiling, env=environment(), stdout=subprocess.DEVNULL, check=True)
        for number in range(options.rounds):
            for side in options.sides:
                place = folder / f"{side.replace(' ', '-')}-{number}"
                place.mkdir()
                train = train_by_hand if side == "by hand" else train_ours
                with group(f"{os.getpid()}-{place.name}", limits[side]) as limited:
                    runs[side].append(train(settings, place, limited))
                remove(place)
    show(case, limits, runs)


def settings_of(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what both sides train, and write their batches into `folder`."""
    data = (f"data.sequence_length={options.sequence}", "data=text", "data.max_bytes=100000")
    shape = (f"model.sequence_length={options.sequence}", f"train.global_batch={options.batch}")
    common = ["model=gpt", *data, *shape, "seed=5"]
    # A tiny model under the same data: batches do not depend on the model.
    request, plan = resolved([*common, "hardware=cpu", "hardware.devices=1"], options.steps)
    batches = folder / "batches.pt"
    torch.save(all_batches(request, plan, options.steps)[0], batches)
    model = {"width": case.width, "depth": case.depth, "heads": case.heads}
    return {
        "overrides": [
            *common,
            *(f"model.{key}={value}" for key, value in model.items()),
            *("model.init=sharded", "train.precision=fp32", f"train.steps={options.steps}"),
            *("optimizer=adamw", *(f"optimizer.{key}={x}" for key, x in OPTIMIZER.items())),
            *("train.grad_norm=false", "checkpoint.final=false"),
        ],
        "model": {**model, "vocab_size": 257, "sequence_length": options.sequence},
        "optimizer": OPTIMIZER,
        "batch": options.batch,
        "batches": str(batches),
        "seed": 5,
    }


def train_ours(settings: Mapping[str, Any], place: Path, limited: Path) -> Trained:
    """Train by the command, in the control group `limited`, with files in the folder `place`."""
    (place / "hardware").mkdir()
    (place / "state").mkdir()
    disks = os.statvfs(place)
    node = {
        "devices": 1,
        "device": "cpu_process",
        "link": "shared_memory",
        "nvme": {
            "bytes": disks.f_bavail * disks.f_frsize,
            "read_bytes_s": 1e9,
            "write_bytes_s": 1e9,
        },
    }
    inventory = json.dumps({"nodes": [node]})  # which is YAML too
    (place / "hardware" / "limited.yaml").write_text(inventory + "\n")
    offload = "{optimizer: auto, parameters: auto, activations: auto, path: FOLDER}"
    offload = offload.replace("FOLDER", str(place / "state"))
    run_dir = place / "run"
    command = [
        *(sys.executable, "-m", "whale_train.launcher.cli", "--config-dir", str(place)),
        *("hardware=limited", f"hydra.run.dir={run_dir}", *settings["overrides"]),
        f"strategy.graph={{replicate: {{recompute: auto, offload: {offload}}}}}",
    ]
    peaks = run_in(limited, command, place / "output")
    plan = json.loads((run_dir / "plan.json").read_text())
    for decision in plan["decisions"]:
        print(f"plan: {decision['key']}: {decision['chosen']}: {decision['reason']}"[:400])
    planned = plan["ranks"][0]["memory_bytes"]["total"]
    print(f"plan: {planned / GB:.2f} GB, {plan['predicted']['step_time_s']:.1f} s a step")
    lines = [json.loads(x) for x in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    return Trained([x["loss"] for x in lines], [x["step_time_s"] for x in lines], *peaks)


def train_by_hand(settings: Mapping[str, Any], place: Path, limited: Path) -> Trained:
    """Train by `offload_by_hand.py`, as `train_ours`."""
    (place / "state").mkdir()
    results = place / "results"
    given = {**settings, "folder": str(place / "state"), "results": str(results)}
    (place / "settings.json").write_text(json.dumps(given))
    command = [sys.executable, str(BY_HAND), str(place / "settings.json")]
    peaks = run_in(limited, command, place / "output")
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return Trained([x["loss"] for x in lines], [x["seconds"] for x in lines], *peaks)


def run_in(limited: Path, command: Sequence[str], output: Path) -> tuple[int, int]:
    """Run a command in the control group `limited`, and return the peaks of the group's anonymous
    memory and of what the kernel counts, in bytes. Exits the process where the command fails."""
    joins = f'echo $$ > {limited}/cgroup.procs; exec "$@"'
    with output.open("w") as file:
        process = subprocess.Popen(
            ["sh", "-c", joins, "-", *command], stdout=file, stderr=file, env=environment()
        )
        watch = Watch(limited)
        looking = threading.Thread(target=watch.run)
        looking.start()
        try:
            status = process.wait(DEADLINE_S)
        except BaseException:
            process.terminate()  # the command then ends its ranks
            process.wait()
            raise
        finally:
            watch.stop()
            looking.join()
    if status:
        ended = "\n".join(output.read_text(errors="replace").splitlines()[-40:])
        held = f"{watch.anonymous_bytes / GB:.2f} GB anonymous at the peak"
        sys.exit(f"{' '.join(command)} ended with status {status} ({held}):\n{ended}")
    return watch.anonymous_bytes, counted(limited)


class Watch:
    """An observer of the anonymous memory of a control group, which looks until `stop`.

    anonymous_bytes: the peak of anonymous and shared memory so far.
    """

    def __init__(self, limited: Path) -> None:
        self._statistics = limited / "memory.stat"
        self._ended = threading.Event()
        self.anonymous_bytes = 0

    def run(self) -> None:
        """Observe the group until `stop` is called. To be run in a thread."""
        while not self._ended.wait(INTERVAL_S):
            with suppress(OSError):
                lines = self._statistics.read_text().splitlines()
                amounts = dict(line.split() for line in lines)
                # The first version of control groups says `rss`, the second `anon`.
                held = int(amounts.get("anon", amounts.get("rss", 0)))
                held += int(amounts.get("shmem", 0))
                self.anonymous_bytes = max(self.anonymous_bytes, held)

    def stop(self) -> None:
        self._ended.set()


def counted(limited: Path) -> int:
    """Return the peak of the memory that the kernel counts for a control group, in bytes; 0 where
    it does not say it."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (limited / name).exists():
            return int((limited / name).read_text())
    return 0


@contextmanager
def group(name: str, limit_bytes: float) -> Iterator[Path]:
    """Make a control group with a memory limit, and yield its folder. It is removed afterwards.

    Both versions of control groups are supported. Exits the process where this user cannot make
    one.
    """
    root = Path("/sys/fs/cgroup")
    root, limit = (
        (root / "memory", "memory.limit_in_bytes")
        if (root / "memory").is_dir()
        else (root, "memory.max")
    )
    folder = root / f"whale-train-{name}"
    try:
        folder.mkdir()
    except OSError as error:
        sys.exit(f"no control group can be made in {root} ({error.strerror}); run this as root")
    try:
        try:
            (folder / limit).write_text(str(int(limit_bytes)))
            (folder / "cgroup.procs").read_text()
        except OSError as error:
            sys.exit(f"{folder / limit} cannot be written ({error.strerror}); run this as root")
        yield folder
    finally:
        remove_group(folder)


def remove_group(folder: Path) -> None:
    """Remove a control group, after processes that a failed run has left in it have ended."""
    for _ in range(100):
        with suppress(ProcessLookupError):
            for process in (folder / "cgroup.procs").read_text().split():
                os.kill(int(process), signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except OSError:  # a process is about to end
            time.sleep(0.1)
    print(f"{folder} could not be removed", file=sys.stderr)


def remove(place: Path) -> None:
    """Remove the state files of a run, of which the next one needs the room."""
    for path in sorted(place.rglob("*.swp")):
        path.unlink()


def environment() -> dict[str, str]:
    """Return the environment of both sides, which have a thread a core and the same kernels."""
    cores = len(os.sched_getaffinity(0))
    # Two versions of ninja would compile each other's kernels again.
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # What malloc keeps of freed blocks is memory too.
    kernels = {VARIABLE: str(kernel_cache()), "PATH": tools, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return {**os.environ, **kernels, "OMP_NUM_THREADS": str(cores)}


def show(case: Case, limits: Mapping[str, float], runs: Mapping[str, Sequence[Trained]]) -> None:
    """Print the losses of each side and a table of its steps and memory."""
    console = Console(width=120, highlight=False)
    for side, trained in runs.items():
        for run in trained:
            console.print(
                f"{side}: losses {', '.join(f'{x:.6f}' for x in run.losses)}; "
                f"seconds {', '.join(f'{x:.1f}' for x in run.seconds)}"
            )
    elements = 12 * case.width**2 * case.depth
    title = f"GPT of {elements / 1e9:.2f} B parameters, {16 * elements / GB:.1f} GB with AdamW"
    table = Table(title=title, title_justify="left", box=None)
    columns = ("side", "limit GB", "s a step", "anonymous GB", "with page cache GB", "last loss")
    for column in columns:
        table.add_column(column, justify="left" if column == "side" else "right")
    for side, trained in runs.items():
        seconds = median(x for run in trained for x in run.seconds[1:])
        anonymous = max(run.anonymous_bytes for run in trained)
        most = max(run.counted_bytes for run in trained)
        row = (f"{limits[side] / GB:.1f}", f"{seconds:.2f}")
        row += (f"{anonymous / GB:.2f}", f"{most / GB:.2f}")
        table.add_row(side, *row, f"{trained[-1].losses[-1]:.6f}")
    console.print(table)
    medians = {side: [median(x.seconds[1:]) for x in trained] for side, trained in runs.items()}
    others = medians.pop("by hand", [])
    for side, own in medians.items():
        if others:
            ratios = [by_hand / seconds for seconds, by_hand in zip(own, others, strict=True)]
            text = ", ".join(f"{x:.2f}" for x in ratios)
            console.print(f"{side} is {text} times as fast as by hand, by round")


if __name__ == "__main__":
    main()
