"""Runs that end early by their evaluations, and that keep their best checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.cli.command import whale_train

PATIENCE = 2
STOP = f"train.stop_after={{evaluations: {PATIENCE}, metric: evaluation_loss}}"
# The loss falls, and rises again once the rate is too large.
RUN = (
    *("experiment=smoke", "train.steps=30", "train.evaluate_every=2", "checkpoint.keep=1"),
    *("optimizer=sgd", "optimizer.lr=1", "optimizer.warmup_steps=20", "optimizer.momentum=0.9"),
    *("data.evaluation_fraction=0.1", "train.evaluation_samples=16"),
)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


def evaluations(run_dir: Path) -> dict[int, float]:
    return {x["step"]: x["evaluation_loss"] for x in lines(run_dir) if "evaluation_loss" in x}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    best = ("checkpoint.best=evaluation_loss", "checkpoint.final=best", "checkpoint.every=3")
    answer = whale_train([*RUN, STOP, *best, "hydra.run.dir=run"], folder)
    assert answer.status == 0, answer
    assert "ended after step" in answer.stdout
    return folder


def test_a_run_ends_once_its_metric_has_not_got_better(ended: Path) -> None:
    values = evaluations(ended / "run")
    summary = json.loads((ended / "run" / "summary.json").read_text())
    best = min(values, key=lambda step: values[step])
    assert 2 < best < 28  # or nothing would be shown
    assert summary["best"] == {"metric": "evaluation_loss", "value": values[best], "step": best}
    assert summary["steps"] == max(values) == best + 2 * PATIENCE
    assert summary["stopped_after"] is None


def test_the_best_checkpoint_is_kept_and_made_the_model(ended: Path) -> None:
    run = ended / "run"
    summary = json.loads((run / "summary.json").read_text())
    best = summary["best"]["step"]
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {"best.json", f"step_{best}", f"step_{summary['steps']}"}
    said = json.loads((run / "checkpoints" / "best.json").read_text())
    assert said == summary["best"]
    exported = whale_train(
        ["mode=export", f"checkpoint=run/checkpoints/step_{best}", "hydra.run.dir=exported"], ended
    )
    assert exported.status == 0, exported
    model, expected = (
        load_file(folder / "model" / "model.safetensors") for folder in (run, ended / "exported")
    )
    assert model.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(model[name], tensor)


def test_a_run_that_has_ended_early_is_at_its_end(ended: Path) -> None:
    """A queue may start its command again. More evaluations may be asked for then."""
    again = (*RUN, "checkpoint.every=3", "train.resume=auto", "checkpoint.best=evaluation_loss")
    before = lines(ended / "run")
    copied = shutil.copytree(ended / "run", ended / "again")
    answer = whale_train([*again, STOP, "checkpoint.final=best", "hydra.run.dir=again"], ended)
    assert answer.status == 0, answer
    assert "which is the end" in answer.stdout.replace("\n", " ")
    assert lines(copied) == before
    stop = STOP.replace(f"evaluations: {PATIENCE}", f"evaluations: {PATIENCE + 1}")
    assert stop != STOP
    answer = whale_train([*again, stop, "hydra.run.dir=again"], ended)
    assert answer.status == 0, answer
    assert lines(copied)[-1]["step"] == before[-1]["step"] + 2


def test_a_run_that_goes_on_counts_on(ended: Path) -> None:
    """From before the best evaluation, under another plan: it ends after the same step."""
    start = ("checkpoint.every=2", "train.steps=30", "hydra.run.dir=first")
    whole = lines(ended / "run")
    first = whale_train([*RUN, *start, "checkpoint.keep=null", STOP], ended)
    assert first.status == 0, first
    resumed = whale_train(
        [*RUN, STOP, "strategy=zero1", "train.resume=first/checkpoints/step_2", "hydra.run.dir=on"],
        ended,
    )
    assert resumed.status == 0, resumed
    found = lines(ended / "on")
    assert [x["step"] for x in found] == [x["step"] for x in whole][2:]
    np.testing.assert_allclose(
        list(evaluations(ended / "on").values()),
        [x for step, x in evaluations(ended / "run").items() if step > 2],
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("train.evaluate_every=null", STOP),
            "error: train.stop_after.metric=evaluation_loss is a result of evaluations, and there "
            "are none (train.evaluate_every=null); use train.evaluate_every=100 or the like, or "
            "train.stop_after=null",
        ),
        (
            ("checkpoint.best=evaluation_los",),
            "error: checkpoint.best=evaluation_los is no result of the evaluations; did you mean "
            "evaluation_loss? One of: evaluation_accuracy, evaluation_loss",
        ),
        (
            ("checkpoint.final=best",),
            "error: checkpoint.final=best is the best checkpoint's, and none is kept "
            "(checkpoint.best=null); use checkpoint.best=evaluation_loss or the like, or true",
        ),
    ],
)
def test_refused(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    answer = whale_train([*RUN, *overrides], tmp_path)
    assert (answer.status, " ".join(answer.stderr.split())) == (2, expected)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (
            "auroc: {_target_: torchmetrics.classification.MulticlassAUROC, num_classes: 5}",
            "metrics.auroc._target_=torchmetrics.classification.MulticlassAUROC is not computed "
            "from predicted classes: it raised ",
        ),
        (
            "f1: {_target_: torchmetrics.classification.MulticlassF1Score}",
            "metrics.f1.num_classes is not given, and MulticlassF1Score needs it; write ",
        ),
        ("f1: {_target_: os.system}", "metrics.f1._target_=os.system is a function that does not "),
        ("loss: {_target_: torchmetrics.Metric}", "metrics.loss is a result of every evaluation;"),
    ],
)
def test_metrics_are_tried_before_anything_starts(
    tmp_path: Path, metric: str, expected: str
) -> None:
    answer = whale_train([*RUN, f"metrics={{{metric}}}"], tmp_path)
    assert answer.status == 2
    assert expected in " ".join(answer.stderr.split())
