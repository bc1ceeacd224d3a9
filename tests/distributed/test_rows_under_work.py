"""Rows that come back from their experts under other work: those that are waited for, forward and
backward."""

import torch
from tests.distributed.harness import run_ranks
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.comms.expert_rows import (
    combine,
    combine_begin,
    combine_end,
    dispatch,
    exchange,
)
from whale_train.runtime.comms.layout_collectives import ShardGroup

EXPERTS, ROWS, WIDTH = 4, 7, 3


def sent_and_back() -> list[Tensor]:
    """Rows that came back, and the gradient of what was sent, both ways. The last row is nobody's:
    it stays."""
    rank = dist.get_rank()
    experts = ShardGroup(dist.group.WORLD, (3, 1), rank)
    ends = torch.tensor([[2, 2, 3, 6], [0, 4, 4, 6]][rank], dtype=torch.int32)
    found = []
    for delayed in (False, True):
        torch.manual_seed(rank)
        rows = torch.randn(ROWS, WIDTH, requires_grad=True)
        where = exchange(ends, rows, experts)
        there = dispatch(rows, where).tanh() * (rank + 2)
        if delayed:
            returning = combine_begin(there, where)
            beside = (rows * 2).cos()
            back = combine_end(returning)
        else:
            back, beside = combine(there, where), (rows * 2).cos()
        (back * beside).pow(2).sum().backward()
        found += [back.detach(), rows.grad]
    return found


def test_rows_and_gradients_are_those_that_are_waited_for() -> None:
    for back, grad, delayed_back, delayed_grad in run_ranks(sent_and_back, 2):
        assert torch.equal(back, delayed_back)
        torch.testing.assert_close(grad, delayed_grad)
        assert torch.equal(back[-1], torch.zeros(WIDTH))
