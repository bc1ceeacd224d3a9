"""Run the command under every plan, and compare each run with a plain torch loop.

This file owns the plans, the comparison of a run, and the rows of the tables of `every_plan.py`.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics.classification
from kinds import KINDS, LAYERS, TOKENS, Kind, logits_loss
from my_code import Layers
from plain_loops import Trained, batches_of, rounded_otherwise, train_plainly, value_difference
from plain_optimizers import OPTIMIZERS, Updates, sgd
from safetensors.torch import load_file
from tests.cli.command import whale_train

from whale_train import compose
from whale_train.data.open import open_dataset

STEPS, BATCH, TOLERANCE = 6, 8, 2e-5
METRIC_STEPS = 60  # so many that the model learns to predict more than one class
SGD = ("optimizer=sgd", "optimizer.lr=0.1")
PROVEN = "proven: every sample was taken once an epoch"
REASON = re.compile(r"cut in two along its dimension \d differs by ([\d.e-]+) of itself")


def cpus(count: int) -> tuple[str, ...]:
    """Return the overrides for `count` equal CPU processes."""
    return ("hardware=cpu", f"hardware.devices={count}")


def _unlike(*speeds: int) -> tuple[str, ...]:
    """Return the overrides for CPU processes that emulate one device of each speed, in TFLOP/s."""
    nodes = ", ".join(
        f"{{devices: 1, link: nvlink2, device: {{name: device_{speed}, memory_bytes: 16e9, "
        f"flops: {{fp32: {speed}e12}}, memory_bandwidth_bytes_s: {speed}e11}}}}"
        for speed in speeds
    )
    return ("hardware=v100_p100_mix", f"hardware.nodes=[{nodes}]", "launcher=emulate")


UNEVEN = ("strategy=dp", *_unlike(5, 3))
PIPELINE = ("strategy=pipeline", "strategy.graph.pipeline.stages=2", *cpus(2))
MICRO_BATCHES = "strategy.graph.pipeline.micro_batches={}"
AT_STEP = 3  # the run of the last plan continues from the first plan's checkpoint of this step
DATA_PLANS = {
    "dp, 5:3": (*UNEVEN, f"checkpoint.every={AT_STEP}"),
    "zero3": ("strategy=zero3", *cpus(2)),
    "split": ("strategy=split", *cpus(2)),
    "pipeline": PIPELINE,
    "dp, then zero3 on 3": ("strategy=zero3", *cpus(3)),
}
FIRST, *_, RESUMED = DATA_PLANS
THREE_D = "strategy.graph.replicate.of.pipeline.micro_batches=2"
OPTIMIZER_PLANS = {
    "dp": ("strategy=dp", *cpus(2)),
    "pipeline": (*PIPELINE, MICRO_BATCHES.format(2)),
    "zero1": ("strategy=zero1", *cpus(2)),
    "zero3": ("strategy=zero3", *cpus(2)),
    "split": ("strategy=split", *cpus(2)),
    "3d": ("strategy=3d", THREE_D, *cpus(8)),  # two replicas of two stages on two ranks each
}
WHOLE = ("dp", "pipeline")  # plans whose ranks hold whole parameters
METRIC_PLANS = {
    "one process": ("strategy=single", *cpus(1)),
    "dp, 5:3": UNEVEN,
    "zero1, accumulated": ("strategy=zero1", "train.accumulate=2", *cpus(2)),
    "split": ("strategy=split", *cpus(2)),
    "pipeline": (*PIPELINE, MICRO_BATCHES.format(2)),
}
METRICS = {
    "accuracy_micro": ("MulticlassAccuracy", {"num_classes": 10, "average": "micro"}),
    "f1_macro": ("MulticlassF1Score", {"num_classes": 10, "average": "macro"}),
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the text, and whether the result is right."""

    text: str
    holds: bool


Rows = dict[str, dict[str, Cell]]


class Failed(Exception):
    """The error of a run whose exit status was not 0."""


def lines_of(run: str, *overrides: str, steps: int = STEPS) -> list[dict[str, float]]:
    """Run the command in the folder `run`, and return the lines of `metrics.jsonl`. Raises Failed
    where the command fails."""
    common = (f"train.steps={steps}", f"train.global_batch={BATCH}", f"hydra.run.dir={run}")
    answer = whale_train([*common, *overrides], Path.cwd())
    if answer.status:
        raise Failed(f"exit status {answer.status}: {' '.join(answer.stderr.split())}")
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").open()]


def loss_difference(lines: Sequence[dict[str, float]], expected: Sequence[float]) -> float:
    """Return the largest relative difference of a loss; infinite where the numbers of steps
    differ."""
    if len(lines) != len(expected):
        return float("inf")
    ratios = np.divide([line["loss"] for line in lines], expected)
    return float(np.nan_to_num(abs(ratios - 1), nan=np.inf).max())


def figure(difference: float) -> str:
    """Return a difference as text with one digit, such as `3e-06`."""
    return f"{difference:.0e}" if difference else "0"


def row_of(name: str, plans: Sequence[str], cell: Callable[..., Cell], *given: Any) -> Any:
    """Return a cell for each plan: `cell(plan, *given)`, or the message of a command that failed.

    Every cell is also printed to stderr at once.
    """
    cells = {}
    for plan in plans:
        try:
            cells[plan] = cell(plan, *given)
        except Failed as failure:
            cells[plan] = Cell(str(failure), False)
        print(f"{name}, {plan}: {cells[plan].text}", file=sys.stderr, flush=True)
    return cells


def data() -> Rows:
    """Return a row for each kind of data, with a cell for each plan."""
    rows: Rows = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        batches = batches_of(kind, STEPS, BATCH)
        plain = train_plainly(kind.build, sgd, batches, kind.loss)
        rows[name] = row_of(name, list(DATA_PLANS), _data_cell, number, kind, plain)
    return rows


def _data_cell(plan: str, number: int, kind: Kind, plain: Trained) -> Cell:
    run, first = (f"data_{number}_{list(DATA_PLANS).index(x)}" for x in (plan, FIRST))
    begins = AT_STEP if plan == RESUMED else 0
    goes_on = (f"train.resume={first}/checkpoints/step_{begins}",) if begins else ()
    more = (MICRO_BATCHES.format(kind.micro_batches),) if plan == "pipeline" else goes_on
    lines = lines_of(run, *kind.overrides, *SGD, *DATA_PLANS[plan], *more)
    difference = loss_difference(lines, plain.losses[begins:])
    audit = whale_train(["mode=audit", f"run={run}"], Path.cwd())
    proven = audit.status == 0 and PROVEN in audit.stdout
    said = "proven" if proven else " ".join(audit.stderr.split())
    return Cell(f"{figure(difference)}, {said}", proven and difference <= TOLERANCE)


def optimizers() -> Rows:
    """Return a row for each optimizer, with a cell for each plan.

    A further column has the effect of other roundings on the plain loop. Twice that effect is
    allowed.
    """
    rows: Rows = {}
    batches = batches_of(TOKENS, STEPS, BATCH)
    for number, (name, updates) in enumerate(OPTIMIZERS.items()):
        plain = train_plainly(TOKENS.build, updates.make, batches, TOKENS.loss)
        others = [
            train_plainly(TOKENS.build, rounded_otherwise(updates.make, draw), batches, TOKENS.loss)
            for draw in range(3)
        ]
        weights = dict(plain.model.named_parameters())
        rounding = max(value_difference(x.model.state_dict(), weights) for x in others)
        given = (number, updates, plain, max(TOLERANCE, 2 * rounding))
        cells = row_of(name, list(OPTIMIZER_PLANS), _optimizer_cell, *given)
        rows[name] = {"plain, rounded otherwise": Cell(f"{figure(rounding)}", True), **cells}
    return rows


def _optimizer_cell(
    plan: str, number: int, updates: Updates, plain: Trained, allowed: float
) -> Cell:
    run = f"optimizers_{number}_{plan}"
    try:
        lines = lines_of(run, *TOKENS.overrides, *updates.overrides, *OPTIMIZER_PLANS[plan])
    except Failed as failure:
        reason = REASON.search(str(failure))
        is_refusal = str(failure).startswith("exit status 2: ") and reason is not None
        if not is_refusal or f".{updates.name} " not in str(failure):
            raise
        may_refuse = updates.needs_whole and plan not in WHOLE
        return Cell(f"refused: {reason[1]} of an update, if cut", may_refuse)
    losses = loss_difference(lines, plain.losses)
    weights = load_file(Path(run) / "model" / "model.safetensors")
    values = value_difference(weights, dict(plain.model.named_parameters()))
    return Cell(f"{figure(losses)}, {figure(values)}", losses <= TOLERANCE and values <= allowed)


def metrics() -> Rows:
    """Return a row for each plan, with a cell for each metric."""
    kind = Kind((*LAYERS, "data=digits"), Layers, logits_loss)
    model = train_plainly(Layers, sgd, batches_of(kind, METRIC_STEPS, BATCH), logits_loss).model
    dataset = open_dataset(compose(*kind.overrides).data)
    held_back = dataset.evaluation_samples(np.arange(dataset.num_evaluation_samples))
    with torch.no_grad():
        predicted = model(torch.from_numpy(held_back["pixel_values"])).argmax(-1)
    targets = torch.from_numpy(held_back["labels"])
    plain, asked = {}, []
    for name, (metric, options) in METRICS.items():
        compute = getattr(torchmetrics.classification, metric)(**options)
        plain[name] = compute(predicted, targets).item()
        given = ", ".join(f"{key}: {value}" for key, value in options.items())
        asked.append(f"{name}: {{_target_: torchmetrics.classification.{metric}, {given}}}")
    evaluated = ("train.evaluation_samples=1000", f"train.evaluate_every={METRIC_STEPS}")
    wanted = (*kind.overrides, *SGD, *evaluated, f"metrics={{{', '.join(asked)}}}")
    rows = {"torchmetrics on the plain model": {x: Cell(repr(y), True) for x, y in plain.items()}}
    for number, (plan, overrides) in enumerate(METRIC_PLANS.items()):
        try:
            line = lines_of(f"metrics_{number}", *wanted, *overrides, steps=METRIC_STEPS)[-1]
            values = {name: line[f"evaluation_{name}"] for name in plain}
            rows[plan] = {name: Cell(repr(x), x == plain[name]) for name, x in values.items()}
        except Failed as failure:
            rows[plan] = {name: Cell(str(failure), False) for name in plain}
        said = ", ".join(f"{name} {cell.text}" for name, cell in rows[plan].items())
        print(f"{plan}: {said}", file=sys.stderr, flush=True)
    return rows
