"""Trackers keep the curve of `metrics.jsonl`, also of a run that went back to a checkpoint."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli import kept_curves
from tests.cli.command import Answer, environment_for, whale_train

CODE = '''
import json, os, signal, threading
from pathlib import Path
from torch import Tensor, nn


class Killed(nn.Module):
    """Its second rank is killed once, after the step that follows the checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        lines = Path("run/metrics.jsonl")
        there = lines.exists() and len(lines.read_text().splitlines()) >= 5
        if os.environ.get("RANK") == "1" and there and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(self.body(pixel_values.flatten(1)).relu())


class Noted:
    """Notes what it is told, a line a call."""

    def __init__(self, path: str, stumbles: bool = False) -> None:
        assert os.environ["RANK"] == "0"
        self.path, self.stumbles = Path(path), stumbles

    def note(self, **line: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def open(self, run, state):
        self.note(call="open", step=run.step, state=state, seed=run.parameters["seed"])

    def log(self, step, values):
        self.note(call="log", step=step, **values)
        if self.stumbles and step > 5:
            raise ConnectionError("no route")

    def close(self, status, summary):
        self.note(call="close", status=status, steps=summary.get("steps"))

    def state(self):
        return {"path": str(self.path)}
'''
RUN = (
    *("model=custom", "model._target_=code_of_mine.Killed", "model.loss=cross_entropy"),
    *("data=digits", "strategy=dp", "hardware=cpu", "hardware.devices=2", "train.steps=8"),
    *("train.global_batch=8", "checkpoint.every=4", "checkpoint.async=false"),
    "train.evaluate_every=3",
)
NOTED = "_target_: code_of_mine.Noted"


def in_folder(folder: Path) -> dict[str, str]:
    return {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_API_KEY": "", "MLFLOW_TRACKING_URI": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curves")
    (folder / "code_of_mine.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def restarted(folder: Path) -> tuple[Path, Answer]:
    """A run with all trackers, of which a rank died after a step that was not saved."""
    listed = f"trackers=[mlflow,wandb,trackio,{{{NOTED}, path: noted.jsonl}}]"
    more = (listed, "train.tensorboard=true", "launcher.max_restarts=1", "hydra.run.dir=run")
    answer = whale_train([*RUN, *more], folder, in_folder(folder))
    assert answer.status == 0, answer
    assert "rank 1 was killed by SIGKILL" in answer.stdout
    assert "warning: trackers" not in answer.stdout
    assert answer.left_running == ()
    return folder / "run", answer


def calls(path: Path, name: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in path.open()]
    return [line for line in lines if line.pop("call") == name]


def test_every_store_has_the_curve_of_a_restarted_run(restarted: tuple[Path, Answer]) -> None:
    run_dir, _ = restarted
    curves = kept_curves.of_metrics(run_dir)
    assert len(curves) == 8
    assert {"loss", "grad_norm", "lr", "samples_per_s", "step_time_s"} < curves[1].keys()
    assert "evaluation_loss" in curves[6]

    in_tensorboard = kept_curves.of_tensorboard(run_dir / "tensorboard")
    assert in_tensorboard.keys() == curves.keys()
    for step, row in curves.items():
        assert in_tensorboard[step] == pytest.approx(row, rel=1e-6)

    kept, status, parameters = kept_curves.of_mlflow(
        f"sqlite:///{run_dir}/mlflow.db", "whale-train"
    )
    assert (kept, status) == (curves, "FINISHED")
    assert parameters["train.global_batch"] == "8"
    assert parameters["plan.world_size"] == "2"

    assert kept_curves.of_wandb(run_dir) == (curves, [1, 0])
    rows, alerts = kept_curves.of_trackio(run_dir.parent / "trackio", "whale-train")
    assert (rows, alerts) == (curves, ["run failed", "run finished"])


def test_a_tracker_of_ones_own_is_told_of_both_parts(restarted: tuple[Path, Answer]) -> None:
    run_dir, _ = restarted
    noted = run_dir.parent / "noted.jsonl"
    kept: dict[object, dict[str, object]] = {}
    for line in calls(noted, "log"):
        kept[line.pop("step")] = line
    assert kept == kept_curves.of_metrics(run_dir)
    place = {"path": "noted.jsonl"}
    assert calls(noted, "open") == [
        {"step": 0, "state": None, "seed": "0"},
        {"step": 4, "state": place, "seed": "0"},
    ]
    ends = [{"status": "failed", "steps": None}, {"status": "finished", "steps": 8}]
    assert calls(noted, "close") == ends
    saved = json.loads((run_dir / "checkpoints/step_8/state.json").read_text())["trackers"]
    assert saved["code_of_mine.Noted"] == place
    assert saved.keys() == {"tensorboard", "mlflow", "wandb", "trackio", "code_of_mine.Noted"}


def test_a_curve_goes_on_in_another_directory_or_is_said_to_be_gone(
    restarted: tuple[Path, Answer],
) -> None:
    """A tracker that raises is named once, and the run goes on without what it lost."""
    run_dir, _ = restarted
    folder = run_dir.parent
    (run_dir / "tensorboard").rename(folder / "aside")
    listed = f"trackers=[tensorboard,{{{NOTED}, path: other.jsonl, stumbles: true}}]"
    more = (listed, f"train.resume={run_dir}/checkpoints/step_4", "hydra.run.dir=other")
    answer = whale_train([*RUN, *more], folder, in_folder(folder))
    (folder / "aside").rename(run_dir / "tensorboard")
    assert answer.status == 0, answer
    warnings = [line for line in answer.stdout.splitlines() if "warning: t" in line]
    assert warnings == [
        f"warning: tensorboard: {run_dir}/tensorboard is not there; a new curve is begun",
        "warning: trackers: code_of_mine.Noted raised ConnectionError: no route at step 6, and 2 "
        "more times",
    ]
    assert calls(folder / "other.jsonl", "open")[0]["state"] == {"path": "noted.jsonl"}
    assert [line["step"] for line in calls(folder / "other.jsonl", "log")] == [5, 6, 7, 8]
    assert (folder / "other" / "logs" / "rank_0.log").read_text().count("Traceback") == 1
    kept = kept_curves.of_tensorboard(folder / "other" / "tensorboard")
    assert list(kept) == [5, 6, 7, 8]


@pytest.mark.full
def test_a_run_that_is_ended_closes_its_trackers(folder: Path) -> None:
    listed = f"trackers=[{{{NOTED}, path: ended.jsonl}}]"
    wanted = ["experiment=smoke", "train.steps=1000000", listed, "hydra.run.dir=ended"]
    process = subprocess.Popen(
        [sys.executable, "-m", "whale_train.launcher.cli", *wanted],
        cwd=folder,
        env=environment_for(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        noted = folder / "ended.jsonl"
        while not noted.exists() or noted.read_text().count("\n") < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert calls(noted, "close") == [{"status": "interrupted", "steps": None}]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a tracking server of MLflow's, which ends with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    place = ("--backend-store-uri", f"sqlite:///{tmp_path}/server.db")
    place += ("--artifacts-destination", str(tmp_path / "artifacts"), "--workers", "1")
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *place, "--port", str(port)],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                time.sleep(0.2)
        yield uri
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.full
def test_a_server_of_mlflow_has_the_curve(folder: Path, server: str) -> None:
    """The rows after the checkpoint are those of the second part, on the server too."""
    listed = f"trackers=[{{name: mlflow, uri: '{server}', experiment: mine}}]"
    command = [*RUN, listed, "hydra.run.dir=served"]
    assert whale_train(command, folder, in_folder(folder)).status == 0
    shutil.rmtree(folder / "served/checkpoints/step_8")
    again = [*command, "train.resume=auto", "train.steps=9"]
    answer = whale_train(again, folder, in_folder(folder))
    assert answer.status == 0, answer
    curves = kept_curves.of_metrics(folder / "served")
    kept, status, parameters = kept_curves.of_mlflow(server, "mine")
    assert len(curves) == 9
    assert (kept, status) == (curves, "FINISHED")
    assert parameters["train.steps"] == "8"


def test_a_server_that_does_not_answer_is_refused(folder: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and never listens
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        listed = f"trackers=[{{name: mlflow, uri: '{uri}'}},{{{NOTED}, file: x}}]"
        answer = whale_train([*RUN, listed, "hydra.run.dir=refused"], folder, in_folder(folder))
    assert answer.status == 2
    assert answer.stderr.splitlines() == [
        "3 things are wrong with this request:",
        f"  trackers[0].uri={uri} does not answer (Connection refused); start the server, or leave "
        "the address out for a store in the run directory",
        "  trackers[1].file=x is not an argument of Noted; use one of: path, stumbles",
        "  trackers[1].path is not given, and Noted needs it; write trackers[1].path=VALUE",
    ]
    assert not (folder / "refused").exists()
