"""What one plan saved another goes on from: the steps after are those of the run that never ended.

A run under a plan saves after three steps and goes on to the eighth. Resumed from there under any
plan, the last five losses are the same, and so is every parameter, buffer and moment in the
checkpoint after the eighth, by name.
"""

import json
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.distributed.cases import hardware
from tests.distributed.equality import run_job
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import MODELS, pipeline
from tests.distributed.test_routed_experts import MODELS as MIXTURES
from tests.pairs import some

from whale_train.checkpoints.checkpoint_files import check, folder_of
from whale_train.runtime.state.tensor_files import TensorReader

SAVED, STEPS = 3, 8
_SPLIT2 = "{split: {degree: 2}}"
_PIECES = pipeline(2)
# name: devices, strategy graph, speeds of unlike devices in TFLOP/s
PLANS: dict[str, tuple[int, str, tuple[float, ...]]] = {
    "dp": (3, "{replicate: {}}", (2, 1, 1)),
    "zero1": (2, "{replicate: {zero: 1}}", ()),
    "zero2_offload": (2, "{replicate: {zero: 2, offload: {optimizer: cpu}}}", ()),
    "zero3": (3, "{replicate: {zero: 3}}", ()),
    "zero2_parts": (2, "{replicate: {zero: 2, state: [3, 1]}}", ()),
    "zero3_parts": (3, "{replicate: {zero: 3, state: [3, 0, 1]}}", (2, 1, 1)),
    "split_uneven": (3, "{split: {}}", (2, 1, 1)),
    "interleaved": (2, pipeline(2, "interleaved_1f1b"), ()),
    "3d_zero1": (
        8,
        f"{{replicate: {{zero: 1, of: {pipeline(f'[{_SPLIT2}, {_SPLIT2}]', micro_batches=2)}}}}}",
        (),
    ),
    "pipeline_parts": (4, f"{{replicate: {{zero: 1, state: [1, 2], of: {pipeline(2)}}}}}", ()),
    "hybrid": (2, "[{replicate: {}}, {split: {modules: HEAD}}]", ()),
}
_BESIDE = "[{{replicate: {}}}, {{split: {{dim: experts}}}}]"
_PARTS = (
    '[{{replicate: {}}}, {{split: {{modules: "*.mlp"}}}}, {{split: {{modules: "*.self_attn"}}}}]'
)
# Of a model with a mixture, and of one with such modules.
BESIDE: dict[str, tuple[int, str, tuple[float, ...]]] = {
    "experts_unlike": (3, _BESIDE.format("{}"), (5, 2, 1)),
    "experts_zero1": (2, _BESIDE.format("{zero: 1}"), ()),
    "experts_streamed": (
        2,
        _BESIDE.format("{zero: 3, offload: {optimizer: cpu, parameters: cpu}}"),
        (),
    ),
    "parts_unlike": (3, _PARTS.format("{}"), (5, 2, 1)),
    "parts_zero1": (2, _PARTS.format("{zero: 1}"), ()),
}
# BatchNorm takes its statistics over the whole batch, which a pipeline cuts: one micro-batch.
WHOLE_BATCH = {
    "pipeline_parts": (
        4,
        f"{{replicate: {{zero: 1, state: [1, 2], of: {pipeline(2, micro_batches=1)}}}}}",
        (),
    ),
    "interleaved": (2, pipeline(2, micro_batches=1), ()),
    "3d_zero1": (
        8,
        f"{{replicate: {{zero: 1, of: {pipeline(f'[{_SPLIT2}, {_SPLIT2}]', micro_batches=1)}}}}}",
        (),
    ),
}
MOE = MIXTURES["moe_gpt"]
HEADS = {"gpt": "head", "llama": "lm_head", "resnet": "classifier.1"}
OPTIMIZERS = {
    "adamw": ("optimizer=adamw", "optimizer.lr=0.02", "optimizer.eps=0.003"),
    "momentum": ("optimizer=sgd", "optimizer.lr=0.05", "optimizer.momentum=0.9"),
}
# Of losses, of values and moments by their L2 norms.
TOLERANCES = {"fp32": (2e-5, 2e-4), "bf16": (2e-2, 0.2)}


@dataclass(frozen=True)
class Case:
    model: str
    optimizer: str
    saved: str
    resumed: str
    precision: str = "fp32"

    def __str__(self) -> str:
        return "-".join((self.model, self.optimizer, self.saved, self.resumed, self.precision))


def overrides(
    model: str, optimizer: str, plan: str, precision: str, arrays: Path
) -> tuple[str, ...]:
    kind, wanted = ("tokens", MOE) if model == "moe_gpt" else MODELS[model]
    if model == "gpt":
        wanted = (*wanted, "model.tied=false")
    where = WHOLE_BATCH if model == "resnet" and plan in WHOLE_BATCH else PLANS | BESIDE
    devices, graph, speeds = where[plan]
    graph = graph.replace("HEAD", HEADS.get(model, ""))
    return (
        *wanted,
        *("data=arrays", f"data.path={arrays / kind}.npz"),
        *(f"strategy.graph={graph}", *hardware(devices, speeds)),
        *OPTIMIZERS[optimizer],
        *(f"train.steps={STEPS}", "train.global_batch=8", f"train.precision={precision}"),
        "checkpoint.final=false",
    )


class Resumes:
    """Runs of a session, each plan's uninterrupted one once."""

    def __init__(self, folder: Path, served: Served, arrays: Path) -> None:
        self._folder, self._served, self._arrays = folder, served, arrays
        self.uninterrupted = cache(self._uninterrupted)

    def _uninterrupted(self, model: str, optimizer: str, plan: str, precision: str) -> Path:
        run_dir = self._folder / "-".join((model, optimizer, plan, precision))
        wanted = overrides(model, optimizer, plan, precision, self._arrays)
        return self._run(run_dir, *wanted, f"checkpoint.every={SAVED}")

    def resumed(self, case: Case, *more: str) -> Path:
        saved = self.uninterrupted(case.model, case.optimizer, case.saved, case.precision)
        wanted = overrides(
            *(case.model, case.optimizer, case.resumed, case.precision), self._arrays
        )
        return self._run(
            self._folder / "-".join(("resumed", str(case), *more)),
            *wanted,
            f"checkpoint.every={STEPS}",
            f"train.resume={folder_of(saved, SAVED)}",
            *more,
        )

    def with_dropout(self, plan: str, begun: Path | None = None, *more: str) -> Path:
        """A run from its beginning, or from what `begun` saved."""
        name = f"dropout-{plan}-{len(more)}" + ("" if begun is None else "-again")
        wanted = overrides("gpt", "adamw", plan, "fp32", self._arrays)
        resume = () if begun is None else (f"train.resume={folder_of(begun, SAVED)}",)
        every = f"checkpoint.every={SAVED}"
        return self._run(self._folder / name, *wanted, *DROPOUT, every, *resume, *more)

    def _run(self, run_dir: Path, *wanted: str) -> Path:
        said = self._served.ask(
            run_job, overrides=list(wanted), plainly=False, run_dir=str(run_dir)
        )
        assert not said, said
        return run_dir


@pytest.fixture(scope="session")
def resumes(served: Served, arrays: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    return Resumes(tmp_path_factory.mktemp("checkpoints"), served, arrays)


def lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> NDArray[np.float64]:
    return np.array([line["loss"] for line in lines(run_dir)])


def state_after(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = folder_of(run_dir, step)
    check(checkpoint)
    return {
        f"{folder}/{name}": tensor
        for folder in ("model", "optimizer")
        for name, tensor in TensorReader(checkpoint / folder).whole()
    }


ROWS = [
    Case(*row, precision)  # type: ignore[misc]
    for *row, precision in product(HEADS, OPTIMIZERS, PLANS, PLANS, ("fp32", "bf16"))
    if precision == "fp32" or row[0] == "gpt"
]
# In a run of some of the tests: state in parts of every kind (that copies divide, equally or not,
# on the host, of
# weights, of stages, of a head alone, of experts, of modules) is saved, and is gone on from under
# other numbers of devices and unlike ones; every model, of which one has buffers; each optimizer. A
# plan that goes on saves too, and what it saves is compared.
SOME = {
    Case("resnet", "momentum", "zero3", "zero2_offload"),
    Case("gpt", "adamw", "hybrid", "3d_zero1"),
    Case("gpt", "adamw", "zero3_parts", "pipeline_parts", "bf16"),
    Case("resnet", "momentum", "zero3_parts", "zero2_parts"),
    Case("llama", "adamw", "zero2_parts", "zero1"),
    Case("llama", "momentum", "split_uneven", "interleaved"),
    Case("gpt", "adamw", "zero1", "split_uneven", "bf16"),
    Case("moe_gpt", "momentum", "experts_streamed", "experts_unlike"),
    Case("llama", "adamw", "parts_unlike", "parts_zero1"),
}
CASES = some(
    [
        *ROWS,
        *(
            Case("moe_gpt", "momentum", saved, resumed)
            for saved, resumed in (
                ("experts_streamed", "experts_unlike"),
                ("experts_unlike", "experts_streamed"),
                ("experts_zero1", "dp"),
                ("zero3", "experts_zero1"),
            )
        ),
        *(
            Case("llama", "adamw", saved, resumed)
            for saved, resumed in (
                ("parts_zero1", "dp"),
                ("interleaved", "parts_unlike"),
                ("parts_unlike", "parts_zero1"),
            )
        ),
    ],
    SOME,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_plan_goes_on_with_what_any_plan_saved(case: Case, resumes: Resumes) -> None:
    saved = resumes.uninterrupted(case.model, case.optimizer, case.saved, case.precision)
    found = resumes.resumed(case)
    of_losses, of_values = TOLERANCES[case.precision]
    np.testing.assert_allclose(losses(found), losses(saved)[SAVED:], rtol=of_losses)
    ours, expected = state_after(found, STEPS), state_after(saved, STEPS)
    assert ours.keys() == expected.keys()
    began = state_after(saved, SAVED)
    wrong = []
    for name, value in expected.items():
        distance = (ours[name].double() - value.double()).norm()
        if not distance <= of_values * value.double().norm() + 1e-8 * value.numel() ** 0.5:
            wrong.append(f"{name}: {distance:.2e} of {value.double().norm():.2e}")
        moves = not torch.equal(began[name], value)
        assert not moves or not torch.equal(began[name], ours[name]), f"{name} did not move"
    assert not wrong, "\n".join(wrong)


DROPOUT = ("model.dropout=0.2", "model.tied=false")


@pytest.mark.parametrize("plan", some(["dp", "zero3", "split_uneven", "3d_zero1"], ["3d_zero1"]))
def test_the_same_plan_draws_what_it_would_have_drawn(plan: str, resumes: Resumes) -> None:
    begun = resumes.with_dropout(plan)
    again = resumes.with_dropout(plan, begun)
    np.testing.assert_array_equal(losses(again), losses(begun)[SAVED:])


def test_fp16_goes_on_with_its_loss_scale(resumes: Resumes) -> None:
    """The first scale overflows, so that it is not the one a run begins with."""
    more = ("train.precision=fp16", "train.loss_scale=1e30")
    begun = resumes.with_dropout("zero1", None, *more)
    again = resumes.with_dropout("interleaved", begun, *more)
    scales = [[line["loss_scale"] for line in lines(run)] for run in (begun, again)]
    assert scales[1] == scales[0][SAVED:]
    assert scales[1][0] < 1e30


def test_another_batch_goes_on_with_the_sample_after_the_last(resumes: Resumes) -> None:
    """Three steps of 8 samples, then steps of 4 that leave the weights as they are: the next two
    see together what the fourth of 8 would have."""
    saved = resumes.uninterrupted("gpt", "momentum", "dp", "fp32")
    more = ("train.global_batch=4", "optimizer.lr=1e-30")
    found = resumes.resumed(Case("gpt", "momentum", "dp", "zero1"), *more)
    assert losses(found)[:2].mean() == pytest.approx(losses(saved)[SAVED], rel=1e-5)
    state = json.loads((folder_of(found, STEPS) / "state.json").read_text())
    assert state["samples"] == SAVED * 8 + (STEPS - SAVED) * 4
