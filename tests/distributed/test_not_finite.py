"""Gradients that are no numbers: a run stops and says where they began, or leaves the step out."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.cases import TOLERANCE, hardware
from tests.distributed.equality import Computed, JobFailed, Jobs, assert_equal, save
from tests.distributed.test_parallel_strategies import pipeline
from torch import Tensor, nn

BATCH, STEPS, BAD_STEP = 8, 6, 4
STRATEGIES = {
    "single": (1, "{replicate: {}}"),
    "dp": (2, "{replicate: {}}"),
    "zero1": (2, "{replicate: {zero: 1}}"),
    "zero2": (2, "{replicate: {zero: 2}}"),
    "zero2_offload": (2, "{replicate: {zero: 2, offload: {optimizer: cpu}}}"),
    "zero3": (2, "{replicate: {zero: 3}}"),
    "split": (2, "{split: {}}"),
    "pipeline": (2, pipeline(2)),
    "zero1_pipeline": (4, f"{{replicate: {{zero: 1, of: {pipeline(2)}}}}}"),
}


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Logs(nn.Module):
    """Takes the logarithm of one feature, in its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 24), nn.Linear(24, 24), nn.Linear(24, 5)
        self.deep = nn.Sequential(nn.Identity(), Logarithm())

    def forward(self, points: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(points))
        hidden = torch.tanh(self.second(hidden)) + self.deep(points[:, :1])
        logits: Tensor = self.head(hidden)
        return logits


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All first features are positive, but for one sample of the fourth step."""
    draw = np.random.default_rng(3)
    points = np.abs(draw.normal(size=(STEPS * BATCH, 6))) + 0.1
    points[(BAD_STEP - 1) * BATCH + 5, 0] = -1.0
    path = tmp_path_factory.mktemp("not_finite") / "data.npz"
    save(path, {"points": points, "labels": draw.integers(0, 5, STEPS * BATCH)})
    return path


def overrides(strategy: str, data: Path, *more: str) -> list[str]:
    devices, graph = STRATEGIES[strategy]
    return [
        *("model._target_=test_not_finite.Logs", "model.loss=cross_entropy"),
        *("data=arrays", f"data.path={data}", "data.shuffle=false", "optimizer=sgd"),
        *(f"strategy.graph={graph}", *hardware(devices, ()), f"train.steps={STEPS}"),
        *(f"train.global_batch={BATCH}", *more),
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_run_stops_and_says_where_it_began(strategy: str, data: Path, jobs: Jobs) -> None:
    said = (
        f"the gradient norm of step {BAD_STEP} is not finite, which began with aten.log.default in "
        r"deep.1 (rank "
    )
    with pytest.raises(JobFailed, match=re.escape(said)):
        jobs.run(overrides(strategy, data))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_the_step_is_left_out(strategy: str, data: Path, jobs: Jobs) -> None:
    found = jobs.run(overrides(strategy, data, "train.on_nan=skip"))
    single = jobs.run(overrides("single", data, "train.on_nan=skip"))
    skipped = [bool(line.get("skipped")) for line in found.lines]
    assert skipped == [step == BAD_STEP for step in range(1, STEPS + 1)]
    assert_equal(without_step(found), without_step(single), TOLERANCE)


def without_step(run: Computed) -> Computed:
    """What the run computed but for the loss and norm of the bad step, which are null."""
    place = BAD_STEP - 1
    assert (run.losses[place], run.norms[place]) == (None, None)
    cut = {name: [*getattr(run, name)] for name in ("losses", "norms")}
    for numbers in cut.values():
        del numbers[place]
    return replace(run, **cut)


def test_a_run_may_go_on(data: Path, jobs: Jobs) -> None:
    found = jobs.run(overrides("dp", data, "train.on_nan=null"))
    assert found.losses[BAD_STEP - 2] is not None
    assert found.losses[BAD_STEP - 1 :] == [None] * (STEPS - BAD_STEP + 1)


def test_without_the_norm_the_loss_tells(data: Path, jobs: Jobs) -> None:
    with pytest.raises(JobFailed, match=f"the loss of step {BAD_STEP} is not finite; use"):
        jobs.run(overrides("dp", data, "train.grad_norm=false"))
