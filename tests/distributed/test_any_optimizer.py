"""Optimizers by their class, under every kind of plan: a plain loop with the same classes, or a
refusal that names the class and says what trying it has shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.distributed.cases import TOLERANCE, UNEVEN, Case, Run
from tests.distributed.equality import JobFailed, assert_equal
from tests.pairs import some

TO_PLAIN_LOOP = 1e-6
# What is not a matrix between hidden values has AdamW, as users of Muon have it.
ADAMW = "_target_: torch.optim.AdamW, eps: 1.0e-3"
REST = f'{{match: [lm_head, token, position, "*norm.weight", "*.bias"], {ADAMW}, lr_scale: 0.5}}'
OWN = {
    "adamw": (
        *("optimizer._target_=torch.optim.AdamW", "optimizer.lr=2e-3", "optimizer.eps=1e-3"),
        *("optimizer.weight_decay=0.1", "optimizer.no_decay=norms_and_biases"),
    ),
    "nesterov": (
        *("optimizer._target_=torch.optim.SGD", "optimizer.lr=0.05", "optimizer.nesterov=true"),
        *("optimizer.momentum=0.9", "optimizer.weight_decay=0.05"),
    ),
    "nadam": (
        *("optimizer._target_=torch.optim.NAdam", "optimizer.lr=2e-3", "optimizer.eps=1e-3"),
        "optimizer.groups=[{match: [lm_head], lr_scale: 0.25, weight_decay: 0.2}]",
    ),
    "adagrad": (
        *("optimizer._target_=torch.optim.Adagrad", "optimizer.lr=0.01"),
        *("optimizer.initial_accumulator_value=0.1", "optimizer.eps=1e-3"),
        "optimizer.groups=[{match: [lm_head], lr_scale: 0.25}]",
    ),
    "muon": (
        *("optimizer._target_=torch.optim.Muon", "optimizer.lr=2e-3", "optimizer.momentum=0.9"),
        f"optimizer.groups=[{REST}]",
    ),
    "adafactor": (
        *("optimizer._target_=torch.optim.Adafactor", "optimizer.lr=0.02"),
        'optimizer.eps=[1.0e-6, 1.0e-3]',
    ),
    "lars": (
        *("optimizer._target_=own_optimizers.Lars", "optimizer.lr=0.1"),
        "optimizer.weight_decay=0.01",
    ),
}
ALONE = ("adamw", "nesterov", "nadam", "adagrad")  # these update elements alone
PIPELINE = ("strategy.graph={pipeline: {stages: 2, micro_batches: 2}}",)
COPIED = (
    "strategy.graph={replicate: {degree: 2, of: {pipeline: {micro_batches: 2, stages: "
    "[{replicate: {degree: 1}}, {replicate: {degree: 2}}]}}}}",
)
PLANS: dict[str, tuple[str, int, tuple[float, ...], tuple[str, ...]]] = {
    "dp": ("dp", 2, UNEVEN, ()),
    "zero1": ("zero1", 2, UNEVEN, ()),
    "zero2": ("zero2", 2, (), ()),
    "zero3": ("zero3", 2, UNEVEN, ()),
    "split": ("split", 2, (), ()),
    "split_head": ("hybrid_split_dp", 2, UNEVEN, ()),
    "pipeline": ("pipeline", 2, (), PIPELINE),
    "3d": ("3d", 6, (), COPIED),
}
CUT = ("zero1", "zero2", "zero3", "split", "split_head")  # which have parts of parameters
EVERY = [(optimizer, plan) for optimizer in OWN for plan in PLANS]


def runs(optimizer: str, plan: str) -> bool:
    """The head of Muon's runs is AdamW's, which may be split."""
    return optimizer in ALONE or plan not in CUT or (optimizer, plan) == ("muon", "split_head")


def case_of(optimizer: str, plan: str) -> Case:
    strategy, devices, speeds, graph = PLANS[plan]
    return Case("gpt", strategy, devices, "none", speeds, (*OWN[optimizer], *graph))


def single(optimizer: str) -> Case:
    return Case("gpt", "single", 1, "none", (), OWN[optimizer])


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    some(
        [row for row in EVERY if runs(*row)],
        [
            *(("adamw", "zero1"), ("nesterov", "split"), ("nadam", "zero3"), ("adagrad", "zero2")),
            *(("muon", "split_head"), ("muon", "3d"), ("adafactor", "dp"), ("lars", "pipeline")),
        ],
    ),
)
def test_every_plan_is_a_plain_loop(run: Run, optimizer: str, plan: str) -> None:
    found = run(case_of(optimizer, plan))
    assert_equal(found, run(single(optimizer), plainly=True), TOLERANCE)


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    some(
        [row for row in EVERY if not runs(*row)],
        [("muon", "zero3"), ("muon", "split"), ("adafactor", "split_head"), ("lars", "zero1")],
    ),
)
def test_parts_that_are_updated_otherwise_are_refused(run: Run, optimizer: str, plan: str) -> None:
    with pytest.raises(JobFailed) as raised:
        run(case_of(optimizer, plan))
    target = OWN[optimizer][0].removeprefix("optimizer.")
    said = str(raised.value)
    assert f"optimizer.{target}" in said
    assert "the update of a parameter that is cut in two along its dimension 0 differs by" in said
    assert "use zero: 0, as strategy=dp" in said or "without a split of them, as strategy=dp" in said
