"""Compare Pseudo-to-Real with training from scratch, at equal time.

M6-10T (Lin et al. 2021, arXiv 2110.03888) first trains layers that share one set of weights, and
delinks the layers later. Here a GPT learns the bytes of Python's standard library with each seed:
with separate layers from the start, with shared layers to the end, and with layers that are
delinked after a fraction of the steps. The table has the latest held-back loss after so many
seconds of steps. Shared layers compute as much as separate ones, but send fewer gradients and
update fewer weights.

python benchmarks/pseudo_to_real.py --steps 600
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean

from learning import spread, steps_of
from rich.console import Console
from rich.table import Table

Curve = list[tuple[float, float]]  # (seconds of steps so far, held-back loss)


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--points", type=int, default=4, help="times of the table")
    parser.add_argument("--parted", type=float, nargs="+", default=[0.125, 0.25, 0.5])
    parser.add_argument("--depth", type=int, default=8)
    options, more = parser.parse_known_args()
    ways = {"own from the start": [], "shared to the end": ["model.share_layers=true"]}
    for part in options.parted:
        at = f"train.delink_at={round(part * options.steps)}"
        ways[f"parted after {part:.3g} of the steps"] = ["model.share_layers=true", at]
    curves: dict[str, list[Curve]] = {way: [] for way in ways}
    for seed in range(options.seeds):  # in turns, since the machine's speed varies over time
        for way, given in ways.items():
            curves[way].append(_curve(seed, options, [*given, *more]))
            print(f"{way}, seed {seed}: {curves[way][-1][-1][1]:.4f}", file=sys.stderr)
    end = min(curve[-1][0] for of_way in curves.values() for curve in of_way)
    times = [end * (point + 1) / options.points for point in range(options.points)]
    table = Table(title=f"held-back loss, {options.depth} layers, {options.seeds} seeds")
    table.add_column("layers' weights")
    for seconds in times:
        table.add_column(f"{seconds:.0f} s", justify="right")
    table.add_column("at the end", justify="right")
    table.add_column("seconds", justify="right")
    for way, of_way in curves.items():
        cells = [spread([_at(curve, seconds) for curve in of_way]) for seconds in times]
        last = spread([curve[-1][1] for curve in of_way])
        table.add_row(way, *cells, last, f"{mean(curve[-1][0] for curve in of_way):.0f}")
    Console(width=130).print(table)


def _at(curve: Curve, seconds: float) -> float:
    """Return the latest loss of a curve after `seconds`; NaN without one."""
    return next((loss for after, loss in reversed(curve) if after <= seconds), float("nan"))


def _curve(seed: int, options: argparse.Namespace, given: Sequence[str]) -> Curve:
    steps = steps_of(
        *("model=gpt", "hardware.devices=2", f"model.depth={options.depth}", f"seed={seed}"),
        *(f"train.steps={options.steps}", "train.global_batch=16", "optimizer=adamw"),
        *(f"train.evaluate_every={max(options.steps // 40, 1)}", "train.evaluation_samples=256"),
        *given,
    )
    seconds = accumulate(step["step_time_s"] for step in steps)
    timed = zip(seconds, steps, strict=True)
    return [(after, x["evaluation_loss"]) for after, x in timed if "evaluation_loss" in x]


if __name__ == "__main__":
    main()
