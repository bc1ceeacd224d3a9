"""What is refused of a plan, with and without a model, word for word."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import classifier
from tests.unit.plan_requests import mixed, shipped, strategy_of, training

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.nodes import Strategy
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import refuse_without_model, resolve


def faults_of(
    strategy: Strategy, cluster: Cluster, profile: ModelProfile, train: Training
) -> list[str]:
    with pytest.raises(PlanError) as refused:
        resolve(strategy, cluster, profile, train)
    return [str(fault) for fault in refused.value.faults]


@pytest.mark.parametrize(
    ("mapping", "devices", "train", "expected"),
    [
        (
            {"graph": "replicate", "devices": 20},
            16,
            training(),
            ["strategy.devices=20 is more than the 16 of hardware=v100_p100_mix; "
             "use at most 16, or auto"],
        ),
        (
            {"graph": "replicate"},
            16,
            training(precision="bf16"),
            ["train.precision=bf16 is not computed by p100_pcie_16gb and v100_sxm2_32gb of "
             "hardware=v100_p100_mix; use fp32 or fp16"],
        ),
        (
            {"graph": {"replicate": {"zero": 1}}},
            1,
            training(),
            ["strategy.graph.replicate.zero=1 partitions over the copies, and 1 device has only "
             "one; use strategy=single, or more devices"],
        ),
        (
            {"graph": "replicate"},
            16,
            training(15),
            ["train.global_batch=15 leaves some of the 16 devices without a sample; "
             "use at least 16"],
        ),
        # All of them at once
        (
            {"graph": {"replicate": {"zero": 1, "degree": 3}}, "devices": 17},
            16,
            training(3, "bf16"),
            [
                "strategy.devices=17 is more than the 16 of hardware=v100_p100_mix; "
                "use at most 16, or auto",
                "train.precision=bf16 is not computed by p100_pcie_16gb and v100_sxm2_32gb of "
                "hardware=v100_p100_mix; use fp32 or fp16",
                "strategy.graph.replicate.degree=3 does not divide the 16 devices of "
                "hardware=v100_p100_mix; use 1, 2, 4, 8 or 16",
                "train.global_batch=3 leaves some of the 16 devices without a sample; "
                "use at least 16",
            ],
        ),
    ],
)  # fmt: skip
def test_what_is_refused_before_there_is_a_model(
    mapping: dict[str, Any], devices: int, train: Training, expected: list[str]
) -> None:
    strategy, cluster = strategy_of(mapping), mixed().first(devices)
    assert faults_of(strategy, cluster, classifier(), train) == expected
    faults: list[Fault] = []
    refuse_without_model(strategy, cluster, train, faults)
    assert [str(fault) for fault in faults] == expected


def test_a_precision_no_device_has() -> None:
    quarter = Device("quarter", {"int4": 1e12}, 1e9, 1e9)
    cluster = Cluster("odd", (Node((quarter,), Link("l", 1, 0)),), Link("n", 1, 0))
    (fault,) = faults_of(shipped("dp"), cluster, classifier(), training())
    assert fault == (
        "train.precision=fp32 is not computed by quarter of hardware=odd; use other devices"
    )


def test_no_memory_is_a_plan_error_too() -> None:
    fat = replace(classifier(), activation_bytes=20e9)
    (fault,) = faults_of(shipped("dp"), mixed(), fat, training(16))
    assert fault.startswith("strategy=dp needs 20.6 GB on rank 8 (p100_pcie_16gb) for one sample, ")
