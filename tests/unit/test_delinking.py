"""What layers that part begin with, and when they part by themselves."""

import pytest

from whale_train.runtime.optim.plateau import GAIN, WINDOW, Plateau
from whale_train.runtime.state.delinking import Delinking

PLACES = {f"blocks.{i}.{name}": f"blocks.0.{name}" for i in (1, 2, 3) for name in ("w", "b")}


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("exp_avg", 1 / 4), ("momentum_buffer", 1 / 4), ("exp_avg_sq", 1 / 16), ("step", 1.0)],
)
def test_moments_are_those_of_a_fourth_of_the_gradient(kind: str, factor: float) -> None:
    delinking = Delinking(PLACES)
    for block in range(4):
        found = delinking.source("optimizer", f"state.blocks.{block}.w.{kind}")
        assert found == (f"state.blocks.0.w.{kind}", factor)
    assert delinking.source("optimizer", f"state.head.{kind}") == (f"state.head.{kind}", 1.0)


def test_weights_are_those_of_the_first() -> None:
    delinking = Delinking(PLACES)
    assert delinking.source("model", "blocks.3.b") == ("blocks.0.b", 1.0)
    assert delinking.source("model", "blocks.0.b") == ("blocks.0.b", 1.0)
    assert Delinking({}).source("optimizer", "state.w.exp_avg") == ("state.w.exp_avg", 1.0)


def test_a_loss_that_falls_by_less_than_a_hundredth_has_stopped() -> None:
    for fall, reached in ((0.5 * GAIN, True), (2 * GAIN, False)):
        plateau = Plateau()
        for loss in [1.0] * WINDOW + [1.0 - fall] * WINDOW:
            assert not plateau.reached
            plateau.add(loss)
        assert plateau.reached == reached
        for _ in range(WINDOW):
            plateau.add(1.0 - fall)
        assert plateau.reached
