"""Collectives through shared memory, against what each member is known to have given."""

import os
import time
from datetime import timedelta

import pytest
import torch
from tests.distributed.harness import RankError, run_ranks
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.comms import layout_collectives as casts
from whale_train.runtime.comms.layout_collectives import ShardGroup
from whale_train.runtime.cpu.shm_collectives import SLOT_BYTES, SharedMemoryGroup

# Elements of fp32: nothing, less than a slot, exactly one, several and a part of one.
LENGTHS = [0, 5, SLOT_BYTES // 4, 3 * SLOT_BYTES // 4 + 7]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def group_of_all(timeout_s: float = 60.0) -> dist.ProcessGroup:
    ranks = list(range(dist.get_world_size()))
    return SharedMemoryGroup.new(ranks, timedelta(seconds=timeout_s), "all")


def given(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (length,), generator=generator).to(dtype)


def reduced(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    group, mine = group_of_all(), given(dist.get_rank(), length, dtype)
    results = [mine.clone() for _ in range(3)]
    operations = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
    for result, operation in zip(results, operations, strict=True):
        dist.all_reduce(result, operation, group)
    return tuple(results)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("length", "dtype"),
    [*((length, torch.float32) for length in LENGTHS), *((9, t) for t in TYPES)],
)
def test_all_reduce(size: int, length: int, dtype: torch.dtype) -> None:
    whole = torch.stack([given(rank, length, dtype) for rank in range(size)])
    expected = whole.sum(0, dtype=dtype), whole.amax(0), whole.amin(0)
    for found in run_ranks(reduced, size, length, dtype):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def gathered(length: int) -> tuple[Tensor, list[Tensor]]:
    group, mine = group_of_all(), given(dist.get_rank(), length)
    listed = [torch.empty(length) for _ in range(group.size())]
    dist.all_gather(listed, mine, group)
    return casts.all_gather_stack(mine, group), listed


@pytest.mark.parametrize("length", LENGTHS)
def test_all_gather(length: int) -> None:
    for stacked, listed in run_ranks(gathered, 3, length):
        for rank in range(3):
            assert torch.equal(stacked[rank], given(rank, length))
            assert torch.equal(listed[rank], given(rank, length))


def scattered(sizes: tuple[int, ...], width: int) -> Tensor:
    group, rank = group_of_all(), dist.get_rank()
    whole = given(rank, sum(sizes) * width).view(sum(sizes), width)
    return casts.reduce_scatter(whole, 0, ShardGroup(group, sizes, rank))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0, 1), (1, 4, 2)])
@pytest.mark.parametrize("width", [3, LENGTHS[-1] // 3])
def test_reduce_scatter(sizes: tuple[int, ...], width: int) -> None:
    length = sum(sizes) * width
    whole = torch.stack([given(rank, length) for rank in range(len(sizes))]).sum(0)
    expected = whole.view(sum(sizes), width).split(sizes)
    for found, wanted in zip(run_ranks(scattered, len(sizes), sizes, width), expected, strict=True):
        assert torch.equal(found, wanted)


def begun_together() -> list[Tensor]:
    """Several that nobody waits for before all are begun, waited for in another order."""
    group, rank = group_of_all(), dist.get_rank()
    results = [given(rank + 10 * number, LENGTHS[-1]) for number in range(3)]
    works = [dist.all_reduce(result, group=group, async_op=True) for result in results]
    time.sleep(0.2 * rank)
    for work in works[::-1]:
        work.wait()
    return results


def test_collectives_begun_together_keep_their_order() -> None:
    expected = [given(10 * n, LENGTHS[-1]) + given(10 * n + 1, LENGTHS[-1]) for n in range(3)]
    for found in run_ranks(begun_together, 2):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def one_ends() -> None:
    group = group_of_all()
    if dist.get_rank() == 1:
        group.shutdown()
        return
    with pytest.raises(ConnectionError):
        dist.all_reduce(torch.ones(3), group=group)


def one_is_late() -> None:
    group = group_of_all(timeout_s=0.5)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"timed out: 0\.5 s for member 1"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def test_a_member_that_has_ended_is_told_from_one_that_is_late() -> None:
    run_ranks(one_ends, 2)
    run_ranks(one_is_late, 2)


def product() -> None:
    dist.all_reduce(torch.ones(3), dist.ReduceOp.PRODUCT, group_of_all())


def test_an_operation_it_does_not_have_is_refused() -> None:
    with pytest.raises(RankError, match=r"NotImplementedError: .* through shared memory"):
        run_ranks(product, 2)


def files() -> tuple[int, int]:
    """How many files are open before groups are made, and after they are gone."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        dist.destroy_process_group(group_of_all())
    return before, len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_a_group() -> None:
    for before, after in run_ranks(files, 2):
        assert after <= before
