"""Sums of gradients of nested strategies, by hand: bytes and messages."""

from typing import Any

import pytest
from tests.unit.plan_requests import strategy_of, training
from tests.unit.test_stages import model

from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.plan import Prediction
from whale_train.strategies.resolver.resolve import resolve

# 10 GB/s, 1 us a message; weights of 64 elements.
LINK = Link("link", 1e10, 1e-6)
WEIGHT_BYTES = 4 * 64
OF_TWO_S = 2 * (1e-6 + WEIGHT_BYTES / 2 / 1e10)  # a ring
OF_FOUR_S = 2 * (2 * 1e-6 + WEIGHT_BYTES / 1e10)  # up and down a tree of two levels

PIPELINE = {"pipeline": {"stages": 2, "micro_batches": 1}}


def predicted(graph: Any, devices: int, tied: bool) -> Prediction:
    """Of two blocks, one a stage, whose weights are one or two."""
    device = Device("gpu", {"fp32": 1e12}, 1e9, 1e12)
    cluster = Cluster("mine", (Node((device,) * devices, LINK),), LINK)
    profile = model([1.0, 1.0], tied=tied)
    return resolve(strategy_of({"graph": graph}), cluster, profile, training(8)).predicted


@pytest.mark.parametrize(
    ("graph", "devices", "added_s"),
    [
        # The two stages sum what they both hold.
        (PIPELINE, 2, OF_TWO_S),
        # Four ranks do, and no pair of copies sums anything.
        ({"replicate": {"of": PIPELINE}}, 4, OF_FOUR_S - OF_TWO_S),
        # DeepSpeed sums for its partition what the four have summed.
        ({"replicate": {"zero": 1, "of": PIPELINE}}, 4, OF_FOUR_S),
    ],
)
def test_a_tied_weight_is_summed_over_its_holders(graph: Any, devices: int, added_s: float) -> None:
    """What a step takes longer than of weights that are not tied, when all backwards are done."""
    apart, tied = predicted(graph, devices, False), predicted(graph, devices, True)
    assert tied.step_time_s - apart.step_time_s == pytest.approx(added_s, rel=1e-9)
    assert tied.compute_s == pytest.approx(apart.compute_s, rel=1e-12)


def test_its_sum_is_communication() -> None:
    apart, tied = predicted(PIPELINE, 2, False), predicted(PIPELINE, 2, True)
    assert tied.communication_s - apart.communication_s == pytest.approx(OF_TWO_S, rel=1e-9)
    assert tied.idle_s == pytest.approx(apart.idle_s, rel=1e-9)
