"""Ranges of positions: they tile the sequence, and an exchange brings each row where it belongs."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.harness import run_ranks
from torch import distributed as dist

from whale_train.runtime.comms.layout_collectives import ShardGroup
from whale_train.runtime.comms.positions import PositionExchange, contiguous, zigzag

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(SIZES)
def test_ranges_tile_the_sequence(sizes: list[int]) -> None:
    for ranges in (contiguous(sizes), zigzag(sizes)):
        positions = [x for held in ranges for start, stop in held for x in range(start, stop)]
        assert sorted(positions) == list(range(sum(sizes)))
        assert [sum(b - a for a, b in held) for held in ranges] == sizes


@given(st.integers(2, 6), st.integers(1, 8))
def test_zigzag_gives_equal_members_equal_causal_work(members: int, half: int) -> None:
    ranges = zigzag([2 * half] * members)
    work = [sum(x + 1 for start, stop in held for x in range(start, stop)) for held in ranges]
    assert len(set(work)) == 1


def there_and_back(sizes: tuple[int, ...]) -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    shards = ShardGroup(group, sizes, rank)
    exchange = PositionExchange(shards, contiguous(sizes), zigzag(sizes))
    everything = torch.randn(2, 3, sum(sizes), 4, generator=torch.Generator().manual_seed(1))
    held = torch.cat([torch.arange(a, b) for a, b in exchange.want[rank]])
    mine = everything[:, :, shards.start : shards.start + shards.size].clone().requires_grad_()
    turned = exchange.there(mine)
    assert torch.equal(turned, everything[:, :, held])
    assert torch.equal(exchange.reverse.there(turned), mine)
    turned.backward(everything[:, :, held] ** 2)
    assert mine.grad is not None
    assert torch.equal(mine.grad, mine.detach() ** 2)


def test_rows_arrive_with_their_gradients() -> None:
    run_ranks(there_and_back, 3, (5, 4, 2))
