"""The ranks that one rank shares parameters with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.futures import Future

from whale_train.strategies.plan.training import BUCKET_ELEMENTS


class LevelledSum(Protocol):
    """The sum of flat tensors over copies on several hosts, inside each host first."""

    def begin(self, tensor: Tensor) -> Future[Tensor]:
        """Begin to sum `tensor` in place, in the order of the calls, and return the future of
        it."""


@dataclass(frozen=True)
class Copies:
    """The groups with which an engine shares its parameters, and the shards that this rank counts.

    group: the ranks that hold the same shards, data-parallel copies of each other. None: only this
        rank.
    shard_group: the ranks that hold the other shards of the same copy. None: the copy is not split.
    sharded: the parameters of which this rank has a shard. All others are whole on every member of
        the shard group.
    shared: parameters that other TaskGraphs hold as well, each with the group of all its holders.
    counted_elsewhere: the parameters of `shared` that another TaskGraph counts in the gradient
        norm.
    sums: a group of the same ranks as `group`, for gradient sums that nothing overlaps with. None:
        `group` sums them.
    levels: sums gradients of the copies inside hosts first; None: all copies sum at once.
    narrow: parameters that an engine holds as the 16-bit values that autocast would make of them.
        DeepSpeed holds an fp32 master partition of the trained ones (docs/adr/007).
    reduce_dtype: the dtype in which gradients are sent within `group`.
    bucket_elements: the number of gradients that are sent together.
    """

    group: dist.ProcessGroup | None
    shard_group: dist.ProcessGroup | None = None
    sharded: frozenset[nn.Parameter] = frozenset()
    shared: Mapping[nn.Parameter, dist.ProcessGroup] = field(default_factory=dict)
    counted_elsewhere: frozenset[nn.Parameter] = frozenset()
    sums: dist.ProcessGroup | None = None
    levels: LevelledSum | None = None
    narrow: frozenset[nn.Parameter] = frozenset()
    reduce_dtype: torch.dtype = torch.float32
    bucket_elements: int = BUCKET_ELEMENTS

    @property
    def size(self) -> int:
        """Return the number of copies, this rank's own among them."""
        return self.group.size() if self.group is not None else 1

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first of its copies."""
        return self.group is None or self.group.rank() == 0

    @property
    def shards(self) -> int:
        """Return the number of members of the shard group."""
        return self.shard_group.size() if self.shard_group is not None else 1

    @property
    def index(self) -> int:
        """Return this rank's place in the shard group."""
        return self.shard_group.rank() if self.shard_group is not None else 0

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank counts its part of `parameter` for the shard group.

        A shard is counted by its holder, and a whole parameter by the group's first member. Neither
        counts a parameter of `counted_elsewhere`.
        """
        if parameter in self.counted_elsewhere:
            return False
        return parameter in self.sharded or self.index == 0
