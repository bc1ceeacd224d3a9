"""Exchange positions of a sequence between members of a group, and send blocks around a ring.

Positions are contiguous ranges outside of attention. A causal attention has more work in later
rows, so in a ring each member computes an early and a late range of positions (zigzag order, as in
Llama 3's training, Dubey et al. 2024, arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.comms.layout_collectives import ShardGroup, apply_linear_map

Ranges = tuple[tuple[int, int], ...]  # [start, stop) of positions, ascending


def contiguous(sizes: Sequence[int]) -> tuple[Ranges, ...]:
    """Return the ranges of members that hold `sizes` positions each, one range a member."""
    ends = [0, *accumulate(sizes)]
    return tuple((interval,) for interval in pairwise(ends))


def zigzag(sizes: Sequence[int]) -> tuple[Ranges, ...]:
    """Return two ranges for each member, which hold as many positions as `sizes` together: the
    first member has the first and the last positions, the last member those in the middle."""
    halves = [(size // 2, size - size // 2) for size in sizes]
    early = [first for first, _ in halves]
    late = [last for _, last in reversed(halves)]
    ends = [0, *accumulate((*early, *late))]
    ranges = list(pairwise(ends))
    count = len(sizes)
    return tuple(
        tuple(x for x in (ranges[i], ranges[2 * count - 1 - i]) if x[0] < x[1])
        for i in range(count)
    )


@dataclass(frozen=True)
class PositionExchange:
    """An exchange of positions, the third dimension of tensors [batch, heads, positions, width].

    shards: the members.
    have: the ranges that each member holds.
    want: the ranges that each member gets.
    """

    shards: ShardGroup
    have: tuple[Ranges, ...]
    want: tuple[Ranges, ...]

    def there(self, x: Tensor) -> Tensor:
        """Return the positions that this member gets, of an `x` that it has. The gradient goes the
        other way."""
        if self.have == self.want:
            return x
        forward = partial(_exchanged, exchange=self)
        return apply_linear_map(x, forward, partial(_exchanged, exchange=self.reverse))

    @property
    def reverse(self) -> "PositionExchange":
        """Return the exchange that undoes this one."""
        return PositionExchange(self.shards, self.want, self.have)


def _exchanged(x: Tensor, exchange: PositionExchange) -> Tensor:
    """Return the positions of `x` that this member gets; not differentiable."""
    rank, members = exchange.shards.rank, range(len(exchange.have))
    batch, heads, _, width = x.shape
    sent = [_common(exchange.have[rank], exchange.want[member]) for member in members]
    parts = [_taken(x, exchange.have[rank], ranges) for ranges in sent]
    expected = [_common(exchange.have[member], exchange.want[rank]) for member in members]
    counts = [sum(b - a for a, b in ranges) for ranges in expected]
    row = batch * heads * width
    buffer = x.new_empty(row * sum(counts))
    dist.all_to_all_single(
        buffer, torch.cat([part.reshape(-1) for part in parts]), [row * n for n in counts],
        [part.numel() for part in parts], group=exchange.shards.group,
    )  # fmt: skip
    result = x.new_empty(batch, heads, sum(counts), width)
    blocks = torch.split(buffer, [row * n for n in counts])
    for block, ranges, count in zip(blocks, expected, counts, strict=True):
        offset, rows = 0, block.view(batch, heads, count, width)
        for start, stop in ranges:
            at = local(exchange.want[rank], start)
            result[:, :, at : at + stop - start] = rows[:, :, offset : offset + stop - start]
            offset += stop - start
    return result


def _common(have: Ranges, want: Ranges) -> Ranges:
    """Return the ranges that lie in one of `have` and one of `want`, ascending."""
    both = [(max(a, c), min(b, d)) for a, b in have for c, d in want]
    return tuple(sorted(x for x in both if x[0] < x[1]))


def local(held: Ranges, position: int) -> int:
    """Return the index of a position among those of the ranges `held`."""
    before = 0
    for start, stop in held:
        if start <= position < stop:
            return before + position - start
        before += stop - start
    raise AssertionError((held, position))


def _taken(x: Tensor, held: Ranges, ranges: Ranges) -> Tensor:
    """Return the positions `ranges` of `x`, which has the positions `held`."""
    starts = [(local(held, start), stop - start) for start, stop in ranges]
    parts = [x.narrow(2, at, count) for at, count in starts]
    return torch.cat(parts, 2) if parts else x.narrow(2, 0, 0)


class Rotation:
    """Blocks that go around a ring: each member sends its own to the next one.

    group: the members.
    sizes: the elements of the blocks that start at each member.
    """

    def __init__(self, group: dist.ProcessGroup, sizes: Sequence[int], rank: int) -> None:
        self._group, self._sizes, self._rank = group, sizes, rank

    def begin(self, block: Tensor, step: int) -> tuple[Tensor, dist.Work | None]:
        """Begin to send a flat `block`, which has gone `step` times; return the tensor that will
        hold the previous member's block, and the transfer to wait for."""
        members = len(self._sizes)
        own, other = (self._sizes[(self._rank - step - n) % members] for n in (0, 1))
        received = block.new_empty(other)
        sent, expected = [0] * members, [0] * members
        sent[(self._rank + 1) % members] = own
        expected[(self._rank - 1) % members] = other
        work = dist.all_to_all_single(
            received, block, expected, sent, group=self._group, async_op=True
        )
        return received, work
