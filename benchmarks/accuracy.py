"""Predicted against measured steps: pairs of models and strategies that no figure was fitted to.

python benchmarks/accuracy.py

The machine is calibrated first (`mode=calibrate`, with its figures in a folder of this run), which
runs no model. Then every pair is trained by the command, and the step that its plan predicted is
set beside the median of those it took. On a machine that others use as well, speed drifts: the same
product is timed on all cores after the calibration and around every run, and a prediction is for
the speed of its run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pool
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

WARM_UP = 3  # steps that do not count
TIMED_S = 1.0  # that products are timed for


def hugging_face(architecture: str, config: str) -> tuple[str, ...]:
    return "model=hf", f"model.architecture={architecture}", f"model.config={{{config}}}"


TEXT = ("data.sequence_length=64",)
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt": ("model=gpt", "model.width=384", "model.depth=6", "model.heads=6", *TEXT),
    "llama": (
        *hugging_face(
            "LlamaForCausalLM",
            "vocab_size: 1000, hidden_size: 256, intermediate_size: 768, num_hidden_layers: 6, "
            "num_attention_heads: 4, num_key_value_heads: 2",
        ),
        *TEXT,
    ),
    "bert": (
        *hugging_face(
            "BertForMaskedLM",
            "vocab_size: 8000, hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 4, "
            "num_attention_heads: 4, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0",
        ),
        *("data.objective=masked", *TEXT),
    ),
    "vit": (
        *hugging_face(
            "ViTForImageClassification",
            "hidden_size: 256, intermediate_size: 1024, num_hidden_layers: 6, "
            "num_attention_heads: 4, image_size: 64, patch_size: 8, num_labels: 10",
        ),
        "data=images",
    ),
    "classes": ("model=class_head", "model.num_classes=20000", "data=classes"),
}
TWO, FOUR = "{stages: 2, micro_batches: 4}", "{stages: 4, micro_batches: 8}"
UNEVEN = "{pipeline: {micro_batches: 4, stages: [{stage: {modules: [%s]}}, {stage: {}}]}}"
# Two devices, of which the second has half the speed of the first.
MIXED = (
    "hardware.nodes=[{devices: 1, link: pcie3_x16, device: {name: fast, flops: {fp32: 2e12}, "
    "memory_bytes: 64e9, memory_bandwidth_bytes_s: 9e11}}, {devices: 1, link: pcie3_x16, device: "
    "{name: slow, flops: {fp32: 1e12}, memory_bytes: 64e9, memory_bandwidth_bytes_s: 9e11}}]"
)
STRATEGIES: Mapping[str, tuple[str, ...]] = {
    "dp": ("strategy=dp", "hardware=cpu", "hardware.devices=2"),
    "zero1": ("strategy=zero1", "hardware=cpu", "hardware.devices=2"),
    "zero3": ("strategy=zero3", "hardware=cpu", "hardware.devices=2"),
    "split": ("strategy=split", "hardware=cpu", "hardware.devices=2"),
    "pipeline": (f"strategy.graph={{pipeline: {TWO}}}", "hardware=cpu", "hardware.devices=2"),
    "zero_bubble": (
        "strategy.graph={pipeline: {stages: 2, micro_batches: 4, schedule: zero_bubble}}",
        *("hardware=cpu", "hardware.devices=2"),
    ),
    "pipeline of 4": (f"strategy.graph={{pipeline: {FOUR}}}", "hardware=cpu", "hardware.devices=4"),
    "dp, 4 ranks": ("strategy=dp", "hardware=cpu", "hardware.devices=4"),
    "dp by hardware": (
        *("strategy=dp", "hardware=v100_p100_mix", MIXED, "launcher.device_speed=true"),
    ),
    "dp even": (
        *("strategy=dp", "strategy.balance=even", "hardware=v100_p100_mix", MIXED),
        "launcher.device_speed=true",
    ),
    "pipeline by hardware": (
        *(f"strategy.graph={{pipeline: {TWO}}}", "hardware=v100_p100_mix", MIXED),
        "launcher.device_speed=true",
    ),
    "split head": ("strategy=hybrid_split_dp", "hardware=cpu", "hardware.devices=2"),
}
PAIRS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "gpt": (
        16,
        (
            *("dp", "zero1", "zero3", "split", "pipeline", "zero_bubble", "pipeline of 4"),
            *("dp, 4 ranks", "dp by hardware", "dp even", "pipeline by hardware"),
        ),
    ),
    "llama": (16, ("dp", "split", "pipeline", "dp by hardware")),
    "bert": (16, ("dp", "zero1", "split", "pipeline", "dp even")),
    "vit": (16, ("dp", "pipeline", "split")),
    "classes": (256, ("dp", "split head", "zero1")),
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--steps", type=int, default=14, help="of a run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--calibrations", type=Path, help="measured before, and not again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        where = options.calibrations or Path(folder) / "calibrations"
        if not where.exists():
            command(["mode=calibrate", "hardware=cpu"], Path(folder) / "calibrate", where)
        found = {}
        with Pool(len(os.sched_getaffinity(0)), torch.set_num_threads, (1,)) as cores:
            calibrated = before = speed(cores)
            for model in options.models:
                for strategy in (s for s in PAIRS[model][1] if s in options.strategies):
                    asked = [*MODELS[model], *STRATEGIES[strategy]]
                    asked.append(f"train.global_batch={PAIRS[model][0]}")
                    run_dir = Path(folder) / re.sub("[^a-z0-9]+", "_", f"{model} {strategy}")
                    predicted, measured = run(asked, run_dir, where, options.steps)
                    after = speed(cores)
                    drift = (before + after) / 2 / calibrated
                    found[model, strategy] = predicted / drift, measured
                    Console(stderr=True, width=100).print(
                        f"{model}, {strategy}: {predicted / drift / measured:.2f} of what was "
                        f"measured; the machine at {drift:.2f} of its speed when calibrated"
                    )
                    before = after
    Console(width=100).print(table_of(found))


def table_of(found: Mapping[tuple[str, str], tuple[float, float]]) -> Table:
    """A row a pair, of (predicted, measured) seconds; what they come to in the caption."""
    errors = [abs(predicted / measured - 1) for predicted, measured in found.values()]
    ranks = []
    for model in dict.fromkeys(model for model, _ in found):
        mine = [pair for (name, _), pair in found.items() if name == model]
        if len(mine) > 2:
            ranks.append(spearman([p for p, _ in mine], [m for _, m in mine]))
    caption = f"{len(found)} pairs: median error {median(errors):.1%}, worst {max(errors):.1%}"
    if ranks:
        caption += f"; Spearman over a model's strategies: mean {mean(ranks):.2f}, "
        caption += f"least {min(ranks):.2f}"
    caption += f"; over all {spearman(*zip(*found.values(), strict=True)):.2f}"
    table = Table(title="Steps, predicted and measured", title_justify="left", caption=caption)
    for name in ("model", "strategy", "predicted", "measured", "predicted / measured"):
        table.add_column(name, justify="left" if name in ("model", "strategy") else "right")
    for (model, strategy), (predicted, measured) in found.items():
        cells = (f"{predicted * 1e3:.1f} ms", f"{measured * 1e3:.1f} ms")
        table.add_row(model, strategy, *cells, f"{predicted / measured:.2f}")
    return table


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of the two orders, none of whose figures are equal."""

    def places(figures: Sequence[float]) -> list[int]:
        ordered = sorted(figures)
        return [ordered.index(figure) for figure in figures]

    count = len(first)
    squares = sum((a - b) ** 2 for a, b in zip(places(first), places(second), strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1)) if count > 1 else 1.0


def run(asked: Sequence[str], run_dir: Path, where: Path, steps: int) -> tuple[float, float]:
    """(predicted, measured) seconds of a step of the command."""
    command([*asked, f"train.steps={steps}"], run_dir, where)
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    measured = median(json.loads(line)["step_time_s"] for line in lines[WARM_UP:])
    predicted = summary["predicted_here_s"] or summary["predicted_step_time_s"]
    return predicted, measured


def speed(cores: Any) -> float:
    """Products a second and core, all of them at it."""
    return mean(cores.map(products_a_second, range(len(os.sched_getaffinity(0)))))


def products_a_second(_: int) -> float:
    first, second = torch.randn(256, 512), torch.randn(512, 1024)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < TIMED_S:
        first.mm(second)
        count += 1
    return count / (time.perf_counter() - started)


def command(arguments: Sequence[str], run_dir: Path, where: Path) -> None:
    """Run the command. Exits where it fails."""
    line = [sys.executable, "-m", "whale_train.launcher.cli", *arguments]
    line += [f"hydra.run.dir={run_dir}", "launcher=auto"]
    environment = os.environ | {"WHALE_TRAIN_CALIBRATIONS": str(where)}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed:\n{done.stderr}")


if __name__ == "__main__":
    main()
