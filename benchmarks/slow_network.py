"""Compare ours with DistributedDataParallel by hand, on four hosts on a network of 1 Gbit/s.

sudo python benchmarks/slow_network.py

The hosts are network namespaces of this machine (hosts.py).
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sides
import torch
from class_split import by_hand as class_head_by_hand
from hosts import Hosts
from interleave import Running, Side, Turns, interleaved, show
from rich.console import Console
from transformers import BertConfig, BertForMaskedLM

from whale_train.config import Request
from whale_train.runtime.cpu.threads import num_threads
from whale_train.runtime.process.preload import preload
from whale_train.strategies.grammar.nodes import SCHEDULES
from whale_train.strategies.plan.plan import Plan

LEARNING_RATE = 0.001
PARTS = ("bert", "classes")


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="on a host")
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of a host's link, Gbit/s")
    parser.add_argument("--layers", type=int, default=6, help="of BERT-Large's 24")
    parser.add_argument("--width", type=int, default=1024, help="of BERT: BERT-Large's")
    parser.add_argument("--vocabulary", type=int, default=30522, help="of BERT")
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2, help="sequences a host")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["1f1b"])
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--class-batch", type=int, default=8, help="samples a host, class_head")
    parser.add_argument("--optimizers", nargs="+", choices=("sgd", "adamw"), default=["adamw"])
    parser.add_argument("--sides", nargs="+", help="only those whose name has one of these words")
    parser.add_argument("--rounds", type=int, default=4, help="turns a side")
    parser.add_argument("--steps", type=int, default=2, help="timed steps a turn")
    options = parser.parse_args()
    hosts = Hosts.make(options.hosts, options.gbit)  # before any thread is started
    preload()
    console = Console(width=150)
    measured = hosts.measured_gbit_s()
    words = f"{options.hosts} hosts of {options.ranks} ranks at {options.gbit:g} Gbit/s"
    console.print(f"{words}; measured {measured:.2f}")
    compare = {"bert": compare_bert, "classes": compare_classes}
    for part in options.parts:
        for optimizer in options.optimizers:
            with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
                compare[part](optimizer, hosts, options, Path(folder), console)


def compare_bert(
    optimizer: str, hosts: Hosts, options: argparse.Namespace, folder: Path, console: Console
) -> None:
    """Compare pipelines, replicated and not, with data parallelism, and print the tables."""
    turns = Turns(options.rounds, options.steps)
    config = shape(options)
    config_text = ", ".join(f"{key}: {str(value).lower()}" for key, value in config.items())
    asked = [
        "model=hf",
        "model.architecture=BertForMaskedLM",
        f"model.config={{{config_text}}}",
        # Every token is a target, so that equal batches have equal numbers of targets, and DDP's
        # mean of means is the mean.
        f"data.sequence_length={options.sequence}",
        f"train.global_batch={options.batch * options.hosts}",
    ]
    graphs = {
        f"{words}, {schedule}": graph
        for schedule in options.schedules
        for words, graph in pipelines(schedule, options).items()
    }
    compared = []
    for name, graph in graphs.items():
        request, plan = resolved([*asked, f"strategy.graph={graph}"], optimizer, options, turns)
        compared.append(sides.ours(f"ours, {name}", request, plan, folder))
    request, plan = resolved([*asked, "strategy=dp"], optimizer, options, turns)
    batches = sides.all_batches(request, plan, turns.total_steps)
    compared.append(Side("DDP by hand", partial(bert_by_hand, config, optimizer, batches), True))
    with torch.device("meta"):
        elements = sum(p.numel() for p in BertForMaskedLM(BertConfig(**config)).parameters())
    words = f"BERT-Large of {options.layers} layers ({elements / 1e6:.0f} M)"
    words += f", {options.batch} x {options.sequence} tokens a host, {optimizer}"
    run(words, compared, hosts, options, turns, console)


def pipelines(schedule: str, options: argparse.Namespace) -> dict[str, str]:
    """Return strategy graphs as text, by descriptions.

    With several ranks on a host, the ranks of a host replicate one stage, so that gradients stay on
    the host. With one rank on each host, one graph is a pipeline through all hosts, and the other
    has two replicas of a pipeline through half of them.
    """
    schedule_options = f"schedule: {schedule}, micro_batches: {options.micro_batches}"
    half = max(options.hosts // 2, 1)
    if options.ranks == 1:
        one, several = (
            f"{{pipeline: {{stages: {n}, {schedule_options}}}}}" for n in (options.hosts, half)
        )
        return {
            f"2 copies of a pipeline of {half}": f"{{replicate: {{degree: 2, of: {several}}}}}",
            f"a pipeline of {options.hosts}": one,
        }
    stage = f"{{stage: {{of: {{replicate: {{degree: {options.ranks}}}}}}}}}"
    stages = ", ".join([stage] * options.hosts)
    words = f"a pipeline of {options.hosts}, a stage a host in {options.ranks} copies"
    return {words: f"{{pipeline: {{stages: [{stages}], {schedule_options}}}}}"}


def shape(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of BertConfig.

    The widths are those of BERT-Large (Devlin et al. 2019, section 3). Dropout is off, so that all
    sides compute the same.
    """
    return {
        "vocab_size": options.vocabulary,
        "hidden_size": options.width,
        "intermediate_size": 4 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": max(options.width // 64, 1),
        "max_position_embeddings": 512,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def bert_by_hand(
    config: dict[str, Any],
    optimizer: str,
    batches: Sequence[Sequence[sides.Batch]],
    rank: int,
) -> Running:
    """Return a BERT trained by DistributedDataParallel on rank `rank`."""
    torch.manual_seed(0)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    make = partial(kinds[optimizer], lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    return sides.DataParallel(BertForMaskedLM(BertConfig(**config)), make, batches[rank])


def compare_classes(
    optimizer: str, hosts: Hosts, options: argparse.Namespace, folder: Path, console: Console
) -> None:
    """Compare a head of many classes, split by ours, with split and replicated heads by hand."""
    turns = Turns(options.rounds, options.steps)
    asked = [
        "model=class_head",
        f"model.num_classes={options.classes}",
        "data=classes",
        f"train.global_batch={options.class_batch * options.hosts}",
        "strategy=hybrid_split_dp",
    ]
    request, plan = resolved(asked, optimizer, options, turns)
    compared = [sides.ours("ours, hybrid_split_dp", request, plan, folder)]
    batches = sides.all_batches(request, plan, turns.total_steps)
    kinds = (("split by hand", sides.SplitHead), ("DDP by hand", sides.DataParallel))
    for name, kind in kinds:
        start = partial(class_head_by_hand, kind, optimizer, options.classes, batches)
        compared.append(Side(name, start, True))
    words = f"{options.classes} classes, {options.class_batch} samples a host, {optimizer}"
    run(words, compared, hosts, options, turns, console)


def resolved(
    asked: Sequence[str], optimizer: str, options: argparse.Namespace, turns: Turns
) -> tuple[Request, Plan]:
    """Return our request and plan for the overrides `asked`, on the hosts of the options."""
    more = (
        "hardware=cpu",
        f"hardware.devices={options.hosts * options.ranks}",
        f"optimizer={optimizer}",
        f"optimizer.lr={LEARNING_RATE}",
    )
    return sides.resolved([*asked, *more], turns.total_steps)


def run(
    words: str,
    compared: Sequence[Side],
    hosts: Hosts,
    options: argparse.Namespace,
    turns: Turns,
    console: Console,
) -> None:
    """Run the sides that the options name, and print the timings."""
    if options.sides:
        compared = [side for side in compared if any(word in side.name for word in options.sides)]
    ranks = options.hosts * options.ranks
    threads = num_threads(ranks)
    results = interleaved(compared, ranks, threads, turns, lambda r: hosts.move(r // options.ranks))
    words += f", {options.hosts} hosts of {options.ranks} at {hosts.rate_gbit_s:g} Gbit/s"
    show(words, results, [side.name for side in compared if "by hand" in side.name], console)


if __name__ == "__main__":
    main()
