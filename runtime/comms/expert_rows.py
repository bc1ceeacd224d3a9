"""Rows to the members that have their experts, and back: what a mixture beside copies sends.

Every member has rows of its own samples, sorted by expert, and some of the experts, in order; so
the rows for one member's experts lie next to each other. They arrive by sender, and are put in the
order of the experts, as a product with a stack of them wants it. One all-to-all each way, forward
and backward, with as many rows as the routers say, and one of their numbers. Rows after those of
the last expert are nobody's: they stay, and come back as zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
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


def _to_experts(rows: Tensor, where: Exchange) -> Tensor:
    came = _sent(rows[: sum(where.sent)], where.sent, where.received, where.group)
    return came.index_select(0, where.order)


def _to_owners(rows: Tensor, where: Exchange) -> Tensor:
    by_sender = rows.index_select(0, where.inverse)
    back = _sent(by_sender, where.received, where.sent, where.group)
    stayed = where.rows - len(back)
    return functional.pad(back, (0, 0) * (back.dim() - 1) + (0, stayed)) if stayed else back


def _sent(rows: Tensor, out: list[int], back: list[int], group: dist.ProcessGroup) -> Tensor:
    came = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), back, out, group=group)
    return came
