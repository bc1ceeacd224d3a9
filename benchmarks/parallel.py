"""Compare ours with torch's DTensor and pipelining by hand, on a Llama of Hugging Face.

python benchmarks/parallel.py --ranks 2 4
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import breakdown
import sides
import torch
from interleave import Running, Side, Turns, interleaved, show
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from whale_train.config import Request
from whale_train.runtime.cpu.threads import num_threads
from whale_train.runtime.process.preload import preload
from whale_train.strategies.plan.plan import Plan

LEARNING_RATE = 0.001
PARTS = ("split", "pipeline", "breakdown")
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
CLASSES = 100_000  # number of classes of the head that hybrid_split_dp splits
WATCHED = ("split", "1f1b", "zero_bubble", "hybrid_split_dp")
HUGE = ", huge pages"


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="samples over all ranks")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8, help="turns a side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn")
    parser.add_argument("--sides", nargs="+", help="only those whose name has one of these words")
    options = parser.parse_args()
    preload()
    console = Console(width=170)
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
            if "split" in options.parts:
                compare_split(ranks, options, Path(folder), console)
            if "pipeline" in options.parts:
                compare_pipeline(ranks, options, Path(folder), console)
            if "breakdown" in options.parts:
                break_down(ranks, options, Path(folder), console)


def compare_split(ranks: int, options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Compare our split with DTensor and one process, and print the tables."""
    import parallel_sides as by_hand  # imports torch.distributed, which must follow `preload`

    turns = Turns(options.rounds, options.steps)
    request, plan = ours("split", ranks, options, turns)
    compared = [sides.ours("ours, split", request, plan, folder)]
    batches = whole_batches(options, turns)
    for name, sharded_loss in (("DTensor", False), ("DTensor, loss_parallel", True)):
        start = partial(written, by_hand.DTensorSplit, options, batches, sharded_loss)
        compared += in_both_pages(name, start)
    for threads in sorted({num_threads(ranks), num_threads(1)}):
        start = partial(written, by_hand.OneProcess, options, batches, threads)
        words = f"one process, {threads} thread{'s' * (threads > 1)}"
        compared.append(Side(f"{words}{HUGE}", start, True))
    run(f"split, {title(ranks, options)}", compared, ranks, options, turns, console)


def compare_pipeline(
    ranks: int, options: argparse.Namespace, folder: Path, console: Console
) -> None:
    """Compare our schedules with torch.distributed.pipelining on the same cut, and print the
    tables."""
    import parallel_sides as by_hand

    turns = Turns(options.rounds, options.steps)
    compared = []
    cuts: list[int] = []
    for schedule in SCHEDULES:
        if schedule == "interleaved_1f1b" and options.layers < 2 * ranks:
            continue
        request, plan = ours(schedule, ranks, options, turns)
        compared.append(sides.ours(f"ours, {schedule}", request, plan, folder))
        if schedule == "1f1b":
            cuts = layers_cut(plan)
    batches = whole_batches(options, turns)
    for schedule, kind in by_hand.SCHEDULES.items():
        more = (cuts, schedule, options.micro_batches)
        start = partial(written, by_hand.Pipelined, options, batches, *more)
        compared += in_both_pages(kind.__name__, start)
    words = f"pipeline of {options.micro_batches} micro-batches, layers cut at {cuts[1:-1]}"
    run(f"{words}, {title(ranks, options)}", compared, ranks, options, turns, console)


def break_down(ranks: int, options: argparse.Namespace, folder: Path, console: Console) -> None:
    """Print the breakdown of a step of ours under each strategy of WATCHED."""
    turns = Turns(rounds=4, steps=options.steps)
    words = f"where a step goes, {title(ranks, options)}; hybrid_split_dp: {CLASSES} classes"
    table = Table(title=words, title_justify="left")
    table.add_column("ours")
    for name in ("compute", "bridges", "collectives", "waiting for others", "outside of these"):
        table.add_column(name, justify="right")
    for strategy in WATCHED:
        run_dir = Path(tempfile.mkdtemp(dir=folder))
        if strategy == "hybrid_split_dp":
            request, plan = split_head(ranks, options, turns)
        else:
            request, plan = ours(strategy, ranks, options, turns)
        side = breakdown.watched(request, plan, run_dir)
        interleaved([side], ranks, num_threads(ranks), turns)
        shares = breakdown.shares(run_dir, ranks, skipped=turns.total_steps // (turns.rounds + 1))
        table.add_row(strategy, *(f"{amount:.1%}" for amount in astuple(shares)))
    console.print(table)


def ours(
    strategy: str, ranks: int, options: argparse.Namespace, turns: Turns
) -> tuple[Request, Plan]:
    """Return our request and plan.

    strategy: `split`, or the schedule of a pipeline.
    """
    graph = "{split: {}}"
    if strategy in SCHEDULES:
        pipeline_options = (
            f"stages: {ranks}, schedule: {strategy}, micro_batches: {options.micro_batches}"
        )
        graph = f"{{pipeline: {{{pipeline_options}}}}}"
    overrides = (f"strategy.graph={graph}", f"hardware.devices={ranks}")
    return sides.resolved([*asked(options), *overrides], turns.total_steps)


def split_head(ranks: int, options: argparse.Namespace, turns: Turns) -> tuple[Request, Plan]:
    """Return the request and plan of a replicated backbone with a split head of many classes, for
    the bridges of a hybrid strategy."""
    overrides = [
        "model=class_head",
        f"model.num_classes={CLASSES}",
        "data=classes",
        "strategy=hybrid_split_dp",
        "hardware=cpu",
        f"hardware.devices={ranks}",
        f"train.global_batch={options.batch * ranks}",
    ]
    return sides.resolved(overrides, turns.total_steps)


def asked(options: argparse.Namespace) -> list[str]:
    """Return the overrides that are common to all plans."""
    config = ", ".join(f"{key}: {str(value).lower()}" for key, value in shape(options).items())
    return [
        "model=hf",
        "model.architecture=LlamaForCausalLM",
        f"model.config={{{config}}}",
        f"data.sequence_length={options.sequence}",
        "hardware=cpu",
        "optimizer=adamw",
        f"optimizer.lr={LEARNING_RATE}",
        f"train.global_batch={options.batch}",
    ]


def shape(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of LlamaConfig.

    As in Llama, the inner width is 8/3 of the width, rounded up to a multiple of 32. Heads have a
    width of 64, and there are at least 4.
    """
    return {
        "hidden_size": options.width,
        "intermediate_size": -(-options.width * 8 // (3 * 32)) * 32,
        "num_hidden_layers": options.layers,
        "num_attention_heads": max(options.width // 64, 4),
        "num_key_value_heads": max(options.width // 64, 4),
        "vocab_size": options.vocabulary,
        "max_position_embeddings": options.sequence,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def whole_batches(options: argparse.Namespace, turns: Turns) -> list[sides.Batch]:
    """Return the global batches, as one process reads them."""
    overrides = [*asked(options), "strategy=single", "hardware.devices=1"]
    (batches,) = sides.all_batches(*sides.resolved(overrides, turns.total_steps), turns.total_steps)
    return batches


def layers_cut(plan: Plan) -> list[int]:
    """Return the first layer of each stage, counted from 0, followed by the number of layers."""
    cuts = [0]
    for task_graph in plan.task_graphs:
        layers = (path.split("layers.")[1] for path in task_graph.parameters if "layers." in path)
        cuts.append(max((int(path.split(".")[0]) + 1 for path in layers), default=cuts[-1]))
    return cuts


def in_both_pages(name: str, start: Callable[[int], Running]) -> list[Side]:
    """Return two sides: one with torch's default pages, and one with huge pages, as ours has."""
    return [Side(name, start, False), Side(name + HUGE, start, True)]


def written(
    kind: Any,
    options: argparse.Namespace,
    batches: Sequence[sides.Batch],
    *more: Any,
) -> Running:
    """Return a side by hand on one rank.

    kind: the class of the side.
    options: the command line's options.
    batches: the global batches.
    more: further arguments of the class, followed by the rank, which is not passed on.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape(options)))
    make = partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    running: Running = kind(model, make, batches, *more[:-1])
    return running


def run(
    words: str,
    compared: Sequence[Side],
    ranks: int,
    options: argparse.Namespace,
    turns: Turns,
    console: Console,
) -> None:
    """Run the sides that the options name, and print the timings."""
    if options.sides:
        compared = [side for side in compared if any(word in side.name for word in options.sides)]
    results = interleaved(compared, ranks, num_threads(ranks), turns)
    baselines = [side.name for side in compared if side.name.endswith(HUGE)]
    show(words, results, baselines, console)


def title(ranks: int, options: argparse.Namespace) -> str:
    """Return the part of a table's title that describes the model, the ranks and the batch."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape(options)))
    elements = sum(parameter.numel() for parameter in model.parameters())
    tokens = f"{options.batch} x {options.sequence} tokens"
    return f"Llama of {elements / 1e6:.1f} M, {ranks} ranks, {tokens}, AdamW"


if __name__ == "__main__":
    main()
