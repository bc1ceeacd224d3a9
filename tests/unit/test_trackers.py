"""What of a list of trackers is refused, word for word, and what they are told of a request."""

from pathlib import Path
from typing import Any

import pytest

from whale_train.errors import ConfigError, Fault
from whale_train.launcher.planning import check_trackers
from whale_train.trackers.options import (
    BuiltIn,
    MlflowOptions,
    OwnTrackerOptions,
    WandbOptions,
    read_trackers,
)
from whale_train.trackers.tracker import RunDescription

NAMES = "mlflow, tensorboard, trackio, wandb"
OWN = "or {_target_: my_module.MyTracker}"


def keys(value: object, tensorboard: bool = False) -> list[str]:
    faults: list[Fault] = []
    read = read_trackers(value, tensorboard, faults)
    assert not faults
    return [options.key for options in read]


def test_tensorboard_is_asked_for_once_however_it_is_asked_for() -> None:
    assert keys([]) == []
    assert keys([], tensorboard=True) == ["tensorboard"]
    assert keys(["wandb", {"name": "tensorboard"}], tensorboard=True) == ["wandb", "tensorboard"]
    assert keys([{"_target_": "mine.Kept", "name": "x"}, "mlflow"]) == ["mine.Kept", "mlflow"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("wandb", ["trackers=wandb is not a list; use trackers=[wandb]"]),
        (["wandd"], [f"trackers[0]=wandd is unknown; did you mean wandb? One of: {NAMES}, {OWN}"]),
        (
            ["mlflow", {"name": "comet", "x": 1}],
            [f"trackers[1].name=comet is unknown; use one of: {NAMES}, {OWN}"],
        ),
        (
            [{"project": "mine"}],
            [
                "trackers[0].name must be given; write trackers[0].name=mlflow or the like, or "
                "trackers[0]._target_=my_module.MyTracker"
            ],
        ),
        (
            [{"name": "mlflow", "experimnt": "a", "uri": 3}],
            [
                "trackers[0].uri=3 is not text; put it in quotes",
                "trackers[0].experimnt=a is not a key here; did you mean experiment? One of: "
                "experiment, name, new_run, run_name, uri",
            ],
        ),
        (
            [{"name": "wandb", "mode": "onlin"}],
            [
                "trackers[0].mode=onlin is unknown; did you mean online? One of: null, offline, "
                "online"
            ],
        ),
        (
            ["wandb", {"name": "wandb"}],
            ["trackers[1]=wandb stands there twice; leave one of them out"],
        ),
        (
            [{"_target_": "tracker"}],
            ["trackers[0]._target_=tracker is not the path of a class; name one, as "
             "my_module.MyTracker"],
        ),
        (
            [{"name": "mlflow", "uri": "https://me:secret@host"}],
            ["trackers[0].uri=https://... has a password, which the run directory would keep; set "
             "MLFLOW_TRACKING_URI in the environment instead"],
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_list_is_said(value: object, said: list[str]) -> None:
    faults: list[Fault] = []
    read_trackers(value, False, faults)
    assert sorted(map(str, faults)) == sorted(said)


def refused(*trackers: BuiltIn | OwnTrackerOptions) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        check_trackers.refuse_trackers(trackers)
    return [str(fault) for fault in raised.value.faults]


def test_missing_packages_are_named_with_what_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check_trackers, "find_spec", lambda name: None)
    monkeypatch.setattr(check_trackers, "how_to_install", lambda name: f"install {name}")
    assert refused(WandbOptions(), MlflowOptions()) == [
        "trackers[0]=wandb needs wandb, which is not installed; install wandb",
        "trackers[1]=mlflow needs mlflow, which is not installed; install mlflow",
    ]
    monkeypatch.setattr(check_trackers, "find_spec", lambda name: name == "mlflow" or None)
    assert refused(MlflowOptions(uri="sqlite:///x.db")) == [
        "trackers[0]=mlflow keeps runs in SQLite by SQLAlchemy, which is not installed; install "
        "SQLAlchemy",
        "trackers[0]=mlflow keeps runs in SQLite by alembic, which is not installed; install "
        "alembic",
    ]


def test_a_tracker_of_ones_own_has_the_four_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_test.py").write_text(
        "class Half:\n    def open(self, run, state): ...\n    def log(self, step, values): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    kind = "whale_train.trackers.tracker.Tracker"
    assert refused(OwnTrackerOptions(target="mine_of_test.Half")) == [
        f"trackers[0]._target_=mine_of_test.Half is a class, and not a {kind}; name a {kind} "
        "class, or a function annotated to return one (-> tracker.Tracker)"
    ]


def test_parameters_are_the_requests_values_by_their_keys() -> None:
    config: dict[str, Any] = {"train": {"lr": 0.5, "profile": None}, "betas": [1, 2], "model": {}}
    run = RunDescription("run", Path("/run"), 0, config, (), lambda text: None)
    assert run.parameters == {
        "train.lr": "0.5",
        "train.profile": "null",
        "betas": "[1, 2]",
        "model": "{}",
    }
