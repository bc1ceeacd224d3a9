"""What a line of metrics says of the devices' use."""

import pytest

from whale_train.runtime.record.metrics import flops_reached


def test_utilisation_is_the_models_flops_of_the_devices() -> None:
    """A sample of 6 TFLOP, 100 a second, on two devices of 500 TFLOP/s."""
    assert flops_reached(6e12, 100.0, 2 * 500e12) == {
        "model_flops_s": pytest.approx(6e14),
        "model_flops_utilisation": pytest.approx(0.6),
    }


def test_what_is_not_known_is_not_said() -> None:
    assert flops_reached(6e12, 100.0, 0.0) == {"model_flops_s": 6e14}
    assert flops_reached(0.0, 100.0, 1e15) == {}
