"""Compare predicted with measured steps, for models and strategies that no figure was fitted to.

python benchmarks/accuracy.py

Before each model, every round calibrates the machine (`mode=calibrate`, which runs no model and
writes into a folder of this script), and then trains the model under each strategy. The median of
the predictions over the rounds is compared with the lower quartile of the steps of all rounds, the
statistic that calibrating uses as well. A shared machine may be slower by two thirds for seconds or
minutes. Hence the calibration for each model, the rounds, the quartile, and the repetitions of
`quiet.py`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median

from quiet import Quiet
from rich.console import Console
from rich.table import Table

from whale_train.runtime.calibrate.timing import undisturbed

WARM_UP = 3  # steps that do not count
REFUSED = 2  # the command's exit status


def hugging_face(architecture: str, config: str) -> tuple[str, ...]:
    """Return the overrides for a model of transformers.

    config: the settings of the model, as YAML.
    """
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
# Two devices. The second has half the speed of the first.
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
    "llama": (
        16,
        (
            *("dp", "zero1", "zero3", "split", "pipeline", "zero_bubble", "pipeline of 4"),
            *("dp, 4 ranks", "dp by hardware", "dp even"),
        ),
    ),
    "bert": (
        16,
        (
            *("dp", "zero1", "split", "pipeline", "pipeline of 4", "dp, 4 ranks"),
            *("dp by hardware", "dp even"),
        ),
    ),
    "vit": (
        16,
        (
            *("dp", "zero1", "split", "pipeline", "pipeline of 4", "dp, 4 ranks"),
            *("dp by hardware", "dp even"),
        ),
    ),
    "classes": (
        256,
        ("dp", "zero1", "zero3", "split head", "dp, 4 ranks", "dp by hardware", "dp even"),
    ),
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--steps", type=int, default=16, help="of a run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=3, help="of calibrating and training")
    parser.add_argument("--patience", type=float, default=900, help="seconds of waiting for quiet")
    options = parser.parse_args()
    quiet = Quiet(options.patience)
    pairs = [
        (model, strategy)
        for model in options.models
        for strategy in PAIRS[model][1]
        if strategy in options.strategies
    ]
    timings: dict[tuple[str, str], list[tuple[float, Sequence[float]]]] = {}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
            where = Path(folder) / "calibrations"
            measured_for = ""
            for model, strategy in pairs:
                if model != measured_for:
                    quiet.measure(partial(calibrate, [], folder, where))
                    measured_for = model
                asked = [*MODELS[model], *STRATEGIES[strategy]]
                asked.append(f"train.global_batch={PAIRS[model][0]}")
                asked.append(f"train.steps={options.steps}")
                predicted, measured = quiet.measure(partial(run, asked, folder, where))
                timings.setdefault((model, strategy), []).append((predicted, measured))
                Console(stderr=True, width=100).print(
                    f"round {number + 1}, {model}, {strategy}: {predicted * 1e3:.1f} ms predicted, "
                    f"{undisturbed(measured) * 1e3:.1f} ms measured"
                )
    Console(width=100).print(
        table_of({pair: of_rounds(rounds) for pair, rounds in timings.items()})
    )
    Console(width=100).print(f"{quiet.repeated} measurements repeated.")


def table_of(seconds: Mapping[tuple[str, str], tuple[float, float]]) -> Table:
    """Return a table with a row for each (model, strategy), and a summary in the caption.

    seconds: the (predicted, measured) seconds of a step of each pair.
    """
    errors = [abs(predicted / measured - 1) for predicted, measured in seconds.values()]
    ranks = []
    for model in dict.fromkeys(model for model, _ in seconds):
        of_model = [pair for (name, _), pair in seconds.items() if name == model]
        if len(of_model) > 2:
            ranks.append(spearman([p for p, _ in of_model], [m for _, m in of_model]))
    caption = f"{len(seconds)} pairs: median error {median(errors):.1%}, worst {max(errors):.1%}"
    if ranks:
        caption += f"; Spearman over a model's strategies: mean {mean(ranks):.2f}, "
        caption += f"least {min(ranks):.2f}"
    caption += f"; over all {spearman(*zip(*seconds.values(), strict=True)):.2f}"
    table = Table(title="Steps, predicted and measured", title_justify="left", caption=caption)
    for name in ("model", "strategy", "predicted", "measured", "predicted / measured"):
        table.add_column(name, justify="left" if name in ("model", "strategy") else "right")
    for (model, strategy), (predicted, measured) in seconds.items():
        cells = (f"{predicted * 1e3:.1f} ms", f"{measured * 1e3:.1f} ms")
        table.add_row(model, strategy, *cells, f"{predicted / measured:.2f}")
    return table


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences; 1 for sequences of one number.

    The numbers of a sequence must differ.
    """

    def places(figures: Sequence[float]) -> list[int]:
        ordered = sorted(figures)
        return [ordered.index(figure) for figure in figures]

    count = len(first)
    squares = sum((a - b) ** 2 for a, b in zip(places(first), places(second), strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1)) if count > 1 else 1.0


def of_rounds(rounds: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, float]:
    """Return the (predicted, measured) seconds of a step over all rounds: the median of the
    predictions, and the lower quartile of the steps (`undisturbed`).

    rounds: the predicted seconds, and the measured seconds of every step, of each round.
    """
    steps = (seconds for _, measured in rounds for seconds in measured)
    return median(predicted for predicted, _ in rounds), undisturbed(steps)


def run(asked: Sequence[str], folder: str, where: Path) -> tuple[float, Sequence[float]]:
    """Run the command, and return the predicted seconds of a step and the seconds of each step."""
    run_dir = fresh(folder)
    command(asked, run_dir, where)
    return times(run_dir)


def calibrate(overrides: Sequence[str], folder: str, where: Path) -> None:
    """Calibrate this machine for `overrides`, and save the calibrations in the folder `where`."""
    command(["mode=calibrate", "hardware=cpu", *overrides], fresh(folder), where)


def fresh(folder: str) -> Path:
    """Return the path of a new run directory in `folder`."""
    return Path(tempfile.mkdtemp(dir=folder)) / "run"


def times(run_dir: Path) -> tuple[float, Sequence[float]]:
    """Return the predicted seconds of a run's step, and the seconds of each step after the
    warm-up."""
    summary = json.loads((run_dir / "summary.json").read_text())
    predicted = summary["predicted_here_s"] or summary["predicted_step_time_s"]
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return predicted, [json.loads(line)["step_time_s"] for line in lines[WARM_UP:]]


def command(
    arguments: Sequence[str], run_dir: Path, where: Path, *, refusable: bool = False
) -> bool:
    """Run the command, and return whether it accepted the request.

    arguments: the overrides.
    run_dir: the run directory.
    where: the folder of calibrations.
    refusable: whether the command may refuse the request. If not, a refusal is a failure.

    Exits the process where the command fails.
    """
    line = [sys.executable, "-m", "whale_train.launcher.cli", *arguments]
    line += [f"hydra.run.dir={run_dir}", "launcher=auto"]
    environment = os.environ | {"WHALE_TRAIN_CALIBRATIONS": str(where)}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == REFUSED and refusable:
        return False
    if done.returncode:
        sys.exit(f"{' '.join(line)} failed:\n{done.stderr}")
    return True


if __name__ == "__main__":
    main()
