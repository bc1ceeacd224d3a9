"""A rank that dies ends an attempt and not the job; a failure of the program's own ends both."""

import json
from pathlib import Path

import pytest
from tests.cli.command import whale_train

from whale_train.launcher.ranks.run_dir import in_use

NET = '''
import os, signal
from pathlib import Path
from torch import Tensor, nn


def in_a_rank_after(steps: int) -> bool:
    lines = Path("run/metrics.jsonl")
    there = lines.exists() and len(lines.read_text().splitlines()) >= steps
    return os.environ.get("RANK") == "1" and there


def has_saved(step: int) -> bool:
    return Path(f"run/checkpoints/step_{step}").exists()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        self.stumble()
        return self.head(self.body(pixel_values.flatten(1)).relu())

    def stumble(self) -> None: ...


class Killed(Net):
    """Its second rank is killed the first time that four steps are saved: in the fifth, or, where
    rank 0 was still writing them then, in the sixth."""

    def stumble(self) -> None:
        if in_a_rank_after(4) and has_saved(4) and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Spoils(Net):
    """Its second rank is killed as that of Killed, and no checkpoint is whole after it."""

    def stumble(self) -> None:
        if in_a_rank_after(4) and has_saved(4):
            for path in Path("run/checkpoints").glob("*/state.json"):
                path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class Wrong(Net):
    """Its second rank raises in the fifth step, every time."""

    def stumble(self) -> None:
        if in_a_rank_after(4):
            raise ValueError("there is no fifth step")
'''
RUN = (
    *("model=custom", "model.loss=cross_entropy", "data=digits", "strategy=dp", "hardware=cpu"),
    *("hardware.devices=2", "train.global_batch=8", "train.steps=8", "hydra.run.dir=run"),
    *("checkpoint.every=2", "checkpoint.async=false", "launcher.max_restarts=4"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_a_killed_rank_ends_an_attempt(folder: Path) -> None:
    answer = whale_train([*RUN, "model._target_=net.Killed"], folder)
    assert answer.status == 0, answer
    run_dir = folder / "run"
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()]
    assert steps == list(range(1, 9))
    said = "warning: attempt 1 ended: rank 1 was killed by SIGKILL; 4 more may follow\n"
    assert said in answer.stdout
    first, second = json.loads((run_dir / "attempts.json").read_text())
    assert (first["status"], first["failure"]["signal"]) == ("failed", "SIGKILL")
    assert (second["began"], second["reached"], second["status"]) == (4, 8, "done")
    assert first["reached"] in (4, 5, 6)
    assert "4 to 8" in answer.stdout
    assert answer.left_running == ()
    # The same as if nothing had happened: the flag is there.
    undisturbed = whale_train(
        [*RUN, "model._target_=net.Killed", "hydra.run.dir=undisturbed"], folder
    )
    assert undisturbed.status == 0
    losses = [
        [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").open()]
        for name in ("run", "undisturbed")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_same_failure_twice_ends_the_job(folder: Path) -> None:
    answer = whale_train([*RUN, "model._target_=net.Wrong"], folder)
    assert answer.status == 1, answer
    assert answer.stderr.count("ValueError: there is no fifth step") == 1
    assert "the last two attempts failed of the same at the same step\n" in answer.stdout
    assert len(json.loads((folder / "run" / "attempts.json").read_text())) == 2
    assert answer.left_running == ()


def test_an_attempt_that_is_refused_leaves_the_failure_before_it(folder: Path) -> None:
    answer = whale_train([*RUN, "model._target_=net.Spoils"], folder)
    assert answer.status == 1, answer
    refused, failed = (
        answer.stderr.index("finds no whole checkpoint"),
        answer.stderr.index("rank 1"),
    )
    assert refused < failed
    assert "was killed by SIGKILL" in answer.stderr
    assert answer.left_running == ()


def test_a_directory_in_use_is_left_alone(folder: Path) -> None:
    """As where a queue has started the same command twice."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "request.json").write_text("another's")
    with in_use(run_dir):
        answer = whale_train([*RUN, "model._target_=net.Net", "train.resume=auto"], folder)
    assert answer.status == 2
    assert answer.stderr == (
        f"error: hydra.run.dir={run_dir} is used by another run now; wait for its end, or name "
        "another\n"
    )
    assert (run_dir / "request.json").read_text() == "another's"
    with in_use(run_dir):
        pass


def test_restarts_want_something_to_go_on_from(folder: Path) -> None:
    answer = whale_train([*RUN, "model._target_=net.Net", "checkpoint.every=null"], folder)
    assert answer.status == 2
    assert (
        "launcher.max_restarts=4 starts again what nothing is saved of (checkpoint.every=null); "
        "set checkpoint.every, as checkpoint.every=10min" in answer.stderr
    )
