"""Messages through shared memory, against what is known to have been sent."""

import time
from datetime import timedelta

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.cpu.shm_p2p import SharedMessages

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]
SHAPES = [(), (1,), (0, 3), (7, 5), (3, 400, 500)]


def group_of_two(timeout_s: float = 60.0) -> dist.ProcessGroup:
    return SharedMessages.new([0, 1], timedelta(seconds=timeout_s), "two")


def given(number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 99, shape, generator=generator).to(dtype)


def exchanged() -> list[Tensor]:
    """Both send all they have before either receives, and receive in another order."""
    group, rank = group_of_two(), dist.get_rank()
    values = [given(rank, shape, dtype) for shape in SHAPES for dtype in TYPES]
    works = [dist.isend(value, 1 - rank, group=group, tag=tag) for tag, value in enumerate(values)]
    found = [torch.empty_like(value) for value in values]
    posted = [dist.irecv(value, 1 - rank, group=group, tag=tag) for tag, value in enumerate(found)]
    for work in (*works, *posted[::-1]):
        assert work is not None
        work.wait()
    return found


def test_both_sides_send_before_they_receive() -> None:
    for rank, found in enumerate(run_ranks(exchanged, 2)):
        expected = [given(1 - rank, shape, dtype) for shape in SHAPES for dtype in TYPES]
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


COUNT = 2000  # more than a socket's queue holds


def in_rounds(count: int, rounds: int) -> tuple[list[float], int]:
    """What each got, sending `count` messages before it receives as many, and how many slots it
    has for them in the end."""
    group, rank = group_of_two(), dist.get_rank()
    found = []
    for turn in range(rounds):
        for tag in range(count):
            dist.isend(torch.tensor([float(tag + turn)]), 1 - rank, group=group, tag=tag)
        for tag in range(count):
            value = torch.empty(1)
            work = dist.irecv(value, 1 - rank, group=group, tag=tag)
            assert work is not None
            work.wait()
            found.append(value.item())
        dist.barrier()  # nobody listens meanwhile
    return found, len(group._mine)


@pytest.mark.parametrize(("count", "rounds"), [(8, 20), (COUNT, 2)])
def test_nobody_waits_to_send_and_slots_are_used_again(count: int, rounds: int) -> None:
    for found, slots in run_ranks(in_rounds, 2, count, rounds):
        assert found == [float(tag + turn) for turn in range(rounds) for tag in range(count)]
        assert slots <= count if count < COUNT else slots < rounds * count


def of_one_tag() -> list[float]:
    group, rank = group_of_two(), dist.get_rank()
    if rank == 0:
        for number in range(5):
            dist.isend(torch.tensor([float(number)]), 1, group=group, tag=7)
    found = []
    for _ in range(5 * rank):
        value = torch.empty(1)
        work = dist.irecv(value, 0, group=group, tag=7)
        assert work is not None
        work.wait()
        found.append(value.item())
    dist.barrier()
    return found


def test_messages_of_one_tag_keep_their_order() -> None:
    assert run_ranks(of_one_tag, 2)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def changed_after() -> Tensor:
    """What was sent is what it was then."""
    group, rank = group_of_two(), dist.get_rank()
    value = given(5, (10,))
    if rank == 0:
        dist.isend(value, 1, group=group)
        value.zero_()
        return value
    time.sleep(0.2)
    work = dist.irecv(value.zero_(), 0, group=group)
    assert work is not None
    work.wait()
    return value


def test_a_value_may_change_once_it_is_sent() -> None:
    assert torch.equal(run_ranks(changed_after, 2)[1], given(5, (10,)))


def receive_one(group: dist.ProcessGroup) -> None:
    work = dist.irecv(torch.empty(3), 1, group=group)
    assert work is not None
    work.wait()


def one_ends() -> None:
    group = group_of_two()
    if dist.get_rank() == 1:
        group.shutdown()
        return
    with pytest.raises(ConnectionError):
        receive_one(group)


def one_is_late() -> None:
    group = group_of_two(timeout_s=0.5)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"timed out: 0\.5 s for member 1"):
            receive_one(group)
    dist.barrier()


def send_many(group: dist.ProcessGroup) -> None:
    for tag in range(100 * COUNT):
        dist.isend(torch.ones(1), 1, group=group, tag=tag)


def one_does_not_listen() -> None:
    group = group_of_two(timeout_s=0.5)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"timed out: 0\.5 s for member 1"):
            send_many(group)
    dist.barrier()


def test_a_member_that_has_ended_is_told_from_one_that_is_late() -> None:
    run_ranks(one_ends, 2)
    run_ranks(one_is_late, 2)
    run_ranks(one_does_not_listen, 2)
