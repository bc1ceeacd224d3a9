"""How slowly processes compute that stand for devices."""

import pytest

from whale_train.launcher.emulation import paces
from whale_train.strategies.cluster import Device


def device(tera: float) -> Device:
    return Device(f"gpu_{tera}", {"fp32": tera * 1e12, "bf16": 8e12}, 16e9, 9e11)


def test_the_fastest_has_a_processor_where_there_are_enough() -> None:
    assert paces([device(4), device(2), device(1)], "fp32", processors=8) == (1, 2, 4)
    assert paces([device(4), device(2)], "bf16", processors=8) == (1, 1)


@pytest.mark.parametrize("processors", [1.0, 2.0, 0.5])
def test_all_are_slowed_alike_where_there_are_not(processors: float) -> None:
    found = paces([device(4)] * 4 + [device(2)] * 4, "fp32", processors)
    assert found[4:] == tuple(2 * pace for pace in found[:4])
    # Together they want a little less than there is.
    assert 0.8 * processors < sum(1 / pace for pace in found) < processors
