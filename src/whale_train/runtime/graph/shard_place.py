"""The device and group of a rank's rewritten graph, and the rank's extents of sharded
dimensions."""

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
class ShardContext:
    """The context in which a rewritten graph runs, on one rank.

    device: the device of this rank.
    group: the process group that the graph's casts span.
    index: the position of this rank in `group`.
    axes: for each axis, the (start, stop) of every member, in units of the axis.
    batch_norm_group: the group over which BatchNorm is synchronised. None: statistics per replica.
    loss_scale: the factor of a loss that is a mean over targets, by the name of its operation; the
        loss becomes a sum times the factor. None: the loss stays the mean over this rank's targets.
    seed: the seed of the random draws that all members of the group share; it differs between
        groups.
    share: this rank's part of the batch, where copies exchange sums over the batch.
    loads: the counter of the rows of experts.
    shares_sequence: True if the members of `group` divide the positions of every sample.
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
    shares_sequence: bool = False

    @cached_property
    def random(self) -> SharedRandom:
        """Return the random state that all members share, one for all segments of this context."""
        return SharedRandom(self.seed, self.device)

    def pieces(self, laid: Laid) -> tuple[tuple[int, ...], ...]:
        """Return every member's extent of each piece in one repetition of the sharded dimension,
        `[piece][member]`."""
        intervals = self.axes[laid.axis]
        units = intervals[-1][1]
        return tuple(
            tuple(stop * e // units - start * e // units for start, stop in intervals)
            for e in laid.pieces or (units,)
        )

    def mine(self, laid: Laid) -> tuple[int, ...]:
        """Return this rank's extent of each piece in one repetition of the sharded dimension."""
        return tuple(sizes[self.index] for sizes in self.pieces(laid))

    def along(self, laid: Laid, rows: int = 1) -> ShardGroup:
        """Return the shards of the dimension that `laid` cuts: every member's extent.

        `rows` is the number of rows per sample of a dimension that is sharded by samples.
        """
        pieces = self.pieces(laid)
        if rows > 1:
            pieces = tuple(tuple(rows * size for size in sizes) for sizes in pieces)
        sizes = tuple(sum(shard_pieces) for shard_pieces in zip(*pieces, strict=True))
        return ShardGroup(self.group, sizes, self.index, pieces if len(pieces) > 1 else ())
