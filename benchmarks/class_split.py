"""Compare ours, with a head of 100,000 classes split and replicated, with both by hand.

python benchmarks/class_split.py --ranks 2 4 --optimizers sgd adamw
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import sides
import torch
from interleave import Running, Side, Turns, interleaved, show
from rich.console import Console

from whale_train.models.class_head import ClassHead
from whale_train.runtime.cpu.threads import num_threads
from whale_train.runtime.process.preload import preload

TORCH = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
LEARNING_RATE = 0.001
STRATEGIES = ("hybrid_split_dp", "dp")
BY_HAND: dict[str, Callable[..., Running]] = {"split": sides.SplitHead, "DDP": sides.DataParallel}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="each divides classes")
    parser.add_argument("--optimizers", nargs="+", choices=TORCH, default=list(TORCH))
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=8, help="samples a rank")
    parser.add_argument("--rounds", type=int, default=20, help="turns a side")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a turn")
    parser.add_argument("--sides", nargs="+", help="only those whose name has one of these words")
    options = parser.parse_args()
    preload()
    for ranks in options.ranks:
        for optimizer in options.optimizers:
            with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
                compare(ranks, optimizer, options, Path(folder))


def compare(ranks: int, optimizer: str, options: argparse.Namespace, folder: Path) -> None:
    """Measure all sides on `ranks` ranks with one optimizer, and print the timings."""
    turns = Turns(options.rounds, options.steps)
    compared: list[Side] = []
    for strategy in STRATEGIES:
        request, plan = sides.resolved(
            [
                "model=class_head",
                f"model.num_classes={options.classes}",
                "data=classes",
                "hardware=cpu",
                f"hardware.devices={ranks}",
                f"optimizer={optimizer}",
                f"optimizer.lr={LEARNING_RATE}",
                f"strategy={strategy}",
                f"train.global_batch={options.batch * ranks}",
            ],
            turns.total_steps,
        )
        compared.append(sides.ours(f"ours, {strategy}", request, plan, folder))
    batches = sides.all_batches(request, plan, turns.total_steps)
    for huge_pages in (False, True):
        for name, kind in BY_HAND.items():
            suffix = ", huge pages" if huge_pages else ""
            start = partial(by_hand, kind, optimizer, options.classes, batches)
            compared.append(Side(f"{name} by hand{suffix}", start, huge_pages))
    if options.sides:
        compared = [side for side in compared if any(word in side.name for word in options.sides)]
    results = interleaved(compared, ranks, num_threads(ranks), turns)
    title = f"{options.classes} classes, {ranks} ranks x {options.batch} samples, {optimizer}"
    baselines = [side.name for side in compared if "by hand" in side.name]
    show(title, results, baselines, Console(width=150))


def by_hand(
    kind: Callable[..., Running],
    optimizer: str,
    classes: int,
    batches: Sequence[Sequence[sides.Batch]],
    rank: int,
) -> Running:
    """Return a side by hand of the class `kind`, on rank `rank`.

    optimizer: name of the optimizer, in TORCH.
    classes: number of classes.
    batches: the batches of each rank.
    """
    torch.manual_seed(0)
    make = partial(TORCH[optimizer], lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    return kind(ClassHead(classes), make, batches[rank])


if __name__ == "__main__":
    main()
