"""Compare SGD and LARS at a small and at a large batch, by the accuracy on held-out digits.

python benchmarks/large_batch.py

All sides see as many samples: `experiment=large_batch` in steps of 4,096, or the same in steps of
64. The set has 1,437 digits to train on, so that a batch of 4,096 is 2.85 passes over it. SGD at 64
has the rate 0.1. At 4,096 it has this rate times the ratio of the batches (Goyal et al. 2017, arXiv
1706.02677), or times its root.
"""

import argparse
from dataclasses import dataclass
from math import sqrt
from statistics import mean

from learning import spread, steps_of
from rich.console import Console
from rich.table import Table

SMALL, LARGE, STEPS, WARM_UP, RATE = 64, 4096, 60, 10, 0.1
RATIO = LARGE // SMALL


@dataclass(frozen=True)
class Side:
    """An optimizer at a batch size.

    name: the name in the table.
    batch: samples of a step.
    lr: the learning rate after the warm-up.
    overrides: further overrides of the command.
    """

    name: str
    batch: int
    lr: float
    overrides: tuple[str, ...]


_SGD = ("optimizer=sgd", "optimizer.momentum=0.9", "optimizer.no_decay=norms_and_biases")
SIDES = (
    Side("SGD", SMALL, RATE, _SGD),
    Side("SGD, the rate times 64", LARGE, RATE * RATIO, _SGD),
    Side("SGD, the rate times 8", LARGE, RATE * sqrt(RATIO), _SGD),
    Side("LARS", LARGE, 5.0, ()),
)


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--seeds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run at the large batch")
    options = parser.parse_args()
    table = Table(title=f"{options.steps * LARGE:,} digits seen", title_justify="left")
    names = ("batch", "steps", "rate", "training loss", "held-out accuracy", "lowest", "highest")
    for name in ("side", *names):
        table.add_column(name, justify="left" if name == "side" else "right")
    for side in SIDES:
        steps = options.steps * LARGE // side.batch
        found = [_run(side, steps, seed) for seed in range(options.seeds)]
        losses, accuracies = zip(*found, strict=True)
        cells = [f"{side.batch:,}", f"{steps:,}", f"{side.lr:g}", spread(losses)]
        ends = (mean(accuracies), min(accuracies), max(accuracies))
        table.add_row(side.name, *cells, *(f"{100 * x:.1f}%" for x in ends))
    Console(width=130).print(table)


def _run(side: Side, steps: int, seed: int) -> tuple[float, float]:
    """Return the last training loss of a run of `side`, and its accuracy on held-out digits."""
    lines = steps_of(
        *("experiment=large_batch", "hardware.devices=1", "launcher.threads=1", *side.overrides),
        *(f"optimizer.lr={side.lr}", "optimizer.weight_decay=5e-4"),
        *("optimizer.schedule=polynomial", f"optimizer.warmup_steps={steps * WARM_UP // STEPS}"),
        *(f"train.steps={steps}", f"train.global_batch={side.batch}", f"seed={seed}"),
        *(f"train.evaluate_every={steps}", "train.grad_norm=false"),
    )
    return lines[-1]["loss"], lines[-1]["evaluation_accuracy"]


if __name__ == "__main__":
    main()
