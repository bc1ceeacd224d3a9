"""A rank slowed to its device's speed: how long it sleeps, and that it computes the same, as
ranks with slow links do (test_links.py)."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.distributed.equality import Jobs, assert_equal
from tests.distributed.harness import run_ranks
from tests.distributed.test_parallel_strategies import TOLERANCE, Case, hardware
from tests.pairs import some
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.emulate import emulated_group as paced_group
from whale_train.runtime.emulate.emulated_group import PacedGroup
from whale_train.runtime.emulate.throttle import Pace


class Thread:
    """A thread of the tests', whose time passes as it is told."""

    def __init__(self) -> None:
        self.on = self.waited = self.now = 0.0
        self.slept: list[float] = []
        self.oversleeps = 0.0

    def compute(self, seconds: float, waiting: float = 0.0) -> None:
        self.on += seconds
        self.waited += waiting
        self.now += seconds + waiting

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self.oversleeps

    def pace(self, factor: float) -> Pace:
        return Pace(factor, lambda: (self.on, self.waited), self.sleep, lambda: self.now)


def test_computing_takes_the_factor_as_long() -> None:
    thread = Thread()
    pace = thread.pace(3.0)
    for seconds in (0.1, 0.0, 0.2):
        thread.compute(seconds)
        pace.settle()
    thread.now += 5.0  # waiting for others is not computing
    pace.settle()
    assert thread.slept == pytest.approx([0.2, 0.4])


def test_the_fastest_never_sleeps() -> None:
    thread = Thread()
    pace = thread.pace(1.0)
    thread.compute(0.5)
    pace.settle()
    assert thread.slept == []


def test_another_thread_is_not_slowed() -> None:
    thread = Thread()
    pace = thread.pace(2.0)
    thread.compute(0.5)
    other = threading.Thread(target=pace.settle)
    other.start()
    other.join()
    assert thread.slept == []
    pace.settle()
    assert thread.slept == [0.5]


def test_waiting_for_a_processor_and_oversleeping_count_as_slept() -> None:
    thread = Thread()
    pace = thread.pace(2.0)
    thread.compute(0.3, waiting=0.1)
    thread.oversleeps = 0.05
    pace.settle()
    thread.compute(0.3)
    pace.settle()
    thread.compute(0.1, waiting=0.3)  # more than it owes: the rest is taken off what comes
    pace.settle()
    thread.compute(0.5)
    pace.settle()
    assert thread.slept == pytest.approx([0.2, 0.25, 0.25])


def test_a_long_wait_is_not_made_up() -> None:
    thread = Thread()
    pace = thread.pace(2.0)
    thread.compute(0.1, waiting=30.0)
    pace.settle()
    thread.compute(2.0)
    pace.settle()
    assert thread.slept == pytest.approx([1.5])


def collectives() -> tuple[list[Tensor], list[object], int]:
    """Every kind of operation, on the first group and on one made from it."""
    settled = []

    class Counting(Pace):
        def settle(self) -> None:
            settled.append(1)

    rank = dist.get_rank()
    backend = paced_group.register(Counting(2.0))
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60), backend=backend)
    assert isinstance(group, PacedGroup)
    found = []
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, group=group)
    found.append(x)
    gathered = [torch.empty(2), torch.empty(2)]
    dist.all_gather(gathered, torch.full((2,), float(rank)), group=group)
    found += gathered
    whole = torch.arange(4.0) * (rank + 1)
    mine = torch.empty(2)
    dist.reduce_scatter(mine, list(whole.split(2)), group=group)
    found.append(mine)
    message = torch.full((2,), float(rank))
    work = dist.isend(message, 1, group) if rank == 0 else dist.irecv(message, 0, group)
    assert work is not None
    work.wait()
    found.append(message)
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, f"rank {rank}", group=group)
    dist.barrier(group)
    return found, objects, len(settled)


def test_a_paced_group_does_what_gloo_does() -> None:
    for rank, (found, objects, settled) in enumerate(run_ranks(collectives, 2)):
        expected = [[3, 3, 3], [0, 0], [1, 1], [0, 3] if rank == 0 else [6, 9], [0, 0]]
        assert [value.tolist() for value in found] == expected
        assert objects == ["rank 0", "rank 1"]
        assert settled >= 2 * 6  # before each, and before each is waited for


@pytest.mark.parametrize(
    "strategy",
    some(
        [
            "strategy=dp",
            "strategy=zero1",
            "strategy=zero3",
            "strategy=hybrid_split_dp",
            "strategy.graph={split: {}}",
            "strategy.graph={pipeline: {stages: 3, micro_batches: 4, schedule: 1f1b}}",
        ],
        ["strategy=zero1", "strategy=hybrid_split_dp"],
    ),
)
def test_slowed_ranks_compute_the_same(strategy: str, jobs: Jobs, arrays: Path) -> None:
    overrides = Case("llama", "single", "sgd").overrides(arrays)
    place = overrides.index("strategy=single")
    slowed = [*overrides, "launcher.device_speed=true"]
    slowed[place : place + 3] = [strategy, *hardware(3, (2, 1, 1))]
    assert_equal(jobs.run(slowed), jobs.run(overrides), TOLERANCE)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("strategy=dp",), marks=pytest.mark.full),
        ("strategy=zero3", "launcher.device_speed=true"),
        ("strategy=dp", "train.all_reduce=hierarchical", "launcher.device_speed=true"),
        pytest.param(("strategy.graph={split: {}}",), marks=pytest.mark.full),
        ("strategy.graph={pipeline: {stages: 4, micro_batches: 4, schedule: 1f1b}}",),
    ],
)
def test_slow_links_bring_the_same(overrides: tuple[str, ...], jobs: Jobs, arrays: Path) -> None:
    alone = Case("llama", "single", "sgd").overrides(arrays)
    place = alone.index("strategy=single")
    linked = [*alone, "launcher.link_speed=true"]
    # Some 3 MB/s between the two nodes, where gloo moves 500: a value of a few kB takes a while.
    slow = "hardware.network={bandwidth_bytes_s: 1e9, latency_s: 1e-5}"
    linked[place : place + 3] = [*overrides, *hardware(4, (2, 1)), slow]
    assert_equal(jobs.run(linked), jobs.run(alone), TOLERANCE)
