"""Refusals: every fault, whole, on lines that fit."""

import io

import pytest

from whale_train.errors import ConfigError, Fault, PlanError
from whale_train.launcher.ui.show_error import error_text, terminal_width

DEGREE = Fault(
    "strategy.graph.replicate.degree",
    "3",
    "does not divide the 16 devices of hardware=v100_p100_mix",
    "use 1, 2, 4, 8 or 16",
)
STEPS = Fault("train.steps", "", "is missing", "say how many optimizer steps to train")


def test_one_fault_is_one_line() -> None:
    assert error_text(PlanError([DEGREE])) == (
        "error: strategy.graph.replicate.degree=3 does not divide the 16 devices of "
        "hardware=v100_p100_mix; use 1, 2, 4, 8 or 16"
    )


def test_several_faults_are_counted_and_listed_in_order() -> None:
    assert error_text(ConfigError([DEGREE, STEPS])).splitlines() == [
        "2 things are wrong with this request:",
        "  strategy.graph.replicate.degree=3 does not divide the 16 devices of "
        "hardware=v100_p100_mix; use 1, 2, 4, 8 or 16",
        "  train.steps is missing; say how many optimizer steps to train",
    ]


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("faults", [[DEGREE], [DEGREE, STEPS]])
def test_a_terminal_gets_broken_lines_with_nothing_lost(width: int, faults: list[Fault]) -> None:
    error = ConfigError(faults)
    broken = error_text(error, width)
    assert all(len(line) <= width for line in broken.splitlines())
    assert broken.split() == error_text(error).split()


def test_continued_lines_are_indented_below_their_fault() -> None:
    assert error_text(ConfigError([DEGREE]), 50).splitlines()[1].startswith("       d")
    assert error_text(ConfigError([DEGREE, STEPS]), 50).splitlines()[2].startswith("    d")


def test_a_key_longer_than_the_terminal_stays_whole() -> None:
    key = "strategy.graph." + "replicate.of." * 8 + "replicate.degree"
    fault = Fault(key, "3", "is not known", "leave it out")
    assert key + "=3" in error_text(ConfigError([fault]), 50)


def test_a_value_with_line_breaks_is_still_one_line() -> None:
    fault = Fault("model.config", "{a: 1,\n b: 2}", "is not known", "leave it out")
    assert "\n" not in error_text(ConfigError([fault]))


def test_a_pipe_has_no_width() -> None:
    assert terminal_width(io.StringIO()) is None
