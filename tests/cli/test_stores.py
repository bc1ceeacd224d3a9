"""`checkpoint.to`, and URLs to go on from: copies in a store, by the command."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tests.cli.command import whale_train
from tests.cli.test_resume import RUN, losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `whole`, a run of six steps, and `kept`, its first four, whose checkpoints and
    weights are in `store` alone."""
    folder = tmp_path_factory.mktemp("stores")
    whole = whale_train([*RUN, "strategy=dp", "hydra.run.dir=whole"], folder)
    assert whole.status == 0, whole
    copies = ("train.steps=4", "checkpoint.keep=1", f"checkpoint.to=file://{folder}/store")
    kept = whale_train([*RUN, "strategy=dp", *copies, "hydra.run.dir=kept"], folder)
    assert kept.status == 0, kept
    for name in ("step_4", "model"):
        assert f"copied: file://{folder}/store/{name} (" in kept.stdout
    summary = json.loads((folder / "kept" / "summary.json").read_text())
    to = f"file://{folder}/store"
    assert summary["copies"] == {"to": to, "steps": [4], "model": True, "errors": {}}
    for name in ("checkpoints", "model"):
        shutil.rmtree(folder / "kept" / name)
    return folder


def test_what_is_in_a_store(folder: Path) -> None:
    there = sorted(path.name for path in (folder / "store").iterdir())
    assert there == ["model", "request.json", "run.json", "step_4", "summary.json"]


def test_another_plan_goes_on_from_a_url(folder: Path) -> None:
    """And the run itself does, from the store that it copied to, whose checkpoint it lost."""
    expected = losses(folder / "whole")
    url = f"file://{folder}/store"
    answer = whale_train(
        [*RUN, "strategy=split", f"train.resume={url}", "hydra.run.dir=split"], folder
    )
    assert answer.status == 0, answer
    assert losses(folder / "split") == pytest.approx(expected[4:], rel=2e-5)
    shutil.copytree(folder / "store", folder / "copy_of_store")
    auto = ("train.resume=auto", f"checkpoint.to=file://{folder}/copy_of_store")
    answer = whale_train([*RUN, "strategy=dp", *auto, "hydra.run.dir=kept"], folder)
    assert answer.status == 0, answer
    assert losses(folder / "kept") == pytest.approx(expected, rel=2e-5)


def test_weights_of_a_store_are_read(folder: Path) -> None:
    url = f"file://{folder}/store"
    text = ("data.path=text.txt", "data.sequence_length=32")
    (folder / "text.txt").write_text("some text to evaluate, " * 20)
    results = []
    for path in (url, f"{url}/step_4", f"{url}/model"):
        name = f"evaluated_{len(results)}"
        asked = ["mode=evaluate", f"path={path}", *text, f"hydra.run.dir={name}"]
        answer = whale_train([*asked, "hardware=cpu"], folder)
        assert answer.status == 0, answer
        results.append(json.loads((folder / name / "evaluation.json").read_text()))
    assert results[0] == results[1] == results[2]
    answer = whale_train(["mode=export", f"path={url}", "hydra.run.dir=exported"], folder)
    assert answer.status == 0, answer
    exported = load_file(folder / "exported" / "model" / "model.safetensors")
    weights = load_file(folder / "store" / "model" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all((exported[name] == weights[name]).all() for name in weights)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("checkpoint.to=runs/copies",),
            "error: checkpoint.to=runs/copies is no URL; write file://{folder}/runs/copies, or "
            "s3://BUCKET/FOLDER or the like",
        ),
        (
            ("checkpoint.to=s4://bucket/run", "checkpoint.every=2"),
            "error: checkpoint.to=s4://bucket/run names the protocol s4, which fsspec does not "
            "know; use one that it knows, as file, s3 or gs, or install what serves it",
        ),
        (
            ("train.resume=file:///nowhere/run",),
            "error: train.resume=file:///nowhere/run is not a folder; name a run directory or a "
            "checkpoint in one, as runs/MY_RUN/checkpoints/step_100",
        ),
        (
            ("hydra.run.dir=s3://bucket/run",),
            "error: hydra.run.dir=s3://bucket/run is a URL, and a run writes into a folder; "
            "name a folder of this machine, and have the checkpoints copied there by "
            "checkpoint.to=s3://bucket/run",
        ),
        (
            ("checkpoint.to=file://{folder}/store",),
            "error: checkpoint.to=file://{folder}/store holds the checkpoints of another run; name "
            "another folder, or go on with that run by train.resume=auto",
        ),
    ],
)
def test_refused(folder: Path, overrides: tuple[str, ...], expected: str) -> None:
    given = [text.format(folder=folder) for text in overrides]
    answer = whale_train(["experiment=smoke", *given], folder)
    assert answer.status == 2
    assert " ".join(answer.stderr.split()) == expected.format(folder=folder)
