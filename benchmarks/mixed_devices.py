"""Compare shares by hardware with even shares, on CPU processes that emulate unequal devices.

python benchmarks/mixed_devices.py

Every run is a run of the command with `launcher.device_speed=true`: ranks have the relative speeds
of their devices (runtime/emulate/throttle.py). The two kinds of runs in a row take turns. The
devices' speeds bound the gain: for replicas, it is at most the mean speed divided by the slowest
speed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

WARM_UP = 4  # steps that do not count
PIPELINE = "{pipeline: {stages: 4, schedule: 1f1b, micro_batches: 8}}"
PAPER = ("hardware=v100_p100_mix",)


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--rounds", type=int, default=3, help="runs of each of the two")
    parser.add_argument("--steps", type=int, default=12, help="of a run")
    parser.add_argument("--link-speed", action="store_true", help="slow links, too")
    parser.add_argument("--parts", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    table = Table(title="GPT, AdamW, medians of all steps", title_justify="left")
    for name in ("devices", "strategy", "even", "by hardware", "times as fast"):
        table.add_column(name, justify="left" if name in ("devices", "strategy") else "right")
    for name in options.parts:
        devices, strategy, overrides = ROWS[name]
        seconds: dict[str, list[float]] = {"even": [], "hardware": []}
        for _ in range(options.rounds):
            for balance, step_times in seconds.items():
                asked = [*overrides, f"strategy.balance={balance}"]
                asked += ["launcher.link_speed=true"] * options.link_speed
                step_times += steps_of(asked, options.steps)
        even, aware = median(seconds["even"]), median(seconds["hardware"])
        cells = (f"{even * 1e3:.0f} ms", f"{aware * 1e3:.0f} ms", f"{even / aware:.2f}")
        table.add_row(devices, strategy, *cells)
    Console(width=110).print(table)


def two_speeds(fast: int, slow: int, ratio: float) -> str:
    """Return the override for an inventory of two nodes, one of fast and one of slow devices.

    fast, slow: number of devices of each node.
    ratio: FLOP/s of a fast device divided by FLOP/s of a slow one.
    """
    nodes = ", ".join(
        f"{{devices: {count}, link: nvlink2, device: {{name: gpu_{speed:g}, "
        f"flops: {{fp32: {speed:g}e12}}, memory_bytes: 16e9, memory_bandwidth_bytes_s: 9e11}}}}"
        for count, speed in ((fast, ratio), (slow, 1.0))
    )
    return f"hardware.nodes=[{nodes}]"


def gpt(width: int, depth: int, batch: int) -> tuple[str, ...]:
    return (
        *("model=gpt", f"model.width={width}", f"model.depth={depth}"),
        f"train.global_batch={batch}",
    )


ROWS = {
    "copies": (
        *("2 of speed 2, 2 of speed 1", "dp"),
        (*gpt(256, 4, 96), "strategy=dp", *PAPER, two_speeds(2, 2, 2.0)),
    ),
    "pipeline": (
        *("2 of speed 2, 2 of speed 1", "pipeline of 4"),
        (*gpt(256, 12, 32), f"strategy.graph={PIPELINE}", *PAPER, two_speeds(2, 2, 2.0)),
    ),
    "paper": (
        *("8 V100, 8 P100", "dp"),
        (*gpt(256, 2, 1664), "strategy=dp", *PAPER),
    ),
}


def steps_of(overrides: list[str], steps: int) -> list[float]:
    """Run the command, and return the seconds of each step after the warm-up. Exits the process
    where the command fails."""
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "whale_train.launcher.cli", *overrides),
            *("launcher=emulate", "launcher.device_speed=true", f"train.steps={steps}"),
            f"hydra.run.dir={run_dir}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_time_s"] for line in lines[WARM_UP:]]


if __name__ == "__main__":
    main()
