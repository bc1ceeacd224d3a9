"""`mode=audit`: which sample went where, over restarts, other batches and other data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import files_in, whale_train
from tests.cli.test_restarts import NET

from whale_train.data.order import indices_from
from whale_train.launcher.modes.run_history import history_of
from whale_train.launcher.modes.sample_audit import audited, holding, taken_in

RUN = (
    *("model=custom", "model.loss=cross_entropy", "data=digits", "strategy=dp", "hardware=cpu"),
    *("hardware.devices=2", "checkpoint.every=2", "checkpoint.async=false"),
)
COUNT = 1438  # of the digits, 1,797, without a fifth that is held back


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run`, whose second rank was killed once, and `other`, which went on from its
    end with another batch, in two commands."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "net.py").write_text(NET)
    first = ("model._target_=net.Killed", "launcher.max_restarts=1", "train.global_batch=8")
    more = ("model._target_=net.Net", "train.global_batch=6", "hydra.run.dir=other")
    for overrides in (
        (*first, "train.steps=8", "hydra.run.dir=run"),
        (*more, "train.steps=10", "train.resume=run"),
        (*more, "train.steps=12", "train.resume=auto"),
    ):
        answer = whale_train([*RUN, *overrides], folder)
        assert answer.status == 0, answer
    return folder


def test_steps_done_again_count_once(runs: Path) -> None:
    before = files_in(runs)
    answer = whale_train(["mode=audit", "run=run", "audit.step=5"], runs)
    assert (answer.status, answer.stderr) == (0, "")
    assert files_in(runs) == before
    lines = [" ".join(line.split()) for line in answer.stdout.splitlines()]
    assert lines[0] == "audit of run: 8 steps, 64 samples"
    again = json.loads((runs / "run" / "attempts.json").read_text())[0]["reached"] - 4
    note = f" ({again} of its steps were done again)" if again else ""
    assert lines[2:4] == [f"1-4 8 0-31 run/attempts/1{note}", "5-8 8 32-63 run"]
    assert lines[4] == f"epoch 1: 64 of {COUNT:,} samples"
    assert lines[5] == "proven: every sample was taken once an epoch"
    taken = indices_from(32, COUNT, 8, 0, True).tolist()
    halves = [" ".join(map(str, part)) for part in (taken[:4], taken[4:])]
    assert lines[8:] == [f"{rank} cpu_process 0 {half}" for rank, half in enumerate(halves)]


def test_another_batch_goes_on_with_the_next_sample(runs: Path) -> None:
    history = history_of(runs / "other")
    steps = [(x.began, x.ended, x.first, x.batch) for x in history.segments]
    assert steps == [(0, 4, 0, 8), (4, 8, 32, 8), (8, 10, 64, 6), (10, 12, 76, 6)]
    audit = audited(history)
    assert audit.wrong == ()
    assert audit.samples == 88
    holder = holding(history, 11)
    assert holder is not None
    taken = [sample for rank in taken_in(holder, 11) for sample in rank.samples]
    assert taken == indices_from(76, COUNT, 6, 0, True).tolist()


def test_data_begun_anew_leaves_an_epoch(runs: Path) -> None:
    overrides = ("train.steps=10", "train.resume=run", "train.resume_data=any", "seed=7")
    more = ("model._target_=net.Net", "train.global_batch=8", "hydra.run.dir=anew")
    assert whale_train([*RUN, *more, *overrides], runs).status == 0
    answer = whale_train(["mode=audit", "path=anew"], runs)
    assert answer.status == 1
    assert f"steps 1-8, epoch 1: 64 of {COUNT:,} samples\n" in answer.stdout
    assert f"steps 9-10, epoch 1: 16 of {COUNT:,} samples\n" in answer.stdout
    assert "proven" not in answer.stdout
    assert answer.stderr == (
        "error: not every sample was taken once an epoch: after step 8 the data was begun with its "
        f"first sample (train.resume_data=any): {COUNT - 64:,} samples of the epoch before were "
        "left out, and the next epoch is of the same samples\n"
    )


def changed(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def skip_a_step(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[5] = json.dumps({**json.loads(lines[5]), "skipped": True})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def lose_a_line(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:2], *lines[3:]]) + "\n")


def begin_later(run: Path) -> None:
    changed(run / "launch.json", lambda launch: launch.update(samples=35))


def begin_earlier(run: Path) -> None:
    changed(run / "launch.json", lambda launch: launch.update(samples=30))


def share_otherwise(run: Path) -> None:
    changed(run / "plan.json", lambda plan: plan["ranks"][1].update(samples=[[5, 8]]))


def numbers(first: int, count: int) -> str:
    return ", ".join(map(str, indices_from(first, COUNT, count, 0, True)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            skip_a_step,
            f"step 6 was skipped, and 8 samples of epoch 1 ({numbers(40, 3)} and 5 more) changed "
            "nothing",
        ),
        (lose_a_line, "metrics.jsonl lacks step 3"),
        (begin_later, f"3 samples of epoch 1 ({numbers(32, 3)}) were missed"),
        (begin_earlier, f"2 samples of epoch 1 ({numbers(30, 2)}) were taken again"),
        (
            share_otherwise,
            "in steps 5 to 8, place 4 of the batch is not of exactly one copy of model",
        ),
    ],
)
def test_what_is_wrong_is_said(
    runs: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    run = shutil.copytree(runs / "run", tmp_path / "run")
    damage(run)
    wrong = audited(history_of(run)).wrong
    assert said in wrong
    seen = "says that the run had seen"
    assert all(seen in other for other in wrong if other != said)  # a checkpoint's state


def test_a_run_that_is_gone_is_said_to_be(runs: Path, tmp_path: Path) -> None:
    other = shutil.copytree(runs / "other", tmp_path / "other")
    for launch in (other / "attempts" / "1" / "launch.json",):
        changed(launch, lambda x: x.update(checkpoint="/no/run/checkpoints/step_8"))
    (wrong,) = audited(history_of(other)).wrong
    assert wrong == (
        "steps 1 to 8 are of a run that is not to be had: the run went on from "
        "/no/run/checkpoints/step_8"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run=none"], "run=none is not a folder; name a run directory, as runs/MY_RUN"),
        (["run=."], "run=. holds no run; name a run directory, as runs/MY_RUN"),
        ([], "run must be given to mode=audit; name a run directory, as run=runs/MY_RUN"),
        (
            ["checkpoint=run"],
            "checkpoint.path=run has no effect on mode=audit; use run=run",
        ),
        (["run=run", "path=run"], "path=run and run are both given; leave one out"),
        (["run=run", "seed=3"], "seed=3 has no effect on mode=audit; leave it out: the run has it"),
        (
            ["run=run", "audit.step=9"],
            "audit.step=9 is a step that the run does not have: its last is 8; name one up to that",
        ),
    ],
)
def test_refused(runs: Path, overrides: list[str], said: str) -> None:
    answer = whale_train(["mode=audit", *overrides], runs)
    assert (answer.status, answer.stderr) == (2, f"error: {said}\n")
    assert not (runs / "runs").exists()
