"""Rows to the members that have their experts, and back: what a mixture beside copies sends.

Every member has rows of its own samples, sorted by expert, and some of the experts, in order; so
the rows for one member's experts lie next to each other. They arrive by sender, and are put in the
order of the experts, as a product with a stack of them wants it. One all-to-all each way, forward
and backward, with as many rows as the routers say, and one of their numbers. Rows after those of
the last expert are nobody's: they stay, and come back as zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from whale_train.runtime.comms.layout_collectives import ShardGroup, linear


@dataclass(frozen=True)
class Exchange:
    """Where the `rows` of one mixture go. `ends` (int32, [my experts]) says where each of my
    experts' rows end among those that came; `sent` and `received` are numbers of rows by member;
    `order` ([rows that came]) puts rows in the order of experts, `inverse` back in that of
    senders."""

    group: dist.ProcessGroup
    rows: int
    ends: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor
    inverse: Tensor


def exchange(ends: Tensor, rows: Tensor, experts: ShardGroup) -> Exchange:
    """Tell the members how many of my `rows` I have for each of their experts, and be told. `ends`
    ([experts]) says where each expert's rows end among mine; `experts` who has how many."""
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
    members, mine = len(experts.sizes), experts.size
    told = counts.new_empty(members, mine)
    dist.all_to_all_single(
        told.view(-1), counts, [mine] * members, list(experts.sizes), group=experts.group
    )
    sent = torch.stack([each.sum() for each in torch.split(counts, list(experts.sizes))])
    here, there = on_host(torch.stack([sent, told.sum(1)]), len(rows), experts)
    # Those that come are by sender, and of each sender by expert.
    places = torch.arange(sum(there), device=ends.device)
    run = torch.searchsorted(told.view(-1).cumsum(0), places, right=True)
    order = torch.argsort(run % max(mine, 1), stable=True)
    return Exchange(
        experts.group,
        len(rows),
        told.sum(0).cumsum(0).to(ends.dtype),
        here,
        there,
        order,
        torch.argsort(order),
    )


def on_host(numbers: Tensor, rows: int, experts: ShardGroup) -> list[list[int]]:
    """Return the numbers of rows sent to the members and received from them, [2, members], of my
    `rows`: the one thing of a step that the host waits for, as it says how much is sent."""
    found: list[list[int]] = numbers.tolist()
    return found


def dispatch(rows: Tensor, where: Exchange) -> Tensor:
    """[rows that came, width]: the rows for my experts, in their order, for mine, [rows, width]."""
    return linear(rows, lambda x: _to_experts(x, where), lambda x: _to_owners(x, where))


def combine(rows: Tensor, where: Exchange) -> Tensor:
    """[rows, width]: what became of my rows, in the order in which I had them, for those that came,
    [rows that came, width]."""
    return linear(rows, lambda x: _to_owners(x, where), lambda x: _to_experts(x, where))


@dataclass
class _Way:
    """An all-to-all that goes on: what comes, and what is sent, which it reads."""

    came: Tensor
    sent: Tensor
    work: dist.Work

    def end(self, group: dist.ProcessGroup) -> Tensor:
        """Return what came. A wait in vain is told by the name `group`
        (runtime/failures/timeout_frames.py)."""
        self.work.wait()
        return self.came


@dataclass(frozen=True)
class Returning:
    """Rows on their way back from their experts: [rows sent, width], which are there when the last
    of `ways` has ended."""

    rows: Tensor
    where: Exchange
    ways: list[_Way]


def combine_begin(rows: Tensor, where: Exchange) -> Returning:
    """Send what came back, as `combine` does, without waiting for what others send. Its backward
    waits for the gradients that that of `combine_end` has begun to send."""
    ways: list[_Way] = []
    back: Tensor = _Begin.apply(rows, where, ways)  # type: ignore[no-untyped-call]
    return Returning(back, where, ways)


def combine_end(returning: Returning) -> Tensor:
    """Return what `combine` would."""
    where, ways = returning.where, returning.ways
    ended: Tensor = _End.apply(returning.rows, where, ways)  # type: ignore[no-untyped-call]
    return ended


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, where: Exchange, ways: list[_Way]) -> Tensor:
        ctx.where, ctx.ways = where, ways
        by_sender = rows.index_select(0, where.inverse)
        ways.append(_begun(by_sender, where.received, where.sent, where.group))
        return ways[0].came

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Not `grads`: what comes has another shape than what was sent.
        came = ctx.ways.pop().end(ctx.where.group)
        return came.index_select(0, ctx.where.order), None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, back: Tensor, where: Exchange, ways: list[_Way]) -> Tensor:
        ctx.where, ctx.ways = where, ways
        ways.pop().end(where.group)
        return _with_those_that_stayed(back, where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        where: Exchange = ctx.where
        sent = grads[0][: sum(where.sent)]
        ctx.ways.append(_begun(sent, where.sent, where.received, where.group))
        return sent, None, None


def _to_experts(rows: Tensor, where: Exchange) -> Tensor:
    came = _sent(rows[: sum(where.sent)], where.sent, where.received, where.group)
    return came.index_select(0, where.order)


def _to_owners(rows: Tensor, where: Exchange) -> Tensor:
    by_sender = rows.index_select(0, where.inverse)
    back = _sent(by_sender, where.received, where.sent, where.group)
    return _with_those_that_stayed(back, where)


def _with_those_that_stayed(back: Tensor, where: Exchange) -> Tensor:
    stayed = where.rows - len(back)
    if not stayed:
        return back.view_as(back)
    return functional.pad(back, (0, 0) * (back.dim() - 1) + (0, stayed))


def _sent(rows: Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
    return _begun(rows, out, back, group).end(group)


def _begun(rows: Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> _Way:
    came, sent = rows.new_empty(sum(back), *rows.shape[1:]), rows.contiguous()
    work = dist.all_to_all_single(came, sent, back, out, group=group, async_op=True)
    assert work is not None
    return _Way(came, sent, work)
