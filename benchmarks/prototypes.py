"""Compare learning with expert prototypes (k groups with top-1 routers) and with top-k routing.

M6-T (Yang et al. 2021, arXiv 2105.15082) reports that k groups of experts, each with its own top-1
router, learn more at equal work than top-k routing over all experts. Here, mixtures of one size
learn the bytes of Python's standard library with each seed. The table has the mean loss of
held-back samples at several steps, and its spread over seeds.

python benchmarks/prototypes.py --steps 400
"""

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from learning import spread, steps_of
from rich.console import Console
from rich.table import Table

# The number of groups, and the number of experts in each group that a token goes to.
ROUTINGS = {
    "1 x top-1": (1, 1),
    "2 x top-1": (2, 1),
    "1 x top-2": (1, 2),
    "4 x top-1": (4, 1),
    "1 x top-4": (1, 4),
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--points", type=int, default=4, help="evaluations of a run")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    options, more = parser.parse_known_args()
    every = options.steps // options.points
    table = Table(
        title=f"held-back loss of {options.experts} experts a block, {options.seeds} seeds"
    )
    table.add_column("routing")
    for point in range(1, options.points + 1):
        table.add_column(f"step {point * every}", justify="right")
    for name in ("busiest, of the mean", "ms a step"):
        table.add_column(name, justify="right")
    for name in options.routings:
        runs = [_steps(name, seed, every, options, more) for seed in range(options.seeds)]
        curves = [[x["evaluation_loss"] for x in run if "evaluation_loss" in x] for run in runs]
        busiest = mean(mean(run[-1]["experts"]["imbalance"]) for run in runs)
        step = mean(mean(x["step_time_s"] for x in run[2:]) for run in runs)
        at_points = zip(*curves, strict=True)
        table.add_row(name, *map(spread, at_points), f"{busiest:.2f}", f"{1e3 * step:.0f}")
    Console(width=120).print(table)


def _steps(
    name: str, seed: int, every: int, options: argparse.Namespace, more: Sequence[str]
) -> list[dict[str, Any]]:
    prototypes, top_k = ROUTINGS[name]
    started = time.perf_counter()
    metrics = steps_of(
        *("model=moe_gpt", f"hardware.devices={options.devices}", "optimizer.lr=0.002"),
        *(f"model.experts={options.experts}", f"model.prototypes={prototypes}"),
        *(f"model.top_k={top_k}", "model.balance=0.01", "model.depth=2", "model.ffn=128"),
        *(f"seed={seed}", f"train.steps={options.steps}", f"train.evaluate_every={every}"),
        *("train.evaluation_samples=512", *more),
    )
    print(f"{name}, seed {seed}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    return metrics


if __name__ == "__main__":
    main()
