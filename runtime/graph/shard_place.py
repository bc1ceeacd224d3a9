"""Where a rank's rewritten graph runs, and how much of what is cut it has there."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import distributed as dist

from whale_train.runtime.comms.batch_sums import BatchShare
from whale_train.runtime.comms.layout_collectives import ShardGroup
from whale_train.runtime.graph.expert_loads import ExpertLoads
from whale_train.runtime.graph.shard_ops import Laid
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.loss.graph_losses import LossWeight


@dataclass(frozen=True)
class ShardPlace:
    """Where a rewritten graph runs: its device, the group its casts span, my index in it and
    every axis' intervals, in units; `batch_norm_group` synchronises BatchNorm (None: per replica).

    `loss_scale` gives, by the name of its operation, what a loss that is a mean over targets is
    multiplied by as a sum; without it, it stays the mean over the targets at hand. `seed`, the
    same on all members of the group and on no others, is for what they draw alike. `share` is my
    part of the batch, where copies exchange sums over it. `loads` counts the rows of experts.
    """

    device: torch.device
    group: dist.ProcessGroup
    index: int
    axes: Mapping[str, tuple[tuple[int, int], ...]]
    batch_norm_group: dist.ProcessGroup | None
    loss_scale: LossWeight | None = None
    seed: int = 0
    share: BatchShare | None = None
    loads: ExpertLoads | None = None

    @cached_property
    def random(self) -> SharedRandom:
        """The state of what all members draw alike; one for all segments at this place."""
        return SharedRandom(self.seed, self.device)

    def pieces(self, laid: Laid) -> tuple[tuple[int, ...], ...]:
        """Return every piece's extents by member, of one repetition of a cut dimension."""
        intervals = self.axes[laid.axis]
        units = intervals[-1][1]
        return tuple(
            tuple(stop * e // units - start * e // units for start, stop in intervals)
            for e in laid.pieces or (units,)
        )

    def mine(self, laid: Laid) -> tuple[int, ...]:
        """Return my part of each piece."""
        return tuple(sizes[self.index] for sizes in self.pieces(laid))

    def along(self, laid: Laid, rows: int = 1) -> ShardGroup:
        """Return who holds how much of a dimension that is cut so; of one that is cut by samples,
        so many `rows` for each."""
        pieces = self.pieces(laid)
        if rows > 1:
            pieces = tuple(tuple(rows * size for size in sizes) for sizes in pieces)
        sizes = tuple(sum(each) for each in zip(*pieces, strict=True))
        return ShardGroup(self.group, sizes, self.index, pieces if len(pieces) > 1 else ())
