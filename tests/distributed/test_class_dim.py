"""Logits with their classes in dimension 1: every strategy trains torch's own cross_entropy.

The plain loop gives torch the model's logits as they are. Labels are left out in numbers that
differ from sample to sample.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.equality import JobFailed, Jobs, save
from tests.pairs import covering

BATCH, SAMPLES = 6, 12
UNLIKE = (
    "hardware=v100_p100_mix",
    "hardware.nodes=[{count: 1, devices: 1, device: v100_sxm2_32gb, link: nvlink2}, "
    "{count: 1, devices: 1, device: p100_pcie_16gb, link: pcie3_x16}]",
)
TWO = ("hardware=cpu", "hardware.devices=2")
STRATEGIES = {
    "dp": (*UNLIKE, "strategy=dp"),
    "accumulated": (*TWO, "strategy=dp", "train.accumulate=3"),
    "zero3": (*TWO, "strategy=zero3"),
    "split": (*TWO, "strategy=split"),
    "pipeline": (*TWO, "strategy=pipeline", "strategy.graph.pipeline.stages=2"),
    "hybrid": (*TWO, "strategy=hybrid_split_dp", "model.projects=true"),
}
# name: (classes, places, what else the config says)
SHAPES: dict[str, tuple[int, tuple[int, ...], tuple[str, ...]]] = {
    "picture": (5, (4, 7), ()),
    "as many classes as the width": (7, (4, 7), ()),
    "volume": (5, (2, 3, 4), ()),
    "sequence": (5, (7,), ()),
    "as many classes as the sequence is long": (7, (7,), ("model.class_dim=1",)),
    "all the same": (4, (4, 4), ()),
}
EVERYWHERE = "as many classes as the width"
# Where classes are as many as columns, a head that is split and stages, too; all shapes in turn.
CASES = covering(
    list(product(SHAPES, STRATEGIES)),
    lambda row: {row[0], row[1], *({row} & {(EVERYWHERE, "hybrid"), (EVERYWHERE, "pipeline")})},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("pictures"), np.random.default_rng(5)
    for name, (classes, places, _) in SHAPES.items():
        labels = draw.integers(0, classes, (SAMPLES, *places))
        kept = np.linspace(0.1, 1, SAMPLES).reshape(SAMPLES, *(1 for _ in places))
        labels[draw.random(labels.shape) > kept] = -100
        pictures = draw.normal(size=(SAMPLES, 3, *places)).astype(np.float32)
        save(folder / f"{name}.npz", {"pictures": pictures, "labels": labels})
    return folder


def overrides(shape: str, folder: Path, *more: str) -> list[str]:
    classes, places, settings = SHAPES[shape]
    return [
        *("model._target_=parallel_models.Segmentation", f"model.classes={classes}"),
        *(f"model.dims={len(places)}", "model.loss=cross_entropy", *settings),
        *("data=arrays", f"data.path='{folder / shape}.npz'", "data.shuffle=false"),
        *("train.steps=3", f"train.global_batch={BATCH}", "optimizer=sgd", "optimizer.lr=0.1"),
        *more,
    ]


@pytest.mark.parametrize(("shape", "strategy"), CASES)
def test_it_is_torchs_cross_entropy(shape: str, strategy: str, jobs: Jobs, folder: Path) -> None:
    found = jobs.run(overrides(shape, folder, *STRATEGIES[strategy]))
    of_model = [x for x in STRATEGIES[strategy] if x.startswith("model.")]
    one = ("hardware=cpu", "hardware.devices=1", "strategy=single", *of_model)
    expected = jobs.run(overrides(shape, folder, *one), plainly=True)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-5)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-3)
    if strategy == "hybrid" and shape == EVERYWHERE:  # the logits are nowhere whole
        head = found.plan["rewrite"]["segments"][-1]
        assert head["becomes"] == {"cross_entropy_loss": "split_cross_entropy"}


def test_labels_that_are_not_the_logits(jobs: Jobs, folder: Path) -> None:
    with pytest.raises(JobFailed) as failed:
        jobs.run([*overrides("picture", folder, *STRATEGIES["dp"]), "model.class_dim=-1"])
    assert (
        "model.loss=cross_entropy needs a label for each place of the logits, and Segmentation "
        "makes logits [3, 5, 4, 7] for labels [3, 4, 7] (a batch of 3); use labels of the logits' "
        "shape without the classes, which model.class_dim=1 takes from dimension 1, and "
        "model.class_dim=-1 from the last"
    ) in str(failed.value)
