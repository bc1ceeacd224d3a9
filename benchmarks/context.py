"""Compare our split by context with torch's ring attention, on a Llama of Hugging Face.

python benchmarks/context.py --ranks 2 4
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import sides
from interleave import Turns
from parallel import asked, in_both_pages, run, title, whole_batches, written
from rich.console import Console

from whale_train.runtime.process.preload import preload


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="samples over all ranks")
    parser.add_argument("--rounds", type=int, default=6, help="turns a side")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a turn")
    parser.add_argument("--sides", nargs="+", help="only those whose name has one of these words")
    options = parser.parse_args()
    preload()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
            compare(ranks, options, Path(folder))


def compare(ranks: int, options: argparse.Namespace, folder: Path) -> None:
    """Compare our ways with torch's ring on `ranks` ranks, and print the table."""
    import context_sides as by_hand  # imports torch.distributed, which must follow `preload`

    turns, compared = Turns(options.rounds, options.steps), []
    for way in ("auto", "heads", "ring"):
        graph = f"{{split: {{dim: context, attention: {way}}}}}"
        overrides = [*asked(options), f"strategy.graph={graph}", f"hardware.devices={ranks}"]
        compared.append(
            sides.ours(f"ours, {way}", *sides.resolved(overrides, turns.total_steps), folder)
        )
    start = partial(written, by_hand.TorchRing, options, whole_batches(options, turns))
    compared += in_both_pages("torch's ring, DDP", start)
    run(f"context, {title(ranks, options)}", compared, ranks, options, turns, Console(width=170))


if __name__ == "__main__":
    main()
