"""The all-to-alls of expert parallelism: rows to the ranks that hold their experts, and back.

Every member has rows of its own samples, sorted by expert, and a contiguous part of the experts. So
the rows for one member's experts are contiguous. They arrive by sender and are sorted by expert, as
a product with a stack of experts requires. Each direction is one all-to-all, in the forward and in
the backward, with the numbers of rows that the routers chose; a further all-to-all exchanges these
numbers. Rows after those of the last expert belong to no expert: they are not sent, and come back
as zeros.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from whale_train.runtime.comms.layout_collectives import ShardGroup, apply_linear_map


@dataclass(frozen=True)
class Exchange:
    """The routing of one mixture's rows between the members of a group.

    group: the members.
    rows: the number of rows that this rank has before they are sent.
    ends: int32 [local experts]; the end of each local expert's rows among the received rows.
    sent: the number of rows that go to each member.
    received: the number of rows that come from each member.
    order: int64 [rows received]; the permutation from the order of senders to that of experts.
    inverse: int64 [rows received]; the permutation back.
    """

    group: dist.ProcessGroup
    rows: int
    ends: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor
    inverse: Tensor


def exchange(ends: Tensor, rows: Tensor, experts: ShardGroup) -> Exchange:
    """Exchange the number of rows for each expert between the members, and return the routing.

    ends: int32 [experts]; the end of each expert's rows among this rank's rows.
    rows: this rank's rows, [rows, ...], of which only the number is used.
    experts: the group, and the number of experts that each member holds.
    """
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
    members, num_local_experts = len(experts.sizes), experts.size
    received_counts = counts.new_empty(members, num_local_experts)
    dist.all_to_all_single(
        received_counts.view(-1),
        counts,
        [num_local_experts] * members,
        list(experts.sizes),
        group=experts.group,
    )
    sent = torch.stack(
        [member_counts.sum() for member_counts in torch.split(counts, list(experts.sizes))]
    )
    out, back = on_host(torch.stack([sent, received_counts.sum(1)]), len(rows), experts)
    # Received rows are sorted by sender, and the rows of one sender by expert.
    places = torch.arange(sum(back), device=ends.device)
    run = torch.searchsorted(received_counts.view(-1).cumsum(0), places, right=True)
    order = torch.argsort(run % max(num_local_experts, 1), stable=True)
    return Exchange(
        experts.group,
        len(rows),
        received_counts.sum(0).cumsum(0).to(ends.dtype),
        out,
        back,
        order,
        torch.argsort(order),
    )


def on_host(numbers: Tensor, rows: int, experts: ShardGroup) -> list[list[int]]:
    """Return `numbers`, [2, members], on the host: the rows sent to each member, and received from
    each.

    This is the only value of a step that the host waits for, as it determines the sizes of the
    all-to-alls. `rows` (the number of this rank's rows) and `experts` are for the substitute of
    this function in a rehearsal, whose tensors have no values (runtime/rehearse/routing.py).
    """
    split_sizes: list[list[int]] = numbers.tolist()
    return split_sizes


def dispatch(rows: Tensor, where: Exchange) -> Tensor:
    """Send the rows to the ranks of their experts; return the rows for the local experts, sorted by
    expert.

    `rows`, [rows, width], are this rank's, sorted by expert. The result is [rows received, width].
    Differentiable.
    """
    return apply_linear_map(rows, lambda x: _to_experts(x, where), lambda x: _to_owners(x, where))


def combine(rows: Tensor, where: Exchange) -> Tensor:
    """Send the experts' outputs back; return the outputs for this rank's rows, in the rows'
    original order.

    `rows`, [rows received, width], are the outputs of the local experts. The result is [rows,
    width], with zeros for the rows without an expert. Differentiable.
    """
    return apply_linear_map(rows, lambda x: _to_owners(x, where), lambda x: _to_experts(x, where))


@dataclass
class _Way:
    """An all-to-all in progress.

    came: [rows received, ...], filled when the all-to-all ends.
    sent: [rows sent, ...], read until the all-to-all ends.
    work: the handle.
    """

    came: Tensor
    sent: Tensor
    work: dist.Work

    def end(self, group: dist.ProcessGroup) -> Tensor:
        """Wait for the all-to-all and return the received rows, [rows received, ...].

        A timeout is reported by the name of the local `group` (runtime/failures/timeout_frames.py).
        """
        self.work.wait()
        return self.came


@dataclass(frozen=True)
class Returning:
    """Rows that are being sent back from the experts.

    rows: [rows sent, width], complete when the last of `ways` has ended.
    where: the routing.
    ways: the all-to-alls in progress: first the forward's, later the backward's.
    """

    rows: Tensor
    where: Exchange
    ways: list[_Way]


def combine_begin(rows: Tensor, where: Exchange) -> Returning:
    """Begin to send back the experts' outputs `rows` as `combine` does, without waiting for other
    members.

    Its backward waits for the gradients that the backward of `combine_end` began to send.
    """
    ways: list[_Way] = []
    back: Tensor = _Begin.apply(rows, where, ways)  # type: ignore[no-untyped-call]
    return Returning(back, where, ways)


def combine_end(returning: Returning) -> Tensor:
    """Wait for the rows of `combine_begin`, and return the result of `combine`, [rows, width]."""
    where, ways = returning.where, returning.ways
    ended: Tensor = _End.apply(returning.rows, where, ways)  # type: ignore[no-untyped-call]
    return ended


class _Begin(torch.autograd.Function):
    """The first half of `combine`: the forward begins the all-to-all, the backward ends its
    adjoint."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, where: Exchange, ways: list[_Way]) -> Tensor:
        ctx.where, ctx.ways = where, ways
        by_sender = rows.index_select(0, where.inverse)
        ways.append(_begun(by_sender, where.received, where.sent, where.group))
        return ways[0].came

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The gradient is not in `grads`: received rows have another shape than sent rows.
        received = ctx.ways.pop().end(ctx.where.group)
        return received.index_select(0, ctx.where.order), None, None


class _End(torch.autograd.Function):
    """The second half of `combine`: the forward ends the all-to-all, the backward begins its
    adjoint."""

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
    """Send [rows, width] to the experts, and return the received rows, [rows received, width],
    sorted by expert."""
    received = _sent(rows[: sum(where.sent)], where.sent, where.received, where.group)
    return received.index_select(0, where.order)


def _to_owners(rows: Tensor, where: Exchange) -> Tensor:
    """Send [rows received, width], sorted by expert, back to their ranks, and return [rows,
    width]."""
    by_sender = rows.index_select(0, where.inverse)
    back = _sent(by_sender, where.received, where.sent, where.group)
    return _with_those_that_stayed(back, where)


def _with_those_that_stayed(back: Tensor, where: Exchange) -> Tensor:
    """Append zeros for the rows without an expert to `back`, [rows sent, ...], and return [rows,
    ...]."""
    stayed = where.rows - len(back)
    if not stayed:
        return back.view_as(back)
    return functional.pad(back, (0, 0) * (back.dim() - 1) + (0, stayed))


def _sent(rows: Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows and wait: `out` rows go to each member, `back` rows come from each."""
    return _begun(rows, out, back, group).end(group)


def _begun(rows: Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> _Way:
    """Begin an all-to-all of rows: `out` rows go to each member, `back` rows come from each."""
    received, sent = rows.new_empty(sum(back), *rows.shape[1:]), rows.contiguous()
    work = dist.all_to_all_single(received, sent, back, out, group=group, async_op=True)
    assert work is not None
    return _Way(received, sent, work)
