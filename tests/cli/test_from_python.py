"""`from whale_train import compose, plan, train, ...`: the command's road in another program."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from rich.console import Console
from tests.cli.command import MARK, environment_for, processes_of, whale_train

import whale_train as package
from whale_train import (
    ConfigError,
    LaunchError,
    PlanError,
    compose,
    evaluate,
    plan,
    predict,
    train,
    verify,
)
from whale_train.config import Request

NETS = """
import os, time
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, stumbles: str = "") -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.stumbles = stumbles

    def forward(self, pixel_values: Tensor) -> Tensor:
        if self.stumbles and "RANK" in os.environ:
            if self.stumbles == "sleep":
                time.sleep(0.2)
            else:
                raise ValueError(self.stumbles)
        return self.head(self.body(pixel_values.flatten(1)).relu())
"""
TRAIN = {"steps": 4, "global_batch": 6}
NET = {"_target_": "nets_of_the_caller.Net", "loss": "cross_entropy"}
ASKED: dict[str, Any] = {"data": "digits", "strategy": "dp", "hardware": "cpu", "train": TRAIN}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and beside it a folder of modules that is on the caller's path alone."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "nets_of_the_caller.py").write_text(NETS)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    environment = environment_for(tmp_path)
    for name in (MARK, "CUDA_VISIBLE_DEVICES", "WHALE_TRAIN_CALIBRATIONS"):
        monkeypatch.setenv(name, environment[name])
    return tmp_path


def state() -> dict[str, Any]:
    """Give what a caller has, and a call is to leave as it was."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    return {
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "filters": list(warnings.filters),
        "handlers": [signal.getsignal(number) for number in names],
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "python": random.getstate(),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "conv": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "logging": logging.root.manager.disable,
        "hydra": GlobalHydra.instance().hydra,
        "resolvers": OmegaConf.has_resolver("whale_suffix"),
        "environment": dict(os.environ),
    }


def test_the_package_imports_nothing_of_weight() -> None:
    program = "import sys, whale_train; print({'torch', 'hydra', 'deepspeed'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
    assert {"compose", "plan", "train", "verify", "ConfigError"} <= set(dir(package))


def test_values_are_overrides(folder: Path) -> None:
    given = {"n_layer": 1, "name": "it's, a: text", "list": [1, None, True, 0.5]}
    options = {"architecture": "GPT2LMHeadModel", "config": given}
    request = compose("model=hf", {"train.steps": 7}, strategy="zero3", model=options)
    text = "{n_layer: 1, name: 'it\\'s, a: text', list: [1, null, true, 0.5]}"
    hugging_face = ("model=hf", "model.architecture=GPT2LMHeadModel", f"model.config={text}")
    same = compose("strategy=zero3", "train.steps=7", *hugging_face)
    assert isinstance(request, Request)
    assert request == same
    assert request.model.config == given
    assert (request.train.steps, request.names["strategy"]) == (7, "zero3")


def test_faults_are_those_of_the_command(folder: Path) -> None:
    overrides = ("strategy=zero33", "train.stps=5", "optimizer.lr=x")
    answer = whale_train(overrides, folder)
    with pytest.raises(ConfigError) as caught:
        compose("strategy=zero33", train={"stps": 5}, optimizer={"lr": "x"})
    said = [line.strip() for line in answer.stderr.splitlines()[1:]]
    assert (answer.status, said) == (2, str(caught.value).splitlines())
    with pytest.raises(PlanError, match="has 2 blocks to cut between, too few for 9"):
        plan(
            {**ASKED, "strategy": "pipeline", "strategy.graph": {"pipeline": {"stages": 9}}},
            "hardware.devices=9",
            model=NET,
        )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: train("mode=verify"), "mode=verify is not what train() does; leave it out, or"),
        (lambda: compose("hydra.run.dir=x"), "hydra.run.dir=x has no effect on compose(); give it"),
        (lambda: plan(compare=["dp", "zero1"]), "compare has no effect on plan(); call it for"),
        (lambda: compose("-m", "hydra.job.name=x"), "--multirun is for the command; leave it out"),
        (lambda: compose("hydra.job.name=x"), "hydra.job.name=x has no effect from Python; leave"),
        (lambda: train("launcher=slurm"), "launcher=slurm starts ranks by the command; run whale"),
        (lambda: compose(seed=object), "seed=<class 'object'> is a type, and no plain value; use"),
        (
            lambda: plan(model={"_target_": "__main__.Net"}, data="digits", hardware="cpu"),
            "model._target_=__main__.Net is of the program that runs here, which ranks cannot "
            "import; put it into a module, as my_models.py, and name it there",
        ),
    ],
)
def test_refused(folder: Path, call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value).startswith(said)
    assert list((folder / "work").iterdir()) == []


class Elements(HTMLParser):
    """Collects the text of HTML, and the elements that are open at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.open = "", list[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_plan_shows_what_the_terminal_shows(folder: Path) -> None:
    overrides = ("strategy=hybrid_split_dp", "hardware=v100_p100_mix")
    shown = plan(*overrides)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(shown)
    answer = whale_train(["mode=plan", *overrides, "hydra.run.dir=run"], folder)
    assert captured.get() == answer.stdout.partition("the page: ")[0]
    assert shown.to_json() == (folder / "run" / "plan.json").read_text()
    html = Elements()
    html.feed(shown._repr_html_())
    assert html.open == []
    assert "16 on 2 nodes" in html.text
    assert "decisions" in html.text
    assert "<link" not in shown._repr_html_()
    assert len(repr(shown)) < 100


def test_a_run_leaves_all_as_it_was(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Called with Hydra initialised, another default dtype and device, in a mode, in a thread."""
    results = []
    plan(compose(**ASKED, model=NET))  # torch and scikit-learn set variables as they are imported
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
    try:
        with hydra.initialize(version_base=None), torch.inference_mode():
            before = state()
            shown = plan(compose(**ASKED, model=NET, **{"hardware.devices": 2}))
            asked = {**ASKED, "model": NET, "hardware.devices": 2}
            thread = threading.Thread(target=lambda: results.append(train(asked)))
            thread.start()
            thread.join()
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.backends.cudnn.allow_tf32 = True
    assert processes_of(folder) == ()
    assert capfd.readouterr() == ("", "")
    (result,) = results
    assert result.run_dir.parent.parent == folder / "work" / "runs"
    assert (result.run_dir / "plan.json").read_text() == shown.to_json()  # of fp32 weights
    assert [line["step"] for line in result.metrics] == [1, 2, 3, 4]
    assert result.summary["final_loss"] == result.metrics[-1]["loss"]
    assert result.model == result.run_dir / "model"
    loss = f"loss {result.summary['final_loss']:.3f}"
    assert loss in result._repr_html_()


def test_a_failed_run_raises_the_first_failure(folder: Path) -> None:
    model = {**NET, "stumbles": "no such step"}
    with pytest.raises(LaunchError) as caught:
        train({**ASKED, "hardware.devices": 1}, model=model, run_dir="run")
    said = str(caught.value)
    assert said.startswith("rank 0 (cpu_process, node 0, TaskGraph model) failed:\n")
    assert said.endswith("ValueError: no such step\nIts log: logs/rank_0.log")
    assert said.count("Traceback") == 1
    assert processes_of(folder) == ()
    request = compose(**ASKED, model=NET)
    with pytest.raises(ConfigError, match="=run already holds a run"):
        train(request, run_dir="run")


def test_an_interrupted_run_leaves_no_process(folder: Path) -> None:
    """Ctrl-C comes while ranks train, and is the caller's again afterwards."""
    program = """
import os, signal, sys, threading, time
from pathlib import Path
from whale_train import train

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored

def interrupt():
    while not Path("run/metrics.jsonl").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
model = {"_target_": "nets_of_the_caller.Net", "loss": "cross_entropy", "stumbles": "sleep"}
try:
    train("hardware=cpu", data="digits", train={"steps": 500, "global_batch": 6},
          model=model, run_dir="run")
except KeyboardInterrupt as interrupted:
    print(interrupted, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    environment = environment_for(folder)
    environment["PYTHONPATH"] += os.pathsep + str(folder / "modules")
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == f"interrupted; what was written is in {folder / 'run'} True\n", (
        done.stderr
    )
    assert done.stderr == ""
    assert processes_of(folder) == ()


@pytest.mark.full
def test_a_plan_is_verified(folder: Path) -> None:
    result = verify(**ASKED, model=NET, run_dir="run", **{"verify.steps": 1})
    assert result.equal
    assert str(result).startswith("equal: 1 step on 2 ranks computed what one process does")
    assert (result.run_dir / "verify.json").exists()
    assert "equal: 1 step" in result._repr_html_()
    assert processes_of(folder) == ()


def test_a_run_is_evaluated_and_predicts(folder: Path) -> None:
    held_back = {"data.evaluation_fraction": 0.02}
    result = train(ASKED, held_back, model=NET, train={"steps": 2}, run_dir=folder / "a run, b=1")
    uneven = {"hardware": "cpu", "hardware.devices": 3, "strategy": "dp"}
    evaluated = evaluate(result.run_dir, uneven, run_dir=folder / "evaluated")
    predicted = predict(result.run_dir, uneven, run_dir=folder / "predicted")
    assert (evaluated.run_dir, predicted.run_dir) == (folder / "evaluated", folder / "predicted")
    rows = predicted.rows("evaluation")
    assert [row["sample"] for row in rows] == list(range(len(rows)))
    right = sum(row["predicted"] == row["target"] for row in rows)
    assert evaluated.sets["evaluation"]["accuracy"] == pytest.approx(right / len(rows))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(evaluated)
    assert captured.get().split()[:2] == ["set", "loss"]
    with pytest.raises(ConfigError, match="mode=predict is not what evaluate"):
        evaluate(result.run_dir, mode="predict")
    with pytest.raises(ConfigError, match="path="):
        predict(folder / "nothing")
