"""Logical workers on devices: who runs which, what is promised of their bits, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operation_graphs import gpt
from tests.unit.plan_requests import mixed, strategy_of, training

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.nodes import read_strategy
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import resolve
from whale_train.strategies.stages.logical_workers import deal

COPIES = {"replicate": {}}


def planned(
    workers: int, devices: int = 16, train: Training | None = None, graph: Any = None
) -> Plan:
    strategy = strategy_of({"graph": graph or COPIES, "logical_workers": workers})
    return resolve(strategy, mixed().first(devices), gpt(), train or training(6 * workers))


def faults_of(*args: Any, **options: Any) -> list[str]:
    with pytest.raises(PlanError) as error:
        planned(*args, **options)
    return [str(fault) for fault in error.value.faults]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7))
def test_workers_of_a_round_are_consecutive_and_in_the_order_of_the_ranks(
    counts: list[int],
) -> None:
    dealt = deal(counts)
    assert [len(workers) for workers in dealt] == counts
    rounds = [
        [workers[turn] for workers in dealt if turn < len(workers)] for turn in range(max(counts))
    ]
    assert [worker for workers in rounds for worker in workers] == list(range(sum(counts)))


@given(st.integers(1, 16), st.integers(0, 24))
def test_the_workers_tile_the_batch_in_equal_parts_whatever_the_devices(
    devices: int, more: int
) -> None:
    count = devices + more
    plan = planned(count, devices)
    assert plan.logical_workers is not None
    parts = {
        worker: part
        for rank, workers in zip(plan.ranks, plan.logical_workers.of_ranks, strict=True)
        for worker, part in zip(workers, rank.samples, strict=True)
    }
    assert parts == {worker: (6 * worker, 6 * worker + 6) for worker in range(count)}


def test_fast_devices_run_more_workers() -> None:
    """A V100 computes fp32 in 0.6 of a P100's time: 15.7 against 9.3 TFLOP/s at their peaks."""
    plan = planned(40)
    assert plan.logical_workers is not None
    counts = [len(workers) for workers in plan.logical_workers.of_ranks]
    assert counts == [3] * 8 + [2] * 8


def test_what_is_promised_follows_from_the_devices() -> None:
    equal, unlike = planned(8, 8).logical_workers, planned(16).logical_workers
    assert equal is not None
    assert unlike is not None
    assert (equal.level, unlike.level) == ("elastic", "fixed_devices")
    assert equal.stops == unlike.stops
    assert "linear" in equal.stops
    chosen = {x.key: x.chosen for x in planned(16).decisions}
    assert chosen["strategy.logical_workers bits"] == "the same on these devices"
    assert chosen["strategy.logical_workers of a device"] == "16 x 1"


@pytest.mark.parametrize(
    ("workers", "options", "fault"),
    [
        (
            4,
            {"devices": 6},
            "strategy.logical_workers=4 leaves 2 of 6 devices without a worker; use at least 6, or "
            "strategy.devices=4",
        ),
        (
            8,
            {"devices": 8, "train": training(20)},
            "train.global_batch=20 cannot be shared equally by 8 logical workers "
            "(strategy.logical_workers); use 16 or 24",
        ),
        (
            8,
            {"devices": 4, "train": replace(training(32), accumulate=2)},
            "train.accumulate=2 cuts a device's share, which consists of logical workers "
            "(strategy.logical_workers=8); use 1, and strategy.logical_workers=16 for workers as "
            "small",
        ),
        (
            8,
            {"devices": 4, "graph": {"split": {}}},
            "strategy.logical_workers=8 are copies of the whole model, and strategy.graph divides "
            "it; use strategy=elastic_dp, whose graph is {replicate: {}}, or null",
        ),
        (
            8,
            {"devices": 4, "graph": {"replicate": {"zero": 1}}},
            "strategy.graph.replicate.zero=1 partitions the update by the number of devices, and "
            "so its bits, under strategy.logical_workers; use zero: 0, or "
            "strategy.logical_workers=null",
        ),
    ],
)
def test_what_workers_cannot_share_is_refused(
    workers: int, options: dict[str, Any], fault: str
) -> None:
    assert faults_of(workers, **options) == [fault]


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_a_number_of_workers_is_whole(value: object) -> None:
    faults: list[Fault] = []
    assert read_strategy({"graph": COPIES, "logical_workers": value}, "mine", faults) is None
    assert [str(fault) for fault in faults] == [
        f"strategy.logical_workers={value} is not a whole number of at least 1; use such a number, "
        "or null"
    ]


def test_a_searched_graph_has_no_workers() -> None:
    faults: list[Fault] = []
    assert read_strategy({"graph": "auto", "logical_workers": 4}, "mine", faults) is None
    assert [str(fault) for fault in faults] == [
        "strategy.logical_workers=4 are copies of the whole model, and graph: auto may divide it; "
        "use strategy=elastic_dp, or null"
    ]
