"""Simulate the figures of the Whale paper (USENIX ATC 2022) beside the reported ones.

python benchmarks/paper.py
python benchmarks/paper.py --figures 13 17
python benchmarks/paper.py --figures 10 12 --batch 2 6 10

A row compares two plans for devices of the catalogue: the predicted samples/s of the first, divided
by those of the second. Figure 16 is of one plan: the part of its step that bridges take. No device
is needed, and nothing is fitted. The paper gives the hardware: nodes of 8 V100 32 GB (NVLink) or
P100 16 GB (PCI Express), with 50 Gbit/s between nodes. All other assumptions are printed below each
figure. If a row differs by more than 15%, or in direction, the cause in the two settings is printed
as well. `not known` is a figure of the paper whose number is in none of our sources.

Everything is in fp32, the default of TensorFlow 1.12. Batches are those of the authors' public
examples (github.com/alibaba/FastNN: ResNet50 with 32 images a device, BERT-Large with micro-batches
of two samples of 384 tokens), or the largest that fit. Where the paper does not say a batch on
which a figure depends, further batches are simulated beside it; `--batch` replaces all of them.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from omegaconf import OmegaConf
from paper_figures import FIGURES, NO_MEMORY, NOT_KNOWN, Row, Side
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from whale_train.errors import PlanError
from whale_train.launcher.compose.command_line import composed
from whale_train.models.options import ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.grammar.nodes import read_strategy
from whale_train.strategies.graph.operation_graph import InputField
from whale_train.strategies.hardware.inventory import MachineFacts, read_inventory
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider
from whale_train.strategies.simulate.prediction import Simulated
from whale_train.strategies.stages.analysis import ModelAnalysis

TOLERATED = 0.15  # of the reported figure


class GNMT(nn.Module):
    """GNMT (Wu et al. 2016, arXiv 1609.08144) in the sizes of tensorflow/nmt's wmt16_gnmt_4_layer.

    The encoder and the decoder have four LSTM layers of 1,024 each. The attention context of the
    decoder's first layer is passed to the layers above it. One head of dot-product attention
    replaces the additive attention of GNMT.
    """

    def __init__(self, vocabulary: int = 32000, width: int = 1024) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.both_ways = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.encoder = nn.LSTM(2 * width, width, 3, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.upper = nn.LSTM(2 * width, width, 3, batch_first=True)
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        """Return the loss, a scalar, for `input_ids` and `labels`, both int64 [batch, tokens]."""
        source = self.encoder(self.both_ways(self.source(input_ids))[0])[0]
        query = self.decoder(self.target(labels))[0]
        context = self.attention(query, source, source, need_weights=False)[0]
        logits = self.lm_head(self.upper(torch.cat((query, context), -1))[0])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def tokens(length: int) -> tuple[InputField, ...]:
    """Return the fields of samples of `length` tokens."""
    return InputField("input_ids", (length,), "int64"), InputField("labels", (length,), "int64")


IMAGES = InputField("pixel_values", (3, 224, 224), "float32"), InputField("labels", (), "int64")
MODELS: Mapping[str, tuple[Sequence[str], tuple[InputField, ...]]] = {
    "bert_large": (["model=bert_large"], tokens(384)),
    "t5_large": (["model=t5_large"], tokens(384)),
    "m6_10b": (["model=m6_10b_dense"], tokens(512)),
    "gnmt": (["model=custom", "model._target_=paper.GNMT"], tokens(50)),
    "resnet50": (["model=resnet50_100k", "model.config.num_labels=1000"], IMAGES),
    "resnet50_100k": (["model=resnet50_100k"], IMAGES),
    "resnet50_1m": (["model=resnet50_100k", "model.config.num_labels=1000000"], IMAGES),
}


Found = Sequence[tuple[Row, float | None]]  # rows with our figures; None for a refused plan


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--figures", nargs="+", type=int, choices=FIGURES, default=list(FIGURES))
    parser.add_argument(
        "--batch", nargs="+", type=int, help="samples a device, in figures that turn on it"
    )
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    console = Console(width=100, highlight=False)
    for number in options.figures:
        figure = FIGURES[number]
        batches = (options.batch if figure.batches else None) or figure.batches or (0,)
        rows = [*figure.rows(batches[0]), *figure.also]
        simulations = [(row, simulated(row)) for row in rows]
        order = in_order(simulations)
        title = f"Figure {number}: {figure.title}"
        console.print(table_of(title, simulations, order))
        console.print(f"Assumed: {figure.setting}")
        if options.batch and figure.batches:
            console.print(f"But with --batch: {batches[0]} samples a device.")
        if order == "differs" or not all(agrees(*pair) and is_near(*pair) for pair in simulations):
            console.print(f"Why: {figure.why}")
        for batch in batches[1:]:
            simulations = [(row, simulated(row)) for row in figure.rows(batch)]
            console.print(table_of(f"Samples a device: {batch}", simulations, ""))
        console.print()


@cache
def analysis_of(name: str) -> ModelAnalysis:
    """Return the analysis of a model in MODELS. Each model is measured once."""
    overrides, fields = MODELS[name]
    model: Any = OmegaConf.to_container(composed(overrides).model, resolve=True)
    profile = profile_model(ModelOptions.from_mapping(model), name, fields, by_folding=True)
    return ModelAnalysis(profile, "fp32")


def considered(side: Side) -> Simulated:
    """Return the simulated step of a side's plan. Raises PlanError where the side does not fit."""
    strategy = read_strategy({"graph": side.graph, "balance": side.balance}, "paper", [])
    inventory = {"nodes": side.nodes, "network": side.network}
    cluster = read_inventory(inventory, "paper", [], MachineFacts(1, 10**9, (), None))
    assert strategy is not None
    assert cluster is not None
    # TensorFlow's BatchNorm computes statistics over the samples of one device.
    training = Training(side.batch, "fp32", 0.0, side.optimizer, {}, sync_batchnorm=False)
    analysis = analysis_of(side.model)
    return consider(strategy, cluster, analysis, training, moving=True).step


def samples_per_s(side: Side) -> float:
    """Return the samples/s that a side's plan predicts. Raises PlanError where the side does not
    fit."""
    return considered(side).prediction().samples_per_s


def bridges_part(side: Side) -> float:
    """Return the part of a step, from 0 to 1, that rank 0 spends in the collectives of its forwards
    and backwards. Raises PlanError where the side does not fit."""
    spans = considered(side).spans
    own = [task for task in spans.tasks if 0 in task.ranks and task.instruction is not None]
    return sum(task.transfer_s for task in own) / spans.seconds


def simulated(row: Row) -> float | None:
    """Return the figure of a row by our plans; None where a side of it does not fit."""
    try:
        if row.measure == "bridges":
            return bridges_part(row.ours)
        ours = samples_per_s(row.ours)
        return ours if row.against is None else ours / samples_per_s(row.against) / row.times
    except PlanError:
        return None


def table_of(title: str, simulations: Found, order: str) -> Table:
    """Return the table of a figure.

    title: title of the table.
    simulations: the rows with their simulated figures.
    order: the result of `in_order`; '' for a table without it.
    """
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = f"The order of the rows {order}." if order else None
    table.add_column("", width=40)
    for heading in ("reported", "ours", "ours / reported", "direction"):
        table.add_column(heading, justify="right")
    for row, ours in simulations:
        known = isinstance(row.reported, float)
        reported = f"{row.reported:.2f}" if known else str(row.reported)
        digits = 2 if ours is None or ours >= 0.1 else 3
        figure = "refused" if ours is None else f"{ours:.{digits}f}"
        ratio = f"{ours / row.reported:.2f}" if ours and isinstance(row.reported, float) else ""
        direction = "agrees" if agrees(row, ours) else "differs"
        direction = "" if row.reported == NOT_KNOWN else direction
        table.add_row(row.what, reported, figure, ratio, direction)
    return table


def agrees(row: Row, ours: float | None) -> bool:
    """Return whether the reported and the simulated figure have the same direction: both above 1,
    both at most 1, or both without a figure. A figure that is not known agrees with any."""
    if row.reported == NOT_KNOWN:
        return True
    if not isinstance(row.reported, float) or ours is None:
        return row.reported == NO_MEMORY and ours is None
    return (row.reported > 1) == (ours > 1)


def is_near(row: Row, ours: float | None) -> bool:
    """Return whether the simulated figure is within TOLERATED of the reported one. Where the paper
    has no memory there is none to be near; a figure that is not known is near none."""
    if not isinstance(row.reported, float) or ours is None:
        return row.reported == NO_MEMORY
    return abs(ours / row.reported - 1) <= TOLERATED


def in_order(simulations: Found) -> str:
    """Return `agrees` or `differs`: whether our figures order the rows as the reported ones do.

    Returns '' for fewer than two rows, and where figures are equal or missing.
    """
    known = [
        (row.reported, ours)
        for row, ours in simulations
        if isinstance(row.reported, float) and ours is not None
    ]
    if len(simulations) < 2 or len(known) < len(simulations):
        return ""
    if any(len(set(figures)) < len(known) for figures in zip(*known, strict=True)):
        return ""
    return "agrees" if sorted(known) == sorted(known, key=lambda pair: pair[1]) else "differs"


if __name__ == "__main__":
    main()
