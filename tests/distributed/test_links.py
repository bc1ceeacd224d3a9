"""Links slowed to their relative bandwidth: what a transfer takes, and that it brings the same.

That whole jobs compute the same is asked in test_pace.py, of the process that is there.
"""

from datetime import timedelta
from threading import Event
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from tests.distributed.harness import run_ranks
from tests.distributed.test_hangs import plan
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.emulate import emulated_group as paced_group
from whale_train.runtime.emulate.delayed_work import LateWork
from whale_train.runtime.emulate.emulated_group import PacedGroup
from whale_train.runtime.emulate.emulated_links import EmulatedLinks, wire_bytes
from whale_train.runtime.emulate.worker_thread import InTurn
from whale_train.runtime.failures.timeout_frames import find_wait
from whale_train.runtime.failures.timeouts import Wait

# Ranks 0 and 1 on one node, rank 2 on another: a tenth of the bandwidth in between.
RELATIVE = ((1.0, 1.0, 0.1), (1.0, 1.0, 0.1), (0.1, 0.1, 1.0))
FULL_BYTES_S = 1e7
ELEMENTS = 30_000  # 0.12 MB: 12 ms at full speed


def values(*counts: int) -> list[Tensor]:
    return [torch.empty(count) for count in counts]


# What each of four members moves, in elements of 4 bytes.
@pytest.mark.parametrize(
    ("operation", "arguments", "elements"),
    [
        ("allreduce", (values(100),), 150),
        ("allreduce_coalesced", (values(60, 40),), 150),
        ("reduce", (values(100),), 100),
        ("broadcast", (values(100),), 100),
        ("send", (values(100), 1, 0), 100),
        ("recv", (values(100), 1, 0), 0),  # its sender is slowed
        ("barrier", (), 0),
        ("allgather", ([values(25, 25, 25, 25)], values(25)), 75),
        ("all_gather_single", (torch.empty(100), torch.empty(25)), 75),
        ("reduce_scatter", (values(25), [values(25, 25, 25, 25)]), 75),
        ("reduce_scatter_single", (torch.empty(25), torch.empty(100)), 75),
        ("alltoall", (values(25, 25, 25, 25), values(25, 25, 25, 25)), 75),
        ("gather", ([], values(25)), 75),  # where nothing is gathered
        ("scatter", (values(25), []), 75),
    ],
)
def test_what_an_operation_moves(operation: str, arguments: tuple[Any, ...], elements: int) -> None:
    assert wire_bytes(operation, arguments, 4) == 4 * elements
    assert wire_bytes(operation, arguments, 1) == 0


def slow_links(clock: Any = perf_counter) -> EmulatedLinks:
    links = EmulatedLinks(RELATIVE, clock)
    links.full_bytes_s = FULL_BYTES_S
    return links


def test_a_group_has_the_link_of_its_slowest_two() -> None:
    links = slow_links()
    assert links.among((0, 1)) is None
    assert links.among((2,)) is None
    slow = links.among((0, 2))
    assert slow is not None
    assert slow is links.among((0, 1, 2))  # they wait for each other there
    transfer = slow.transfer(1e6)
    assert transfer is not None
    assert (transfer.native_s, transfer.nominal_s) == pytest.approx((0.1, 1.0))
    assert EmulatedLinks(RELATIVE).among((0, 2)).transfer(1e6) is None  # type: ignore[union-attr]


def test_a_link_has_one_transfer_after_another() -> None:
    now = [0.0]
    link = slow_links(lambda: now[0]).among((0, 2))
    assert link is not None
    assert link.occupy(1.0, 2.0) == 3.0
    assert link.occupy(2.0, 2.0) == 5.0  # behind the first
    assert link.occupy(9.0, 1.0) == 10.0
    assert not link.is_free()
    now[0] = 10.0
    assert link.is_free()


class Fails(dist.Work):
    """One that fails when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Event()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.told.wait()
        raise RuntimeError("Connection closed by peer")


def test_what_goes_wrong_is_raised_by_the_wait_and_by_the_future() -> None:
    link = slow_links().among((0, 2))
    assert link is not None
    transfer = link.transfer(1.0)
    assert transfer is not None
    inner = Fails()
    work = LateWork(inner, transfer, InTurn("collectives"))
    future = work.get_future()  # before it is known
    inner.told.set()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"):
        work.wait()
    for found in (future, work.get_future()):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            found.wait()


def group_of(ranks: list[int], timeout_s: float = 60) -> Any:
    timeout = timedelta(seconds=timeout_s)
    return dist.new_group(ranks, timeout=timeout, backend=paced_group.register(links=slow_links()))


def collectives() -> dict[str, tuple[list[list[float]], float]]:
    """What every kind of operation over a slow link gave this rank, and the seconds it took."""
    group = group_of([0, 1, 2])
    assert isinstance(group, PacedGroup)
    rank, found = dist.get_rank(), {}
    mine = torch.full((ELEMENTS,), float(rank + 1))
    every = [torch.empty(ELEMENTS) for _ in range(3)]
    whole = torch.cat([mine] * 3)
    part = torch.empty(ELEMENTS)

    def all_reduce() -> list[Tensor]:
        dist.all_reduce(mine, group=group)
        return [mine]

    def all_gather() -> list[Tensor]:
        dist.all_gather(every, torch.full((ELEMENTS,), float(rank)), group=group)
        return every

    def reduce_scatter() -> list[Tensor]:
        dist.reduce_scatter(part, list(whole.chunk(3)), group=group)
        return [part]

    def broadcast() -> list[Tensor]:
        dist.broadcast(part, 2, group=group)
        return [part]

    for operation in (all_reduce, all_gather, reduce_scatter, broadcast):
        dist.barrier(group)
        started = perf_counter()
        values = [value[:2].tolist() for value in operation()]
        found[operation.__name__] = values, perf_counter() - started
    objects: list[object] = [None] * 3
    dist.all_gather_object(objects, f"rank {rank}", group=group)
    assert objects == ["rank 0", "rank 1", "rank 2"]
    return found


def test_a_slow_group_does_what_gloo_does_and_not_sooner_than_its_link() -> None:
    moved = {"all_reduce": 4 / 3, "all_gather": 2, "reduce_scatter": 2, "broadcast": 1}
    for rank, found in enumerate(run_ranks(collectives, 3)):
        values = {name: values for name, (values, _) in found.items()}
        assert values == {
            "all_reduce": [[6, 6]],
            "all_gather": [[0, 0], [1, 1], [2, 2]],
            "reduce_scatter": [[6, 6]],
            "broadcast": [[6, 6]],
        }, rank
        for name, (_, took_s) in found.items():
            if name != "broadcast":  # which those who are sent it may begin later
                assert took_s >= 0.99 * moved[name] * 4 * ELEMENTS / (0.1 * FULL_BYTES_S)


def at_once() -> tuple[float, list[float], float | None]:
    """When two sums at once, and then two messages, began and ended; the bandwidth found here."""
    world = group_of([0, 1, 2])
    rank, ends = dist.get_rank(), []
    dist.barrier(world)
    started, futures = perf_counter(), []
    for i in (1, 2):
        work = dist.all_reduce(torch.full((ELEMENTS,), float(i)), group=world, async_op=True)
        futures.append(work.get_future())
    for future, expected in zip(futures, (3.0, 6.0), strict=True):
        (value,) = future.wait()
        ends.append(perf_counter() - started)
        assert value[0] == expected
    message = torch.full((ELEMENTS,), float(rank))
    dist.barrier(world)
    moment = perf_counter()  # of one clock on all ranks
    if rank == 0:
        for work in [dist.isend(message, 2, world, tag=tag) for tag in (7, 8)]:
            work.wait()
    elif rank == 2:
        for tag in (8, 7):  # the one that comes last is waited for first
            message[:] = 2
            dist.irecv(message, 0, world, tag=tag).wait()
            assert message[0] == 0
            moment = perf_counter() if tag == 8 else moment
    links = EmulatedLinks(RELATIVE)
    links.measure(dist.group.WORLD)
    return moment, ends, links.full_bytes_s


def test_transfers_at_once_come_one_after_another() -> None:
    alone_s = 4 * ELEMENTS / (0.1 * FULL_BYTES_S)
    (sent, _, measured), _, (came, _, _) = found = run_ranks(at_once, 3)
    for _, (first, second), _ in found:
        assert first >= 0.99 * 4 / 3 * alone_s
        assert second >= 0.99 * 2 * 4 / 3 * alone_s
    assert came - sent >= 0.99 * (2 - 0.1) * alone_s  # gloo's own time, a tenth, is an estimate
    assert measured is not None
    assert measured > 0
    assert [bandwidth for _, _, bandwidth in found] == [measured] * 3


def waiting() -> Wait | None:
    """Where rank 0 waited for rank 1, who does not come."""
    slow = group_of([0, 1, 2], timeout_s=0.5)
    if dist.get_rank() == 1:
        sleep(1.5)
        return None
    try:
        dist.all_reduce(torch.ones(ELEMENTS), group=slow)
    except RuntimeError as error:
        return find_wait(error, plan(), dist.get_rank(), 1.0)
    return None


def test_a_wait_in_vain_over_a_slow_link_is_named() -> None:
    wait, _, _ = run_ranks(waiting, 3)
    assert wait is not None
    assert (wait.group, wait.ranks) == ("shared.head.weight", (0, 1, 2))
