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
from tests.pairs import covering, some
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


def overrides(strategy: str, data: Path, *more: str, steps: int = STEPS) -> list[str]:
    devices, graph = STRATEGIES[strategy]
    return [
        *("model._target_=test_not_finite.Logs", "model.loss=cross_entropy"),
        *("data=arrays", f"data.path={data}", "data.shuffle=false", "optimizer=sgd"),
        *(f"strategy.graph={graph}", *hardware(devices, ()), f"train.steps={steps}"),
        *(f"train.global_batch={BATCH}", *more),
    ]


# Where each engine, and a stage, finds it; partitions on the host and beside stages are such too.
SOME = {"dp", "zero3", "split", "pipeline"}
CASES = some(STRATEGIES, SOME)
COPIES = [name for name in STRATEGIES if name != "single"]


@pytest.mark.parametrize("strategy", CASES)
def test_the_run_stops_and_says_where_it_began(strategy: str, data: Path, jobs: Jobs) -> None:
    said = (
        f"the gradient norm of step {BAD_STEP} is not finite, which began with aten.log.default in "
        r"deep.1 (rank "
    )
    with pytest.raises(JobFailed, match=re.escape(said)):
        jobs.run(overrides(strategy, data))


# Every engine leaves it out: torch's, partitions of each stage, one on the host, and two engines.
@pytest.mark.parametrize(
    "strategy",
    covering(COPIES, lambda strategy: {strategy} & {"dp", "zero2_offload", "zero1_pipeline"}),
)
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


LINEAR = ("optimizer.schedule=linear", "optimizer.lr=0.06")


@pytest.mark.parametrize("strategy", [pytest.param("single", marks=pytest.mark.full), "zero1"])
def test_the_schedule_waits_for_a_step_that_was_left_out(
    strategy: str, data: Path, jobs: Jobs
) -> None:
    found = jobs.run(overrides(strategy, data, "train.on_nan=skip", *LINEAR))
    taken = [0, 1, 2, 3, 3, 4]  # before each step
    assert found.rates == pytest.approx([0.06 * (1 - n / (STEPS - 1)) for n in taken])


@pytest.fixture(scope="module")
def hopeless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hopeless") / "data.npz"
    points = -np.abs(np.random.default_rng(3).normal(size=(2 * BATCH, 6)))
    save(path, {"points": points, "labels": np.arange(2 * BATCH) % 5})
    return path


def test_steps_are_left_out_until_it_is_clear_that_all_will_be(hopeless: Path, jobs: Jobs) -> None:
    few = jobs.run(overrides("single", hopeless, "train.on_nan=skip"))
    assert [line["skipped"] for line in few.lines] == [True] * STEPS
    said = (
        "100 steps in a row were left out, the last of them step 100, as their loss or gradient "
        "norm was not finite; use train.on_nan=stop to see where that begins, or a lower optimi"
    )
    with pytest.raises(JobFailed, match=said):
        jobs.run(overrides("dp", hopeless, "train.on_nan=skip", steps=200))


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No sample of the fourth step has a target."""
    draw = np.random.default_rng(4)
    labels = draw.integers(0, 5, STEPS * BATCH)
    labels[(BAD_STEP - 1) * BATCH : BAD_STEP * BATCH] = -100
    path = tmp_path_factory.mktemp("unlabelled") / "data.npz"
    points = np.abs(draw.normal(size=(STEPS * BATCH, 6))) + 0.1
    save(path, {"points": points, "labels": labels})
    return path


@pytest.mark.parametrize("strategy", CASES)
def test_a_step_without_targets_is_named(strategy: str, unlabelled: Path, jobs: Jobs) -> None:
    said = (
        r"NotFinite: step 4 has no target: all its labels are -100, so that its loss is a mean "
        r"over nothing \(samples 24, 25, 26 and 5 more\); leave samples without targets out of the"
    )
    with pytest.raises(JobFailed, match=said):
        jobs.run(overrides(strategy, unlabelled))


MOMENTUM = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.1")


@pytest.mark.parametrize(
    "strategy", covering(COPIES, lambda strategy: {strategy} & {"zero1", "split"})
)
def test_a_step_without_targets_is_left_out(strategy: str, unlabelled: Path, jobs: Jobs) -> None:
    """Its gradients may be zeros, and momentum and decay would move what is trained."""
    skip = ("train.on_nan=skip", *MOMENTUM)
    found = jobs.run(overrides(strategy, unlabelled, *skip))
    single = jobs.run(overrides("single", unlabelled, *skip))
    assert [bool(x.get("skipped")) for x in found.lines] == [n == 4 for n in range(1, STEPS + 1)]
    assert_equal(without_step(found), without_step(single), TOLERANCE)


def test_a_run_may_go_on(data: Path, jobs: Jobs) -> None:
    found = jobs.run(overrides("dp", data, "train.on_nan=null"))
    assert found.losses[BAD_STEP - 2] is not None
    assert found.losses[BAD_STEP - 1 :] == [None] * (STEPS - BAD_STEP + 1)


def test_without_the_norm_the_loss_tells(data: Path, jobs: Jobs) -> None:
    with pytest.raises(JobFailed, match=f"the loss of step {BAD_STEP} is not finite; use"):
        jobs.run(overrides("dp", data, "train.grad_norm=false"))
