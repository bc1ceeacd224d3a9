"""Compare ours with loops by hand in torch and DeepSpeed, on a GPT of ten million parameters.

python benchmarks/overhead.py --strategies dp zero1 zero3
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sides
import torch
from interleave import Running, Side, Turns, interleaved, show
from rich.console import Console

from whale_train.models.gpt import GPT
from whale_train.runtime.cpu.threads import num_threads
from whale_train.runtime.process.preload import preload

SHAPE: dict[str, Any] = {"width": 320, "depth": 8, "heads": 8, "sequence_length": 64}
LEARNING_RATE = 0.001
# In elements, 25 MiB: as in our plans for DeepSpeed, and by default in DistributedDataParallel.
BUCKETS = {"reduce_bucket_size": 6_553_600, "allgather_bucket_size": 6_553_600}
BY_HAND: dict[str, dict[str, Any]] = {
    "dp": {"DDP by hand": None},
    "zero1": {"DeepSpeed ZeRO 1 by hand": {"stage": 1, **BUCKETS}},
    "zero2": {"DeepSpeed ZeRO 2 by hand": {"stage": 2, **BUCKETS}},
    "zero3": {"DeepSpeed ZeRO 3 by hand": {"stage": 3, **BUCKETS}},
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument(
        "--strategies", nargs="+", choices=BY_HAND, default=["dp", "zero1", "zero3"]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples a rank")
    parser.add_argument("--rounds", type=int, default=20, help="turns a side")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a turn")
    options = parser.parse_args()
    preload()
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
            compare(strategy, options, Path(folder))


def compare(strategy: str, options: argparse.Namespace, folder: Path) -> None:
    """Compare ours with the loops by hand, each with and without huge pages."""
    turns = Turns(options.rounds, options.steps, warm_up=2)
    request, plan = sides.resolved(
        [
            "model=gpt",
            *(f"model.{key}={value}" for key, value in SHAPE.items()),
            f"data.sequence_length={SHAPE['sequence_length']}",
            "hardware=cpu",
            f"hardware.devices={options.ranks}",
            "optimizer=adamw",
            f"optimizer.lr={LEARNING_RATE}",
            f"strategy={strategy}",
            f"train.global_batch={options.batch * options.ranks}",
        ],
        turns.total_steps,
    )
    compared = [sides.ours(f"ours, {strategy}", request, plan, folder)]
    batches = sides.all_batches(request, plan, turns.total_steps)
    for name, zero in BY_HAND[strategy].items():
        for huge_pages in (False, True):
            start = partial(by_hand, zero, batches)
            compared.append(Side(name + ", huge pages" * huge_pages, start, huge_pages))
    results = interleaved(compared, options.ranks, num_threads(options.ranks), turns)
    elements = sum(p.numel() for p in GPT(**SHAPE).parameters())
    title = f"GPT of {elements / 1e6:.1f} M, {options.ranks} ranks x {options.batch} sequences"
    show(f"{title}, AdamW", results, [side.name for side in compared[1:]], Console(width=150))


def by_hand(
    zero: dict[str, Any] | None, batches: Sequence[Sequence[sides.Batch]], rank: int
) -> Running:
    """Return a GPT on rank `rank` that a loop by hand trains.

    zero: DeepSpeed's options of `zero_optimization`; None for DistributedDataParallel.
    batches: the batches of each rank.
    """
    torch.manual_seed(0)
    make = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    model = GPT(**SHAPE)
    if zero is None:
        return sides.DataParallel(model, make, batches[rank])
    return sides.DeepSpeedZero(model, make, batches[rank], zero)


if __name__ == "__main__":
    main()
