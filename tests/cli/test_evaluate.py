"""`mode=evaluate`: the results of a checkpoint under another plan, on its own sets and others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.command import whale_train

F1 = "metrics={f1: {_target_: torchmetrics.classification.MulticlassF1Score, num_classes: 257}}"
RUN = (
    *("experiment=smoke", "train.steps=4", "train.evaluate_every=2", "checkpoint.every=2"),
    *("data.evaluation_fraction=0.01", "train.evaluation_samples=20", "seed=3"),
    "data.max_bytes=200000",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `run`, and a text that it has not seen, `other.txt`."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "other.txt").write_text("another text, of which nothing was seen\n" * 60)
    sets = f"data.evaluation={{other: {{path: {folder}/other.txt}}}}"
    answer = whale_train([*RUN, F1, sets, "hydra.run.dir=run"], folder)
    assert answer.status == 0, answer
    return folder


def evaluated(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    answer = whale_train(["mode=evaluate", *overrides, f"hydra.run.dir={name}"], folder)
    assert answer.status == 0, answer
    assert f"the results: {folder}/{name}/evaluation.json" in answer.stdout
    content: dict[str, Any] = json.loads((folder / name / "evaluation.json").read_text())
    return content


def line(folder: Path, step: int) -> dict[str, Any]:
    lines = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").open()]
    found: dict[str, Any] = lines[step - 1]
    return found


@pytest.mark.parametrize(
    ("step", "plan"),
    [
        (4, ("hardware=cpu", "hardware.devices=3", "strategy=split")),
        (2, ("hardware=cpu", "strategy=zero3", "train.global_batch=7")),
    ],
)
def test_results_are_those_of_the_run(folder: Path, step: int, plan: tuple[str, ...]) -> None:
    path = f"path=run/checkpoints/step_{step}"
    found = evaluated(folder, f"again_{step}", path, *plan, "train.evaluation_samples=20")
    assert found["step"] == step
    during = line(folder, step)
    for name in ("evaluation", "other"):
        for result in ("loss", "accuracy", "f1"):
            value = found["sets"][name][result]
            assert value == pytest.approx(during[f"{name}_{result}"], rel=1e-5), (name, result)
    assert found["sets"]["other"]["accuracy"] == during["other_accuracy"]


def test_all_samples_count_unless_told(folder: Path) -> None:
    """Of another set, in place of the run's."""
    few, many = ("other text " * 60, "yet another text " * 200)
    (folder / "few.txt").write_text(few)
    (folder / "both.txt").write_text(few[: len(few) // 64 * 64] + many[: 64 * 30])
    (folder / "many.txt").write_text(many[: 64 * 30])
    names = ("few", "many", "both")
    sets = ", ".join(f"{name}: {{path: {folder}/{name}.txt}}" for name in names)
    found = evaluated(folder, "others", "path=run", f"data.evaluation={{{sets}}}", "hardware=cpu")
    assert list(found["sets"]) == ["evaluation", *names]
    losses = [found["sets"][name]["loss"] for name in names]
    weights = [len(few) // 64, 30]
    assert losses[2] == pytest.approx(np.average(losses[:2], weights=weights), rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            (),
            "error: checkpoint must be given to mode=evaluate; name a run directory or a "
            "checkpoint in one, as checkpoint=runs/MY_RUN",
        ),
        (
            ("path=run", "checkpoint=run"),
            "error: path=run and checkpoint are both given; leave one out",
        ),
        (
            ("path=run", "trackers=[tensorboard]"),
            "error: trackers has no effect on mode=evaluate, which takes no steps; leave it out",
        ),
        (
            ("path=run", "data.evaluation_fraction=0", "data.evaluation=null"),
            "error: data.evaluation names no samples to evaluate, and the checkpoint's run held "
            "none back; write 'data.evaluation={test: {path: FILE}}' or the like",
        ),
    ],
)
def test_refused(folder: Path, overrides: tuple[str, ...], expected: str) -> None:
    answer = whale_train(["mode=evaluate", *overrides], folder)
    assert (answer.status, " ".join(answer.stderr.split())) == (2, expected)


def test_a_run_with_sets_is_verified(folder: Path) -> None:
    sets = f"data.evaluation={{other: {{path: {folder}/other.txt}}}}"
    stop = "train.stop_after={evaluations: 1, metric: other_loss}"
    verify = ("mode=verify", "verify.steps=1", "checkpoint.best=other_f1")
    answer = whale_train([*RUN, *verify, F1, sets, stop], folder)
    assert answer.status == 0, answer
