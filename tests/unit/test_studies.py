"""What is asked of a study in `hydra.sweeper`, and what of it is refused, word for word."""

import math
from typing import Any

import pytest

from whale_train.errors import Fault
from whale_train.launcher.study import settings
from whale_train.launcher.study.follow import TrialFollower
from whale_train.launcher.study.objectives import Goals, goals_of
from whale_train.launcher.study.settings import read_settings

NAMED = {"evaluation": {"valid": {}, "test": {}}, "evaluation_fraction": 0.0}
PLAN = {"mode": "plan"}
TRAINING = {"mode": "train", "train": {"evaluate_every": None}}
EVALUATED = {"mode": "train", "train": {"evaluate_every": 5}}


def said_of(section: dict[str, Any]) -> str:
    """Return the faults of the section, or nothing."""
    faults: list[Fault] = []
    read = read_settings(section, faults)
    assert (read is None) == bool(faults)
    return "\n".join(map(str, faults))


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"sampler": "random", "pruner": None},
    {"sampler": {"name": "tpe", "seed": 1, "n_startup_trials": 3, "multivariate": None}},
    {"sampler": "cmaes", "pruner": {"name": "hyperband", "max_resource": 100}},
    {"storage": "journal:///study.log", "study_name": "a", "params": {"seed": "1,2"}},
    {"storage": "postgresql+psycopg2://me:secret@here/there", "n_jobs": 4},
    {"objective": ["a", "b"], "direction": ["minimize", "maximize"], "max_failure_rate": 0},
]


@pytest.mark.parametrize("section", ACCEPTED)
def test_what_can_be_asked_for(section: dict[str, Any]) -> None:
    assert said_of(section) == ""


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"sampler": "tpr"},
        "hydra.sweeper.sampler=tpr is no sampler; did you mean tpe? One of: cmaes, grid, nsgaii, "
        "random, tpe",
    ),
    (
        {"sampler": {"_target_": "optuna.samplers.TPESampler"}},
        "hydra.sweeper.sampler={_target_: optuna.samplers.TPESampler} is no sampler; use one of: "
        "cmaes, grid, nsgaii, random, tpe",
    ),
    (
        {"sampler": {"name": "tpe", "gamma": 1}},
        "hydra.sweeper.sampler.gamma=1 is not a key here; use one of: constant_liar, multivariate, "
        "n_ei_candidates, n_startup_trials, seed",
    ),
    (
        {"sampler": {"name": "random", "seed": -1}},
        "hydra.sweeper.sampler.seed=-1 is below 0; use 0 or more",
    ),
    (
        {"sampler": {"name": "grid", "n_startup_trials": 10, "seed": 1}},
        "hydra.sweeper.sampler=grid has options of another sampler (n_startup_trials); choose it "
        "by "
        "hydra/sweeper/sampler=grid",
    ),
    (
        {"pruner": "medium"},
        "hydra.sweeper.pruner=medium is no pruner; did you mean median? One of: hyperband, median, "
        "none, successive_halving",
    ),
    (
        {"n_trials": 0, "max_failure_rate": 2},
        "hydra.sweeper.n_trials=0 is below 1; use 1 or more\n"
        "hydra.sweeper.max_failure_rate=2 is above 1; use 1 or less",
    ),
    (
        {"direction": "down"},
        "hydra.sweeper.direction=down is unknown; use one of: maximize, minimize",
    ),
    (
        {"storage": "study.db"},
        "hydra.sweeper.storage=study.db is no storage of a study; use sqlite:///study.db, "
        "journal:///study.log, postgresql://... or mysql://...",
    ),
    (
        {"storage": "redis://me:secret@here"},
        "hydra.sweeper.storage=redis://me:***@here is no storage of a study; use "
        "sqlite:///study.db, journal:///study.log, postgresql://... or mysql://...",
    ),
    (
        {"study_name": "mine"},
        "hydra.sweeper.study_name=mine has no effect on a study in memory; add "
        "hydra.sweeper.storage=sqlite:///study.db",
    ),
    (
        {"storage": "sqlite:///study.db", "sampler": "cmaes"},
        "hydra.sweeper.sampler=cmaes keeps its state pickled in the study, and unpickling a file "
        "can call anything; use tpe, or leave hydra.sweeper.storage out",
    ),
    (
        {"custom_search_space": "my.function"},
        "hydra.sweeper.custom_search_space=my.function would be called; write the values on the "
        "command line, or as hydra.sweeper.params",
    ),
]


@pytest.mark.parametrize(("section", "said"), REFUSED)
def test_what_cannot_be_asked_for_is_refused(section: dict[str, Any], said: str) -> None:
    assert said_of(section) == said


@pytest.mark.parametrize(
    ("installed", "said"), [(None, "which is not installed"), ("2.10.1", "and 2.10.1 is installed")]
)
def test_a_missing_optuna_is_told_how_to_get(
    installed: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "installed_version", lambda name: installed)
    monkeypatch.setattr(settings, "how_to_install", lambda name: f"pip install {name}")
    assert said_of({}) == f"hydra/sweeper=optuna needs Optuna 5, {said}; pip install optuna"


GOALS: list[tuple[dict[str, Any], dict[str, Any], Goals]] = [
    ({}, PLAN, Goals(("predicted.step_time_s",), ("minimize",))),
    ({}, TRAINING, Goals(("final_loss",), ("minimize",))),
    ({}, EVALUATED, Goals(("evaluation_loss",), ("minimize",))),
    ({}, {**EVALUATED, "data": NAMED}, Goals(("valid_loss",), ("minimize",))),
    (
        {"objective": "test_accuracy", "pruner": "median"},
        {**EVALUATED, "data": NAMED},
        Goals(("test_accuracy",), ("maximize",), "test_accuracy"),
    ),
    ({"pruner": "median"}, TRAINING, Goals(("final_loss",), ("minimize",), "loss")),
    (
        {"pruner": "median", "objective": "evaluation_accuracy"},
        EVALUATED,
        Goals(("evaluation_accuracy",), ("maximize",), "evaluation_accuracy"),
    ),
    (
        {"objective": ["samples_per_s", "peak_memory_bytes"]},
        TRAINING,
        Goals(("samples_per_s", "peak_memory_bytes"), ("maximize", "minimize")),
    ),
    (
        {"objective": "ranks.memory_bytes.activations"},
        PLAN,
        Goals(("ranks.memory_bytes.activations",), ("minimize",)),
    ),
    (
        {"objective": "evaluation_f1"},
        {**EVALUATED, "metrics": {"f1": {}}},
        Goals(("evaluation_f1",), ("maximize",)),
    ),
]


@pytest.mark.parametrize(("section", "config", "goals"), GOALS)
def test_the_objective_follows_the_mode(
    section: dict[str, Any], config: dict[str, Any], goals: Goals
) -> None:
    assert goals_and_faults(section, config) == (goals, "")


def goals_and_faults(
    section: dict[str, Any], config: dict[str, Any], *keys: str
) -> tuple[Goals | None, str]:
    """Return the goals of a section, and their faults."""
    faults: list[Fault] = []
    asked = read_settings(section, faults)
    assert asked is not None, faults
    return goals_of(asked, config, keys, faults), "\n".join(map(str, faults))


NO_GOALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"objective": "predicted.step_time"},
        PLAN,
        "hydra.sweeper.objective=predicted.step_time is no number of a plan; did you mean "
        "predicted.step_time_s? One of: peak_memory_bytes, predicted.communication_s, "
        "predicted.compute_s, predicted.idle_s, predicted.optimizer_s, predicted.samples_per_s, "
        "predicted.step_time_s, world_size",
    ),
    (
        {"objective": "pipeline.chunks"},
        PLAN,
        "hydra.sweeper.objective=pipeline.chunks may be better either way; add "
        "hydra.sweeper.direction=minimize, or maximize",
    ),
    (
        {"direction": ["minimize", "maximize"]},
        PLAN,
        "hydra.sweeper.direction=minimize, maximize is not one direction for each of 1; name 1, or "
        "null",
    ),
    (
        {"pruner": "median"},
        PLAN,
        "hydra.sweeper.pruner=median ends running jobs, and mode=plan runs none; use "
        "hydra/sweeper/pruner=none",
    ),
    (
        {"objective": "evaluation_loss"},
        TRAINING,
        "hydra.sweeper.objective=evaluation_loss is measured by evaluations, and there is none; "
        "set train.evaluate_every",
    ),
    (
        {"objective": "trained_s", "pruner": "median"},
        TRAINING,
        "hydra.sweeper.pruner=median compares values of running jobs, and trained_s is known at "
        "their end; use hydra/sweeper/pruner=none",
    ),
    (
        {"objective": ["final_loss", "trained_s"], "pruner": "median"},
        TRAINING,
        "hydra.sweeper.pruner=median compares one value, and hydra.sweeper.objective names "
        "several; use hydra/sweeper/pruner=none",
    ),
]


@pytest.mark.parametrize(("section", "config", "said"), NO_GOALS)
def test_what_cannot_be_optimised_is_refused(
    section: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    assert goals_and_faults(section, config) == (None, said)


def test_evaluations_may_be_swept() -> None:
    goals, said = goals_and_faults(
        {"objective": "evaluation_loss"}, TRAINING, "train.evaluate_every"
    )
    assert (goals, said) == (Goals(("evaluation_loss",), ("minimize",)), "")


class Told:
    """A trial of Optuna's that is pruned from a step on, and keeps what it is told."""

    def __init__(self, pruned_from: int) -> None:
        self.reports: list[tuple[float, int]] = []
        self._pruned_from = pruned_from

    def report(self, value: float, step: int) -> None:
        self.reports.append((value, step))

    def should_prune(self) -> bool:
        return self.reports[-1][1] >= self._pruned_from


def heard(follower: TrialFollower, losses: list[float], **more: float) -> None:
    """Have a follower hear a line for each of the losses."""
    for number, loss in enumerate(losses):
        follower.hear({"step": number + 1, "loss": loss, **more})


def test_the_loss_is_reported_in_means_of_a_hundredth_of_the_steps() -> None:
    trial: Any = Told(6)
    follower = TrialFollower(trial, "loss")
    follower.begin(300)
    heard(follower, [5.0, 4.0, 3.0, 2.0, 2.0])
    assert (trial.reports, follower.ends) == ([(4.0, 3)], False)
    heard(follower, [9.0, 9.0, 9.0, 9.0, 9.0, 5.0])  # an attempt that goes on from the beginning
    assert trial.reports[1:] == [((9.0 + 9.0 + 5.0) / 3, 6)]
    assert follower.ends
    heard(follower, [1.0] * 9)
    assert len(trial.reports) == 2


def test_every_evaluation_is_reported_and_the_last_step_prunes_nothing() -> None:
    trial: Any = Told(20)
    follower = TrialFollower(trial, "valid_loss")
    follower.begin(1000)
    follower.hear({"step": 7, "loss": 1.0})
    follower.hear({"step": 10, "loss": 1.0, "valid_loss": 0.5})
    assert (trial.reports, follower.ends) == ([(0.5, 10)], False)
    follower.hear({"step": 1000, "valid_loss": None})
    assert math.isnan(trial.reports[1][0])
    assert not follower.ends
