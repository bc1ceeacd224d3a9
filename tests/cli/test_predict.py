"""`mode=predict`: a prediction for every sample, once and in order, under any plan."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.cli.command import whale_train

SAMPLES, CLASSES = 53, 7
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 7)

    def forward(self, points):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(points)))))

class Values(Net):
    def forward(self, points, labels):
        return torch.nn.functional.mse_loss(super().forward(points), labels)

class Several(Net):
    def forward(self, points, labels):
        logits = super().forward(points)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

class Mixed(Net):
    def forward(self, points, labels):
        logits = super().forward(points)[:, None] * torch.arange(1, 4)[:, None]
        return torch.nn.functional.cross_entropy(
            logits.transpose(0, 1).flatten(0, 1), labels.transpose(0, 1).flatten()
        )
"""
CPU = ("hardware=cpu", "hardware.devices=2")
RUN = (
    *(*CPU, "data=arrays", "train.global_batch=8", "seed=1"),
    *("train.steps=3", "checkpoint.every=3", "data.evaluation_fraction=0.2"),
)
PLANS = {
    "uneven": (*CPU, "strategy=dp", "hardware.devices=3", "train.global_batch=10"),
    "split": (*CPU, "strategy=split"),
    "pipeline": (
        *(*CPU, "strategy=pipeline", "strategy.graph.pipeline.stages=2"),
        *("strategy.graph.pipeline.micro_batches=3", "train.global_batch=12"),
    ),
    "zero3": (*CPU, "strategy=zero3"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `run`, and samples it has not seen, with and without labels."""
    folder = tmp_path_factory.mktemp("predict")
    (folder / "mine.py").write_text(MODEL)
    drawn = np.random.default_rng(5)
    points = drawn.normal(size=(SAMPLES, 6)).astype(np.float32)
    labels = drawn.integers(0, CLASSES, SAMPLES)
    several = drawn.integers(0, 2, (SAMPLES, CLASSES)).astype(np.float32)
    np.savez(folder / "several.npz", points=points, labels=several)
    labels[3] = -100
    np.savez(folder / "new.npz", points=points, labels=labels)
    np.savez(folder / "bare.npz", points=points)
    np.savez(folder / "rows.npz", points=points, labels=drawn.integers(0, CLASSES, (SAMPLES, 3)))
    np.savez(
        folder / "seen.npz",
        points=drawn.normal(size=(40, 6)).astype(np.float32),
        labels=drawn.integers(0, CLASSES, 40),
    )
    model = ("model._target_=mine.Net", "model.loss=cross_entropy", "data.path=seen.npz")
    answer = whale_train([*RUN, *model, "hydra.run.dir=run"], folder)
    assert answer.status == 0, answer
    return folder


def predicted(folder: Path, name: str, *overrides: str, of: str = "all") -> list[dict[str, Any]]:
    """Return the lines of the predictions of set `of`."""
    run = [] if overrides[:1] and overrides[0].startswith("path=") else ["path=run"]
    asked = ["mode=predict", *run, *overrides, f"hydra.run.dir={name}"]
    answer = whale_train(asked, folder)
    assert answer.status == 0, answer
    path = folder / name / "predictions" / f"{of}.jsonl"
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    lines = [json.loads(line) for line in path.open()]
    assert f"{len(lines)} predictions of {of}: {path}" in answer.stdout
    return lines


def by_hand(folder: Path) -> tuple[torch.Tensor, torch.Tensor, np.ndarray[Any, Any]]:
    """Return classes, their probabilities and the labels of the new samples."""
    data = np.load(folder / "new.npz")
    sure, classes = logits_by_hand(folder / "run", data["points"]).softmax(1).max(1)
    return classes, sure, data["labels"]


def logits_by_hand(run: Path, points: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the logits of the model of a run."""
    weights = load_file(run / "model" / "model.safetensors")
    x = torch.from_numpy(points)
    for layer in ("first", "second"):
        x = torch.tanh(x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    return x @ weights["head.weight"].T + weights["head.bias"]


@pytest.mark.parametrize("plan", PLANS)
def test_each_sample_once_and_in_order(folder: Path, plan: str) -> None:
    lines = predicted(folder, plan, "data.path=new.npz", *PLANS[plan])
    classes, sure, labels = by_hand(folder)
    assert [x["sample"] for x in lines] == list(range(SAMPLES))
    assert [x["predicted"] for x in lines] == classes.tolist()
    assert [x["target"] for x in lines] == [None if x == -100 else x for x in labels.tolist()]
    np.testing.assert_allclose([x["probability"] for x in lines], sure, atol=2e-6)
    results = json.loads((folder / plan / "evaluation.json").read_text())["sets"]["all"]
    right = (classes.numpy() == labels).sum()
    assert results["accuracy"] == pytest.approx(right / (SAMPLES - 1))


@pytest.mark.parametrize("plan", ["uneven", "split"])
def test_samples_without_labels(folder: Path, plan: str) -> None:
    lines = predicted(folder, f"bare_{plan}", "data.path=bare.npz", *PLANS[plan])
    classes, _, _ = by_hand(folder)
    assert [x["predicted"] for x in lines] == classes.tolist()
    assert all("target" not in x for x in lines)
    assert not (folder / f"bare_{plan}" / "evaluation.json").exists()


def test_the_runs_own_set(folder: Path) -> None:
    """Where the command names no data, the samples are those that the run held back."""
    lines = predicted(folder, "own", of="evaluation")
    assert [x["sample"] for x in lines] == list(range(8))


@pytest.mark.parametrize("model", ["Values", "Several"])
def test_values_and_several_labels(folder: Path, model: str) -> None:
    """Under two plans: of the model as it is, and of its graph."""
    data = ("model.loss=model", "data.path=several.npz", "data.evaluation_fraction=0")
    answer = whale_train(
        [*RUN, f"model._target_=mine.{model}", *data, f"hydra.run.dir={model}"], folder
    )
    assert answer.status == 0, answer
    samples = np.load(folder / "several.npz")
    logits = logits_by_hand(folder / model, samples["points"]).numpy()
    for plan in ("uneven", "split"):
        lines = predicted(folder, f"{model}_{plan}", f"path={model}", *PLANS[plan])
        assert [x["target"] for x in lines] == samples["labels"].tolist()
        if model == "Values":
            np.testing.assert_allclose([x["predicted"] for x in lines], logits, atol=2e-6)
            continue
        assert [x["predicted"] for x in lines] == (logits > 0).astype(int).tolist()
        sure = [x["probability"] for x in lines]
        np.testing.assert_allclose(sure, 1 / (1 + np.exp(-logits)), atol=2e-6)


def test_targets_of_other_samples_are_noticed(folder: Path) -> None:
    model = ("model._target_=mine.Mixed", "model.loss=model", "data.path=rows.npz")
    answer = whale_train([*RUN, *model, "hydra.run.dir=mixed"], folder)
    assert answer.status == 0, answer
    answer = whale_train(["mode=predict", "path=mixed", "strategy=dp"], folder)
    assert answer.status == 1
    said = "the model's loss does not take the targets of one sample after the other"
    assert said in " ".join(answer.stderr.split())


def test_weights_that_a_run_ended_with(folder: Path) -> None:
    """Of a run without checkpoints, and named themselves."""
    model = ("model._target_=mine.Net", "model.loss=cross_entropy", "data.path=seen.npz")
    answer = whale_train([*RUN, *model, "checkpoint.every=null", "hydra.run.dir=alone"], folder)
    assert answer.status == 0, answer
    expected = predicted(folder, "of_the_checkpoint", "data.path=bare.npz")
    for number, path in enumerate(("alone", "alone/model")):
        lines = predicted(folder, f"alone_{number}", f"path={path}", "data.path=bare.npz")
        assert lines == expected


def test_weights_of_another_model(folder: Path) -> None:
    (folder / "wider.py").write_text(MODEL.replace("16", "24"))
    wider = ("model._target_=wider.Net", "model.loss=cross_entropy")
    answer = whale_train(["mode=predict", "path=run", *wider], folder)
    assert answer.status == 2
    said = "has another shape of first.weight (16 x 6, and here 24 x 6)"
    assert said in " ".join(answer.stderr.split())


def test_another_loss_of_the_runs_model(folder: Path) -> None:
    loss = ("model.loss._target_=torch.nn.CrossEntropyLoss", "model.loss.label_smoothing=0.2")
    predicted(folder, "smoothed", "data.path=new.npz", *loss)
    data = np.load(folder / "new.npz")
    results = json.loads((folder / "smoothed" / "evaluation.json").read_text())["sets"]["all"]
    logits, labels = logits_by_hand(folder / "run", data["points"]), torch.tensor(data["labels"])
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    assert results["loss"] == pytest.approx(expected.item(), rel=1e-5)
