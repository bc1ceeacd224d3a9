"""Sweeps by Optuna: objectives, studies that go on, trials that are pruned, refused or lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from tests.cli.command import (
    Answer,
    environment_for,
    processes_of,
    whale_train,
    whale_train_process,
)

from whale_train.errors import ConfigError
from whale_train.launcher.compose.command_line import check, rewritten

SWEEP = ("-m", "hydra/sweeper=optuna", "hydra.sweep.dir=swept")
PLANS = ("mode=plan", "hardware=v100_p100_mix", "model.depth=1")
KEPT = "hydra.sweeper.storage=journal:///study.log"

MODEL = """import time

import torch
from torch import nn
from torch.nn import functional


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Linear(6, 4)

    def forward(self, features, labels):
        time.sleep(0.04)
        return functional.cross_entropy(self.outer(features), labels)
"""


def study_in(folder: Path) -> optuna.Study:
    """Return the study that a sweep in `folder` has kept."""
    file = optuna.storages.journal.JournalFileBackend(str(folder / "study.log"))
    storage = optuna.storages.JournalStorage(file)
    return optuna.load_study(study_name="whale-train", storage=storage)


def rows_of(answer: Answer) -> list[list[str]]:
    """Return the cells of the table at the end of a sweep."""
    lines = answer.stdout.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("trial  "))
    rows = [re.split(r"\s{2,}", line) for line in lines[start + 1 :]]
    return [row for row in rows if row[0].isdigit()]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer, Answer]:
    """A study of plans, and the same command again with more trials."""
    folder = tmp_path_factory.mktemp("planned")
    values = ("strategy=dp,zero1,zero3", "train.global_batch=range(64,257,64)")
    sampler = "hydra.sweeper.sampler={name: tpe, seed: 3, n_startup_trials: 2}"
    command = [*SWEEP, *PLANS, *values, sampler, KEPT]
    first = whale_train([*command, "hydra.sweeper.n_trials=5"], folder)
    return folder, first, whale_train([*command, "hydra.sweeper.n_trials=6"], folder)


def test_trials_are_those_of_optuna_alone(planned: tuple[Path, Answer, Answer]) -> None:
    folder, first, _ = planned
    assert (first.status, first.stderr) == (0, "")
    alone = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=3, n_startup_trials=2))
    space = {
        "strategy": CategoricalDistribution(("dp", "zero1", "zero3")),
        "train.global_batch": IntDistribution(64, 256, step=64),
    }
    for trial in study_in(folder).trials[:5]:
        asked = alone.ask(space)
        assert trial.params == asked.params
        plan = json.loads((folder / f"swept/{trial.number}/plan.json").read_text())
        assert trial.value == plan["predicted"]["step_time_s"]
        written = yaml.safe_load((folder / f"swept/{trial.number}/.hydra/config.yaml").read_text())
        assert written["train"]["global_batch"] == trial.params["train.global_batch"]
        alone.tell(asked, trial.value)


def test_the_same_command_adds_the_trials_that_are_missing(
    planned: tuple[Path, Answer, Answer],
) -> None:
    folder, _, second = planned
    assert (second.status, second.stderr) == (0, "")
    trials = study_in(folder).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 6
    assert second.stdout.count("trial 5 (6 in all): strategy=") == 1
    assert "trial 4 (6 in all)" not in second.stdout


def test_the_end_names_the_best(planned: tuple[Path, Answer, Answer]) -> None:
    folder, _, second = planned
    trials = study_in(folder).trials
    best = min(trials, key=lambda trial: trial.value or 0.0)
    rows = rows_of(second)
    assert [int(row[0]) for row in rows] == list(range(6))
    assert [row[3] for row in rows] == [
        "done, best" if trial.number == best.number else "done" for trial in trials
    ]
    results = yaml.safe_load((folder / "swept/optimization_results.yaml").read_text())
    assert results == {"name": "optuna", "best_params": best.params, "best_value": best.value}
    line = second.stdout.splitlines()[-1].partition(": whale-train ")[2]
    assert line.split() == [*PLANS, *(f"{key}={value}" for key, value in best.params.items())]


def test_a_study_of_something_else_is_not_gone_on_with(
    planned: tuple[Path, Answer, Answer],
) -> None:
    folder, *_ = planned
    answer = whale_train([*SWEEP, *PLANS, "strategy=dp,zero2", "seed=1", KEPT], folder)
    remedy = "use another hydra.sweeper.study_name, or what it was begun with"
    assert answer.status == 2
    assert " ".join(answer.stderr.split()) == (
        "2 things are wrong with this request: hydra.sweeper.study_name=whale-train was begun with "
        f"{' '.join(PLANS)}; {remedy} strategy had other kinds of values in the study whale-train; "
        f"{remedy}"
    )


def test_a_grid_of_two_goals_tries_every_point_once(tmp_path: Path) -> None:
    goals = "hydra.sweeper.objective=[predicted.samples_per_s,peak_memory_bytes]"
    values = ("strategy=dp,zero3", "train.global_batch=64,128", "hydra.sweeper.sampler=grid")
    answer = whale_train([*SWEEP, *PLANS, *values, goals, KEPT], tmp_path)
    assert answer.status == 0
    trials = study_in(tmp_path).trials
    points = {tuple(sorted(trial.params.items())) for trial in trials}
    assert (len(trials), len(points)) == (4, 4)
    done = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    front = {t.number for t in done if not any(dominates(other.values, t.values) for other in done)}
    marked = {int(row[0]) for row in rows_of(answer) if "Pareto" in " ".join(row)}
    assert marked == front
    results = yaml.safe_load((tmp_path / "swept/optimization_results.yaml").read_text())
    assert [s["values"] for s in results["solutions"]] == [
        t.values for t in done if t.number in front
    ]


def dominates(one: list[float], other: list[float]) -> bool:
    """Return whether a trial has a higher rate and no more memory, or less memory and no lower
    rate."""
    return one != other and one[0] >= other[0] and one[1] <= other[1]


def test_refused_requests_are_trials_and_not_the_end(tmp_path: Path) -> None:
    values = ("strategy.graph.replicate.degree=16,3", "hydra.sweeper.sampler=grid", KEPT)
    answer = whale_train([*SWEEP, *PLANS, "strategy=dp", *values], tmp_path)
    assert answer.status == 0
    states = {
        t.params["strategy.graph.replicate.degree"]: t.state for t in study_in(tmp_path).trials
    }
    assert states == {16: TrialState.COMPLETE, 3: TrialState.PRUNED}
    said = "strategy.graph.replicate.degree=3 does not divide the 16 devices of hardware="
    assert answer.stderr.startswith(f"error: {said}")
    assert f"refused: {said}" in answer.stdout
    values = ("strategy.graph.replicate.degree=5,3", "hydra.sweeper.sampler=grid")
    answer = whale_train([*SWEEP, *PLANS, "strategy=dp", *values, "hydra.sweep.dir=b"], tmp_path)
    assert answer.status == 2
    assert [row[2] for row in rows_of(answer)] == ["refused", "refused"]


def test_a_trial_whose_process_was_killed_is_tried_again(tmp_path: Path) -> None:
    command = [*SWEEP, *PLANS, "strategy=dp,zero1", "hydra.sweeper.sampler=grid", KEPT]
    assert whale_train([*command, "hydra.sweeper.n_trials=1"], tmp_path).status == 0
    study = study_in(tmp_path)
    (first,) = study.trials
    (other,) = {"dp", "zero1"} - {first.params["strategy"]}
    study.sampler = optuna.samplers.GridSampler({"strategy": ["dp", "zero1"]})
    lost = study.ask({"strategy": CategoricalDistribution(("dp", "zero1"))})
    assert lost.params == {"strategy": other}
    with subprocess.Popen(["true"]) as ended:
        process = first.user_attrs["process"].split(" ")
    lost.set_user_attr("process", " ".join([process[0], str(ended.pid), *process[2:]]))
    answer = whale_train(command, tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    trials = study_in(tmp_path).trials
    assert [t.state.name for t in trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert trials[2].params == {"strategy": other}
    assert [row[2].partition(",")[0] for row in rows_of(answer)] == ["done", "lost", "done"]


def test_a_seeded_study_that_goes_on_repeats_no_value(tmp_path: Path) -> None:
    values = ("optimizer.lr=interval(0.1, 0.2)", "hydra/sweeper/sampler=random")
    for trials in (1, 2):
        wanted = (f"hydra.sweeper.n_trials={trials}", "hydra.sweeper.sampler.seed=1")
        answer = whale_train([*SWEEP, *PLANS, "strategy=dp", *values, *wanted, KEPT], tmp_path)
        assert answer.status == 0
    alone = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    drawn = [trial.params["optimizer.lr"] for trial in study_in(tmp_path).trials]
    assert (
        drawn[0] == alone.ask({"optimizer.lr": FloatDistribution(0.1, 0.2)}).params["optimizer.lr"]
    )
    assert drawn[1] != drawn[0]


JOBS = {
    "mode=verify": "mode=verify has no value for hydra/sweeper=optuna to optimise; use train or "
    "plan",
    "launcher=slurm launcher.wait=false": "launcher.wait=false leaves a trial without its value; "
    "leave it out",
    "launcher=ssh hydra.sweeper.pruner=hyperband": "hydra.sweeper.pruner=hyperband ends jobs that "
    "run "
    "here, and not those of launcher=ssh; use hydra/sweeper/pruner=none",
    "hydra.sweeper.n_jobs=2 hydra.sweeper.n_trials=0 hydra.verbose=true,false": "hydra.sweeper."
    "n_trials=0 is below 1; use 1 or more\nhydra.verbose=true,false is the same for all trials; "
    "give "
    "one value",
    "hydra.sweeper.n_jobs=2": "hydra.sweeper.n_jobs=2 runs jobs at once, and only launcher=slurm "
    "has "
    "places for them; use 1, or launcher=slurm",
    "launcher=slurm hydra.sweeper.n_jobs=4": "",
    "mode=plan compare=[dp,zero1]": "compare=['dp', 'zero1'] makes several plans, and a trial has "
    "one; leave it out",
    "hydra.sweeper.sampler=grid optimizer.lr=interval(0,1)": "optimizer.lr is an interval, which a "
    "grid has no end of; use range() or choice()",
    "hydra/sweeper/sampler=motpe": "hydra/sweeper=optuna builds on motpe, which is not an option; "
    "did "
    "you mean tpe? One of: cmaes, grid, nsgaii, random, tpe",
    "+hydra.sweeper.sampler._target_=optuna.samplers.TPESampler": "hydra.sweeper.sampler._target_="
    "optuna.samplers.TPESampler would be called, and Hydra's own part of a config calls nothing; "
    "leave it out; code is named by model._target_",
}


@pytest.mark.parametrize("arguments", JOBS)
def test_what_no_trial_can_be_is_refused(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert faults_of(*SWEEP, "hardware=cpu", "seed=1,2", *arguments.split(" ")) == JOBS[arguments]


def faults_of(*arguments: str) -> str:
    """Return the faults of a command line, or nothing."""
    try:
        check(rewritten(arguments))
    except ConfigError as error:
        return str(error)
    return ""


def test_without_m_there_is_no_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = faults_of("hydra/sweeper=optuna", "mode=plan", "hardware=cpu")
    assert said == "hydra/sweeper=optuna has no effect on one run; add -m to sweep"


def test_values_of_a_config_file_are_swept(tmp_path: Path) -> None:
    (tmp_path / "my/experiment").mkdir(parents=True)
    (tmp_path / "my/experiment/mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [{override /hydra/sweeper: optuna}]\n"
        "hydra: {mode: MULTIRUN, sweeper: {n_trials: 1, params: {strategy: 'choice(zero1)'}}}\n",
        encoding="utf-8",
    )
    wanted = ("--config-dir=my", "experiment=mine", *PLANS, "hydra.sweep.dir=swept")
    answer = whale_train(wanted, tmp_path)
    assert (answer.status, answer.stderr) == (0, "")
    assert [row[1] for row in rows_of(answer)] == ["zero1"]


def test_the_released_sweeper_beside_ours_is_not_taken(tmp_path: Path) -> None:
    """Hydra takes what a plugin registers as the schema of a file of the same name."""
    plugin = tmp_path / "plugins/hydra_plugins/hydra_optuna_sweeper"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").touch()
    (plugin / "config.py").write_text(
        "from hydra.core.config_store import ConfigStore\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Conf:\n"
        "    _target_: str = 'hydra_plugins.hydra_optuna_sweeper.OptunaSweeper'\n"
        "    n_trials: int = 20\n"
        "store = ConfigStore.instance().store\n"
        "store(group='hydra/sweeper', name='optuna', node=Conf)\n"
        "store(group='hydra/sweeper/sampler', name='tpe', node={'_target_': "
        "'optuna.samplers.X'})\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path / "plugins"), environment_for(tmp_path)["PYTHONPATH"]])
    command = [*SWEEP, *PLANS, "strategy=dp,zero1", "hydra.sweeper.n_trials=1"]
    answer = whale_train_process(command, tmp_path, {"PYTHONPATH": path})
    assert (answer.status, answer.stderr) == (0, "")
    assert len(rows_of(answer)) == 1


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder with a small model that takes its time."""
    (tmp_path / "slow.py").write_text(MODEL, encoding="utf-8")
    rng = np.random.default_rng(0)
    features = rng.normal(size=(64, 6)).astype("float32")
    labels = (features.sum(1) > 0).astype("int64")
    np.savez(tmp_path / "samples.npz", features=features, labels=labels)
    return tmp_path


TRAINING = (
    *("model._target_=slow.Slow", "data=arrays", "data.path=samples.npz", "strategy=single"),
    *("hardware=cpu", "hardware.devices=1", "train.global_batch=8", "optimizer=sgd"),
)


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_running_job_is_pruned_by_its_loss(trained: Path) -> None:
    values = ("optimizer.lr=1e-6,0.5", "hydra.sweeper.sampler=grid")
    pruner = ("hydra/sweeper/pruner=median", "hydra.sweeper.pruner.n_startup_trials=1")
    command = [*SWEEP, *TRAINING, *values, *pruner, "train.steps=30", KEPT]
    answer = whale_train(command, trained)
    assert (answer.status, answer.stderr) == (0, "")
    good, bad = study_in(trained).trials
    assert (good.params["optimizer.lr"], bad.params["optimizer.lr"]) == (0.5, 1e-6)
    assert (good.state, bad.state) == (TrialState.COMPLETE, TrialState.PRUNED)
    whole, part = losses(trained / "swept/0"), losses(trained / "swept/1")
    assert good.value == whole[-1]
    # At the first step where the best loss so far is worse than the other trial's there.
    worse = (i for i in range(len(part)) if min(part[: i + 1]) > whole[i])
    step = next(worse) + 1
    assert bad.last_step == step
    assert step <= len(part) < 30
    assert [row[2] for row in rows_of(answer)] == ["done, best", f"pruned at step {step}"]
    assert answer.left_running == ()


def test_a_sweep_ends_where_too_many_trials_fail(trained: Path) -> None:
    values = ("optimizer.lr=2e38,3e38", "hydra.sweeper.sampler=grid")
    command = [*SWEEP, *TRAINING, *values, "train.steps=5", "hydra.sweeper.max_failure_rate=0"]
    answer = whale_train(command, trained)
    assert answer.status == 1
    assert answer.stderr.endswith(
        "error: 1 of 2 trials failed, more than hydra.sweeper.max_failure_rate=0 allows\n"
    )
    assert [row[:3] for row in rows_of(answer)] == [["0", "3e+38", "failed"]]
    assert "trial 0 failed: " in answer.stdout
    assert not (trained / "swept/optimization_results.yaml").exists()


def test_a_sweep_that_is_interrupted_keeps_its_study(trained: Path) -> None:
    command = [*SWEEP, *TRAINING, "optimizer.lr=0.5,0.1", "train.steps=10000", KEPT]
    process = subprocess.Popen(
        [sys.executable, "-m", "whale_train.launcher.cli", *command],
        cwd=trained,
        env=environment_for(trained),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (trained / "swept/0/metrics.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, processes_of(trained)) == (130, ())
    assert err == f"interrupted; what was written is in {trained}/swept/0\n"
    assert [row[2] for row in rows_of(Answer(130, out, err, ()))] == ["interrupted"]
    failed, waiting = study_in(trained).trials
    assert (failed.state, waiting.state) == (TrialState.FAIL, TrialState.WAITING)
    assert waiting.params == failed.params
