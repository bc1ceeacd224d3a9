"""Runs whose checkpoints are copied to a store, and what goes on from there: in processes that have
nothing else in common."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.cli.command import Answer, environment_for, whale_train, whale_train_process
from tests.cli.watched_store import environment

RUN = (
    *("experiment=smoke", "train.steps=4", "checkpoint.every=2", "checkpoint.keep=2"),
    *("strategy=split", "train.evaluate_every=null"),
)


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").open()]


def there(store: Path) -> list[str]:
    """The whole checkpoints of a store."""
    return sorted(path.parent.name for path in store.glob("*/manifest.json"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """A folder with a run of four steps in `first`, copied to `store`, which has failed twice."""
    folder = tmp_path_factory.mktemp("stores")
    to = f"checkpoint.to=watched://{folder}/store"
    fails = environment(folder, WATCHED_FAILS="step_2/state.json:2")
    return folder, whale_train_process([*RUN, to, "hydra.run.dir=first"], folder, fails)


def test_a_run_is_copied(trained: tuple[Path, Answer]) -> None:
    folder, answer = trained
    assert answer.status == 0, answer
    to = f"watched://{folder}/store"
    for name in ("step_2", "step_4", "model"):
        assert f"copied: {to}/{name} (" in answer.stdout
    assert "warning: step" not in answer.stdout
    assert there(folder / "store") == ["step_2", "step_4"]
    copies = json.loads((folder / "first" / "summary.json").read_text())["copies"]
    assert copies == {"to": to, "steps": [2, 4], "model": True, "errors": {}}
    for name in ("checkpoints/step_4/manifest.json", "model/model.safetensors"):
        copy = folder / "store" / name.removeprefix("checkpoints/")
        assert copy.read_bytes() == (folder / "first" / name).read_bytes()


def test_ranks_fetch_the_bytes_of_their_shards(trained: tuple[Path, Answer]) -> None:
    """On a machine that has nothing but the store, under the plan that saved."""
    folder, _ = trained
    whole = sum(x.stat().st_size for x in (folder / "store" / "step_4").rglob("*.safetensors"))
    log = folder / "log"
    more = ("train.steps=6", "hydra.run.dir=second", f"train.resume=watched://{folder}/store")
    answer = whale_train_process([*RUN, *more], folder, environment(folder, WATCHED_LOG=str(log)))
    assert answer.status == 0, answer
    assert f"going on after step 4, from watched://{folder}/store/step_4\n" in answer.stdout
    read = Counter[str]()
    for line in log.read_text().splitlines():
        pid, count = line.split()
        read[pid] += int(count)
    assert len(read) == 3  # two ranks, and the launcher, which reads headers alone
    launcher, *ranks = sorted(read.values())
    assert launcher < 0.1 * whole
    assert max(ranks) < 0.75 * whole
    assert sum(ranks) > whole
    answer = whale_train([*RUN, "train.steps=6", "hydra.run.dir=in_one"], folder)
    assert losses(folder / "second") == pytest.approx(losses(folder / "in_one")[4:], rel=1e-5)


def test_other_modes_read_a_store(trained: tuple[Path, Answer]) -> None:
    folder, _ = trained
    url = f"path=file://{folder}/store"
    answer = whale_train(["mode=export", url, "hydra.run.dir=exported"], folder)
    assert answer.status == 0, answer
    exported, first = (
        folder / name / "model" / "model.safetensors" for name in ("exported", "first")
    )
    assert exported.read_bytes() == first.read_bytes()
    few = ("train.evaluation_samples=40", "hardware=cpu", "hardware.devices=2")
    results = {}
    for name, path, plan in (
        ("remote", url, "strategy=split"),
        ("final", f"{url}/model", "strategy=dp"),
        ("local", "path=first", "strategy=dp"),
    ):
        arguments = ["mode=predict", path, plan, *few, f"hydra.run.dir={name}"]
        answer = whale_train(arguments, folder)
        assert answer.status == 0, answer
        results[name] = json.loads((folder / name / "evaluation.json").read_text())
        assert (folder / name / "predictions" / "evaluation.jsonl").exists()
    loss = results["local"]["sets"]["evaluation"]["loss"]
    for name in ("remote", "final"):
        assert results[name]["step"] == 4
        assert results[name]["sets"]["evaluation"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_copy_that_was_cut_off_is_none(tmp_path: Path) -> None:
    """A run is killed while it copies; its machine is lost; another goes on, whose last copy is
    refused by the store, and a third makes it up."""
    store, waiting = tmp_path / "store", tmp_path / "waiting"
    to = f"checkpoint.to=watched://{store}"
    waits = environment(tmp_path, WATCHED_WAITS="step_4/optimizer", WATCHED_WAITING=str(waiting))
    process = subprocess.Popen(
        [sys.executable, "-m", "whale_train.launcher.cli", *RUN, to, "hydra.run.dir=lost"],
        cwd=tmp_path,
        env=environment_for(tmp_path) | waits,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    while not waiting.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (store / "step_4" / "model").exists()
    assert there(store) == ["step_2"]
    shutil.rmtree(tmp_path / "lost")
    again = [*RUN, to, "train.resume=auto", "checkpoint.final=false", "hydra.run.dir=again"]
    closed = environment(tmp_path, WATCHED_FAILS="step_4/state.json:99")
    answer = whale_train_process(again, tmp_path, closed)
    assert f"going on after step 2, from watched://{store}/step_2\n" in answer.stdout
    assert (answer.status, there(store)) == (1, ["step_2"])
    said = f"watched://{store}/step_4/state.json: PermissionError: the store is closed"
    assert answer.stdout.count(said) == 1
    last = f"error: step_4 of {tmp_path}/again could not be copied to watched://{store}\n"
    assert answer.stderr.endswith(last)
    copies = json.loads((tmp_path / "again" / "summary.json").read_text())["copies"]
    assert (copies["steps"], copies["errors"]) == ([2], {"step_4": said})
    answer = whale_train_process(again, tmp_path, environment(tmp_path))
    assert (answer.status, there(store)) == (0, ["step_2", "step_4"]), answer
    other = whale_train([*RUN, f"checkpoint.to=file://{store}", "hydra.run.dir=other"], tmp_path)
    assert other.status == 2
    assert "holds the checkpoints of another run; name another folder" in other.stderr


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("checkpoint.to=qqq://b/x", "checkpoint.every=2"),
            "error: checkpoint.to=qqq://b/x names the protocol qqq, which fsspec does not know; "
            "use one that it knows, as file, s3 or gs, or install what serves it",
        ),
        (
            ("train.resume=qqq://b/x",),
            "error: train.resume=qqq://b/x names the protocol qqq, which fsspec does not know; "
            "use one that it knows, as file, s3 or gs, or install what serves it",
        ),
        (
            ("checkpoint.to=runs/x",),
            "error: checkpoint.to=runs/x is no URL; write file://HERE/runs/x, or s3://BUCKET/"
            "FOLDER or the like",
        ),
        (
            ("checkpoint.to=memory://x", "checkpoint.final=false"),
            "error: checkpoint.to=memory://x has nothing to copy (checkpoint.every=null, "
            "checkpoint.final=false); set checkpoint.every, as checkpoint.every=10min",
        ),
        (
            ("mode=evaluate", "path=memory://x"),
            "error: path=memory://x is not a folder; name a run directory or a checkpoint in "
            "one, as runs/MY_RUN/checkpoints/step_100",
        ),
    ],
)
def test_refused(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    answer = whale_train(["experiment=smoke", *overrides, "hydra.run.dir=run"], tmp_path)
    said = " ".join(answer.stderr.split())
    assert (answer.status, said) == (2, expected.replace("HERE", str(tmp_path)))
    assert not (tmp_path / "run").exists()


def test_a_store_without_rights_is_refused(tmp_path: Path) -> None:
    to = "checkpoint.to=file:///proc/whale"
    answer = whale_train(["experiment=smoke", to, "hydra.run.dir=run"], tmp_path)
    assert answer.status == 2
    assert (
        "checkpoint.to=file:///proc/whale cannot be used (writing file:///proc/whale/.probe_"
        in (" ".join(answer.stderr.split()))
    )


def test_a_plan_says_where_copies_go(tmp_path: Path) -> None:
    arguments = ["mode=plan", "experiment=smoke", "checkpoint.to=memory://x", "checkpoint.every=2"]
    answer = whale_train(arguments, tmp_path)
    assert answer.status == 0, answer
    said = (
        "checkpoint.to: copies go to memory://x: each checkpoint, once it is whole and the trained"
    )
    assert said in " ".join(answer.stdout.split())
