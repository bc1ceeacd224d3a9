"""Measure on GPUs the utilisation, the largest model with offload, and errors of predictions.

    python benchmarks/gpu.py --out gpu.md

The script runs the command on this machine's GPUs, on one GPU by default, and prints a table for
each part. `--out` writes the tables as Markdown, with the date and the device, row by row as they
are measured:

* `mfu`: model FLOP/s utilisation of a GPT of 1 B parameters in bf16, uncompiled and compiled.
* `offload`: the largest GPT that is planned and trained with ZeRO 3 and all state on the host.
* `errors`: predicted and measured steps and memory, before and after calibrating.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from whale_train.machine.nvml import visible_gpus

SETTING_UP = 4  # number of first steps of a run that do not count
LENGTH = 2048
# Width, depth and heads by billions of parameters, as in Brown et al. 2020 (arXiv 2005.14165),
# table 2.1, and between its rows.
SIZES: Mapping[int, tuple[int, int, int]] = {
    1: (2048, 20, 16),
    3: (2560, 32, 32),
    7: (4096, 32, 32),
    13: (5120, 40, 40),
    20: (6144, 44, 48),
    30: (7168, 48, 56),
    40: (8192, 50, 64),
}
STRATEGIES = ("dp", "zero2", "zero3")
TRAINING = ("optimizer=adamw", "optimizer.lr=1e-4", "checkpoint.final=false")


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="samples a GPU, of 2,048 tokens")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--out", type=Path, help="a file for the tables, as Markdown")
    options = parser.parse_args()
    gpus = visible_gpus()
    if len(gpus) < options.gpus:
        sys.exit(f"there are {len(gpus)} GPUs here, and --gpus={options.gpus}")
    console = Console(width=140)
    said = [f"{options.gpus} x {gpus[0].name}, {time.strftime('%Y-%m-%d')}"]
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        measured = Measured(Path(folder), options.gpus)
        for part in options.parts:
            title, columns, measure = PARTS[part]
            said += ["", title, "", _line(columns), _line(["---"] * len(columns))]
            rows = []
            for row in measure(measured, options):
                rows.append(row)
                said.append(_line(row))
                console.print(*row, sep="  ", style="dim")
                if options.out:  # at once, since a later row may fail
                    options.out.write_text("\n".join(said) + "\n")
            _print(console, title, columns, rows)


Rows = Iterator[list[str]]


class Measured:
    """A runner of the command on `gpus` GPUs, with a directory below `folder` for each run."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self._folder, self._gpus, self._count = folder, gpus, 0
        # With an empty folder of calibrations, the first runs use the catalogue's figures.
        self._environment = os.environ | {"WHALE_TRAIN_CALIBRATIONS": str(folder / "calibrations")}

    def run(self, *overrides: str) -> tuple[Path, str]:
        """Run the command. Return the run directory, and the error of a run that failed, else
        ''."""
        self._count += 1
        run_dir = self._folder / f"run_{self._count}"
        place = ("hardware=local", f"hardware.devices={self._gpus}", f"hydra.run.dir={run_dir}")
        done = subprocess.run(
            [sys.executable, "-m", "whale_train.launcher.cli", *place, *overrides],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return run_dir, "" if done.returncode == 0 else done.stderr.strip()[-600:]


def gpt(billions: int, batch: int) -> list[str]:
    """Return the overrides for a GPT of `billions` of parameters, in bf16, and a global batch."""
    width, depth, heads = SIZES[billions]
    return [
        *("model=gpt", f"model.width={width}", f"model.depth={depth}", f"model.heads={heads}"),
        *("model.vocab_size=50304", f"model.sequence_length={LENGTH}"),
        *(f"data.sequence_length={LENGTH}", f"train.global_batch={batch}"),
        *("train.precision=bf16", *TRAINING),
    ]


def utilisation(measured: Measured, options: argparse.Namespace) -> Rows:
    """Yield a row on the model FLOP/s utilisation of the uncompiled and of the compiled model."""
    for compiled in (False, True):
        run_dir, failed = measured.run(
            *gpt(1, options.batch * options.gpus),
            *(f"train.steps={options.steps}", f"train.compile={compiled}"),
        )
        name = "compiled" if compiled else "not compiled"
        if failed:
            yield [name, failed, "", "", "", ""]
            continue
        lines, summary = _metrics(run_dir), _read(run_dir / "summary.json")
        yield [
            name,
            f"{_middle(lines, 'step_time_s') * 1e3:.1f} ms",
            f"{_middle(lines, 'tokens_per_s'):,.0f}",
            f"{_middle(lines, 'model_flops_utilisation'):.1%}",
            f"{max(summary['peak_memory_bytes']) / 1e9:.1f} GB",
            f"{sum(summary.get('compiled_s', {}).values()):.0f} s",
        ]


def largest(measured: Measured, options: argparse.Namespace) -> Rows:
    """Yield a row for each GPT tried with offload, from the largest down to the first that
    trains."""
    for billions in sorted(SIZES, reverse=True):
        run_dir, failed = measured.run(
            *gpt(billions, options.gpus),
            *("strategy=zero3_offload", "model.init=sharded", "train.steps=3"),
        )
        if failed:
            yield [f"{billions} B", failed.splitlines()[0][:90], "", "", ""]
            continue
        summary = _read(run_dir / "summary.json")
        yield [
            f"{billions} B",
            f"trained, loss {summary['final_loss']:.3f}",
            f"{summary['step_time_s_median']:.1f} s",
            f"{max(summary['peak_memory_bytes']) / 1e9:.1f} GB",
            f"{_planned_bytes(run_dir) / 1e9:.1f} GB",
        ]
        break


def errors(measured: Measured, options: argparse.Namespace) -> Rows:
    """Yield rows of predicted and measured steps and memory, before and after calibrating."""
    strategies = STRATEGIES if options.gpus > 1 else STRATEGIES[:1]
    for figures in ("the catalogue's", "calibrated"):
        if figures == "calibrated":
            _, failed = measured.run("mode=calibrate", "train.precision=bf16")
            if failed:
                yield ["calibrating", failed, "", "", "", ""]
                break
        for billions in (1, 3):
            for strategy in strategies:
                run_dir, failed = measured.run(
                    *gpt(billions, options.batch * options.gpus),
                    *(f"strategy={strategy}", f"train.steps={options.steps}"),
                )
                name = f"GPT of {billions} B, {strategy}"
                if failed:
                    yield [name, figures, failed[:90], "", "", ""]
                    continue
                summary = _read(run_dir / "summary.json")
                step = _middle(_metrics(run_dir), "step_time_s")
                predicted = summary["predicted_step_time_s"]
                memory = max(summary["peak_memory_bytes"]) / _planned_bytes(run_dir) - 1
                yield [
                    *(name, figures, f"{predicted * 1e3:.0f} ms", f"{step * 1e3:.0f} ms"),
                    *(f"{predicted / step - 1:+.0%}", f"{memory:+.0%}"),
                ]


# The title, the columns and the function that yields the rows of each part.
PARTS: Mapping[str, tuple[str, list[str], Callable[[Measured, argparse.Namespace], Rows]]] = {
    "mfu": (
        "Model FLOP/s utilisation",
        ["GPT of 1 B, bf16", "step", "tokens/s", "MFU", "peak memory", "compiling"],
        utilisation,
    ),
    "offload": (
        "The largest model with offload",
        ["parameters", "what came of it", "step", "peak memory", "planned"],
        largest,
    ),
    "errors": (
        "Predictions",
        ["model, strategy", "figures", "predicted", "measured", "off", "memory off"],
        errors,
    ),
}


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps after the first SETTING_UP steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines[SETTING_UP:]


def _middle(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(median(line[key] for line in lines))


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _planned_bytes(run_dir: Path) -> float:
    ranks = _read(run_dir / "plan.json")["ranks"]
    return max(float(rank["memory_bytes"]["total"]) for rank in ranks)


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
