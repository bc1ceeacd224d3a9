"""Scaled dot-product attention in a ring: blocks of keys and values visit all members.

Each member keeps its queries. While it attends to one block of keys and values, that block travels
on to the next member (Liu et al. 2023, arXiv 2310.01889). In the backward the gradients of a block
travel with it, and arrive where the block began. Results of blocks are joined exactly
(`attention_blocks.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from whale_train.runtime.comms.layout_collectives import ShardGroup
from whale_train.runtime.comms.positions import (
    PositionExchange,
    Ranges,
    Rotation,
    contiguous,
    zigzag,
)
from whale_train.runtime.kernels.attention_blocks import attend, gradients, join


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    tokens: ShardGroup, of_keys: ShardGroup, causal: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """Return this member's rows of the attention, [batch, heads, own positions, width].

    query, key, value: this member's positions; groups of query heads may share keys.
    mask: bool, of all rows and positions, with one head or all; it has no gradient.
    tokens, of_keys: the members' positions of queries, and of keys and values.
    causal: True if a position attends to itself and those before it.
    scale: the factor of the scores (None: 1 / sqrt(width)).
    """
    divide = zigzag if causal or mask is not None else contiguous
    queries, keys = (
        PositionExchange(shards, contiguous(shards.sizes), divide(shards.sizes))
        for shards in (tokens, of_keys)
    )
    ring = _Ring(tokens, queries.want, keys.want, causal, scale)
    mixed = _Attention.apply(  # type: ignore[no-untyped-call]
        queries.there(query), keys.there(key), keys.there(value), mask, ring
    )
    return queries.reverse.there(mixed)


@dataclass(frozen=True)
class _Ring:
    """A ring of members, and the positions that each computes.

    shards: the members.
    rows: the positions of queries of each member.
    columns: the positions of keys and values that begin at each member.
    causal: True if a position attends to itself and those before it.
    scale: the factor of the scores.
    """

    shards: ShardGroup
    rows: tuple[Ranges, ...]
    columns: tuple[Ranges, ...]
    causal: bool
    scale: float | None

    @property
    def members(self) -> int:
        """Return the number of members."""
        return len(self.rows)

    def origin(self, step: int) -> int:
        """Return the member at which the block that this member has after `step` steps began."""
        return (self.shards.rank - step) % self.members

    def count(self, member: int) -> int:
        """Return the number of positions of the block that began at `member`."""
        return sum(stop - start for start, stop in self.columns[member])

    def parts(self, member: int, mask: Tensor | None) -> Iterator["_Part"]:
        """Yield the parts of this member's queries and of a block that meet: a block's positions
        before the rows, those on the diagonal, or all."""
        columns, own = self.columns[member], self.rows[self.shards.rank]
        ends = [0, *accumulate(stop - start for start, stop in own)]
        rows = [slice(first, last) for first, last in pairwise(ends)]
        if not self.causal:
            for at, interval in zip(rows, own, strict=True):
                here = None if mask is None else _part_of(mask, interval, columns)
                if here is None or here.device.type != "cpu" or bool(here.any()):
                    yield _Part(at, slice(0, self.count(member)), False, here)
        elif own == columns:  # ascending, so that the order of positions is that of the rows
            yield _Part(slice(0, ends[-1]), slice(0, ends[-1]), True, None)
        else:
            before = [sum(b - a for a, b in columns if b <= start) for start, _ in own]
            if len(set(before)) == 1:
                rows, before = [slice(0, ends[-1])], before[:1]
            for at, count in zip(rows, before, strict=True):
                if count:
                    yield _Part(at, slice(0, count), False, None)


@dataclass(frozen=True)
class _Part:
    """Rows of queries that meet positions of a block.

    rows, columns: the rows, and the positions of the block, as this member holds them.
    causal: True on the diagonal.
    mask: the mask of these rows and positions.
    """

    rows: slice
    columns: slice
    causal: bool
    mask: Tensor | None


def _part_of(mask: Tensor, rows: tuple[int, int], columns: Ranges) -> Tensor:
    """Return the part of a mask [.., rows, positions] for a range of rows and ranges of
    positions."""
    if mask.shape[-2] > 1:
        mask = mask[..., rows[0] : rows[1], :]
    if mask.shape[-1] > 1:
        mask = torch.cat([mask[..., start:stop] for start, stop in columns], -1)
    return mask


class _Attention(torch.autograd.Function):
    """Attention of a member's queries to the blocks of all members."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: _Ring
    ) -> Tensor:
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32)
        for _, origin, keys, values in _visits(key, value, ring):
            for part in ring.parts(origin, mask):
                rows, columns = part.rows, part.columns
                here = attend(
                    query[:, :, rows], keys[:, :, columns], values[:, :, columns],
                    part.causal, part.mask, ring.scale,
                )  # fmt: skip
                out[:, :, rows], lse[:, :, rows] = join(out[:, :, rows], lse[:, :, rows], *here)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        grad, of_query = grads[0], torch.zeros_like(query)
        sizes = [key[:, :, :1].numel() + value[:, :, :1].numel()] * ring.members
        sizes = [size * ring.count(member) for member, size in enumerate(sizes)]
        back = Rotation(ring.shards.group, sizes, ring.shards.rank)
        arriving: tuple[Tensor, Any] | None = None
        for step, origin, keys, values in _visits(key, value, ring):
            of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
            for part in ring.parts(origin, mask):
                rows, columns = part.rows, part.columns
                given = gradients(
                    grad[:, :, rows], query[:, :, rows], keys[:, :, columns],
                    values[:, :, columns], out[:, :, rows], lse[:, :, rows],
                    part.causal, part.mask, ring.scale,
                )  # fmt: skip
                of_query[:, :, rows] += given[0]
                of_keys[:, :, columns] += given[1]
                of_values[:, :, columns] += given[2]
            both = torch.cat([of_keys.reshape(-1), of_values.reshape(-1)])
            if arriving is not None:
                both += _arrived(arriving)
            arriving = back.begin(both, step)
        assert arriving is not None
        of_key, of_value = _apart(_arrived(arriving), key, value, key.shape[2])
        return of_query, of_key, of_value, None, None


def _visits(key: Tensor, value: Tensor, ring: _Ring) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield every block as it visits this member: the step, the member at which the block began,
    its keys and its values. A block is sent on while the caller works on it."""
    row = key[:, :, :1].numel() + value[:, :, :1].numel()
    sizes = [row * ring.count(member) for member in range(ring.members)]
    rotation = Rotation(ring.shards.group, sizes, ring.shards.rank)
    block = torch.cat([key.reshape(-1), value.reshape(-1)])
    for step in range(ring.members):
        following = rotation.begin(block, step) if step + 1 < ring.members else None
        origin = ring.origin(step)
        yield step, origin, *_apart(block, key, value, ring.count(origin))
        if following is not None:
            block = _arrived(following)


def _apart(block: Tensor, key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of a flat block of `count` positions, shaped like `key` and
    `value` otherwise."""
    shapes = [(*x.shape[:2], count, x.shape[3]) for x in (key, value)]
    first = key[:, :, :1].numel() * count
    return block[:first].view(shapes[0]), block[first:].view(shapes[1])


def _arrived(transfer: tuple[Tensor, Any]) -> Tensor:
    """Return the block of a transfer after it has arrived."""
    received, work = transfer
    if work is not None:
        work.wait()
    return received
