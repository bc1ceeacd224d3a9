"""`train.epochs`: the optimizer steps of so many passes over the data."""

import pytest
from hydra import compose, initialize_config_module

from whale_train.config import Request, in_steps, read_request
from whale_train.errors import ConfigError


def request_of(*overrides: str) -> Request:
    with initialize_config_module("whale_train.conf", version_base="1.3"):
        return read_request(compose("config", list(overrides)), {})


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "steps"),
    [
        (1, 64, 64, 1),
        (1, 65, 64, 2),
        (3, 60_000, 64, 2813),  # 2812.5
        (0.1, 1000, 10, 10),  # 0.1 * 1000 is not 100 in floating point
        (0.001, 100, 64, 1),
        (2.5, 10**9, 1000, 2_500_000),
    ],
)
def test_steps_are_those_in_which_the_last_sample_is_seen(
    epochs: float, samples: int, batch: int, steps: int
) -> None:
    request = request_of(f"train.epochs={epochs}", f"train.global_batch={batch}")
    assert in_steps(request, samples).train.steps == steps


def test_steps_stand_where_there_are_no_epochs() -> None:
    assert in_steps(request_of(), 5).train.steps == 100
    assert in_steps(request_of("train.steps=7"), 5).train.steps == 7


def test_steps_and_epochs_are_not_given_together() -> None:
    with pytest.raises(ConfigError) as caught:
        request_of("train.epochs=2", "train.steps=100")
    assert str(caught.value) == (
        "train.epochs=2 is not the only end of the run (train.steps=100); leave one of them out"
    )


def test_options_that_name_steps_are_checked_once_steps_are_known() -> None:
    options = ("optimizer.schedule=wsd", "optimizer.decay_steps=30", "train.profile=[10,13]")
    request = request_of("train.epochs=2", "train.global_batch=10", *options)
    assert in_steps(request, 150).train.steps == 30
    with pytest.raises(ConfigError) as caught:
        in_steps(request, 50)
    keys = [fault.key for fault in caught.value.faults]
    assert keys == ["train.profile", "optimizer.decay_steps"]
