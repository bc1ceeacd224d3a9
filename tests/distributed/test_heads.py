"""An output projection split beside copies, in models that do more with it than project: each is
the same as on one process."""

from pathlib import Path

import numpy as np
import pytest
from tests.distributed.equality import Jobs, assert_equal, save
from tests.distributed.head_models import TOKENS
from tests.pairs import some

MODELS = ("Tied", "Centred", "Late", "Tempered", "Squares", "Alone")
UNLIKE = (
    "hardware=v100_p100_mix",
    "hardware.nodes=[{count: 1, devices: 1, device: v100_sxm2_32gb, link: nvlink2}, "
    "{count: 1, devices: 1, device: p100_pcie_16gb, link: pcie3_x16}]",
)
TWO = ("hardware=cpu", "hardware.devices=2")
GRAPH = "strategy.graph=[{{replicate: {copies}}}, {{split: {{modules: head}}}}]"
KEPT = {
    "whole": (*TWO, GRAPH.format(copies="{}")),
    "unlike": (*UNLIKE, GRAPH.format(copies="{}")),
    "zero1": (*TWO, GRAPH.format(copies="{zero: 1}")),
    "zero2": (*TWO, GRAPH.format(copies="{zero: 2}")),
    "zero3": (*TWO, GRAPH.format(copies="{zero: 3}")),
    "accumulated": (*TWO, GRAPH.format(copies="{}"), "train.accumulate=2"),
    "copies of a stage": (
        *("hardware=cpu", "hardware.devices=5", "train.precision=fp32"),
        "strategy.graph={pipeline: {micro_batches: 4, stages: [{stage: {of: {replicate: {degree: "
        "1}}}}, {stage: {of: [{replicate: {degree: 4}}, {split: {degree: 2, modules: head}}]}}]}}",
    ),
    "other modules": (
        *("hardware=cpu", "hardware.devices=2"),
        "strategy.graph=[{replicate: {zero: 1}}, {split: {modules: [inner, head]}}]",
    ),
    "two copies": (
        *("hardware=cpu", "hardware.devices=4"),
        "strategy.graph={replicate: {degree: 2, of: [{replicate: {zero: 1, degree: 2}}, "
        "{split: {modules: head}}]}}",
    ),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = np.random.default_rng(3), tmp_path_factory.mktemp("heads") / "ids.npz"
    save(path, {name: draw.integers(0, TOKENS, (14, 5)) for name in ("ids", "labels")})
    return path


# A batch norm over the global batch has one micro-batch; a head alone makes no two stages, and has
# no other modules; a tied head's table would be in both stages.
NOT = {
    *(("Tied", kept) for kept in ("accumulated", "copies of a stage")),
    *(("Late", kept) for kept in ("copies of a stage",)),
    *(("Alone", kept) for kept in ("copies of a stage", "other modules")),
}
# In a run of some of the tests: a head whose weight is read elsewhere too, one whose weight is a
# part of the loss, and a loss that has all classes of a row at once, under unlike shares.
SOME = {("Late", "two copies"), ("Tempered", "accumulated"), ("Squares", "unlike")}
CASES = some(
    [(model, kept) for model in MODELS for kept in KEPT if (model, kept) not in NOT],
    SOME,
)


@pytest.mark.parametrize(("model", "kept"), CASES)
def test_it_is_the_same(model: str, kept: str, path: Path, jobs: Jobs) -> None:
    common = [
        *(f"model._target_=head_models.{model}", "data=arrays", f"data.path='{path}'"),
        *("train.steps=3", "train.global_batch=8", "optimizer=sgd", "optimizer.lr=0.1"),
    ]
    split = jobs.run([*common, *KEPT[kept]])
    (*_, head) = split.plan["task_graphs"]
    names = {"other modules": "split", "copies of a stage": "stage_1.head"}
    assert head["name"] == names.get(kept, "head")
    assert {"head.weight", "embedding.weight"} & set(head["shards"])
    one = jobs.run([*common, "hardware=cpu", "hardware.devices=1", "strategy=single"])
    assert_equal(split, one, 2e-5, 2e-4)
