"""Measure the time from Enter to the first metrics: ours, and torchrun with a DeepSpeed script.

python benchmarks/startup.py --ranks 2 4 16
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("deepspeed_script.py")
DEADLINE_S = 600.0


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as name:
        folder = Path(name)
        # DeepSpeed and Python compile some code once on each machine. It is not part of the timing.
        by_hand(2, folder / "warm.txt")
        ours(2, folder / "warm")
        table = Table("ranks", title="From Enter to the first step's line, ZeRO 1, GPT")
        for column in ("whale-train", "torchrun + DeepSpeed", "times as fast"):
            table.add_column(column, justify="right")
        for ranks in options.ranks:
            pairs = [
                (ours(ranks, folder / f"{ranks}_{i}"), by_hand(ranks, folder / f"{ranks}_{i}.txt"))
                for i in range(options.repeats)
            ]
            ours_s, theirs = zip(*pairs, strict=True)
            ratio = f"{median(theirs) / median(ours_s):.2f}"
            table.add_row(str(ranks), spread(ours_s), spread(theirs), ratio)
    Console().print(table)


def ours(ranks: int, run_dir: Path) -> float:
    """Return the seconds from the start of the command to the first line of metrics.jsonl."""
    command = [sys.executable, "-m", "whale_train.launcher.cli"]
    command += ["model=gpt", "strategy=zero1", "hardware=cpu", f"hardware.devices={ranks}"]
    command += [f"train.global_batch={ranks}", "train.steps=3", f"hydra.run.dir={run_dir}"]
    return seconds_to_line(command, run_dir / "metrics.jsonl")


def by_hand(ranks: int, file: Path) -> float:
    """Return the seconds from the start of torchrun to the first line of the script's file."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(SCRIPT), str(file)]
    return seconds_to_line(command, file)


def seconds_to_line(command: list[str], file: Path) -> float:
    """Start `command`, wait for its end, and return the seconds until `file` had content.

    Exits the process where the command fails.
    """
    # torchrun's ranks have one thread each unless told otherwise.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while not (file.exists() and file.stat().st_size):
                if process.poll() is not None or time.perf_counter() - started > DEADLINE_S:
                    output.seek(0)
                    sys.exit(f"{' '.join(command)} wrote no line:\n{output.read()}")
                time.sleep(0.002)
            seconds = time.perf_counter() - started
            if process.wait(DEADLINE_S):
                output.seek(0)
                sys.exit(f"{' '.join(command)} failed:\n{output.read()}")
        finally:
            with suppress(ProcessLookupError):  # the group has torchrun's ranks as well
                os.killpg(process.pid, signal.SIGKILL)
    return seconds


def spread(seconds: tuple[float, ...]) -> str:
    return f"{median(seconds):.2f} s [{min(seconds):.2f}, {max(seconds):.2f}]"


if __name__ == "__main__":
    main()
