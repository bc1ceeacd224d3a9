"""Whom a rank shares parameters with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import distributed as dist
from torch import nn


@dataclass(frozen=True)
class Copies:
    """Whom an engine shares its parameters with, and what this rank counts of them.

    `group` joins the ranks that hold the same shards (None: this one alone), `shard_group` those
    that hold the other shards of the same copy. `sums` joins those of `group` for sums that nothing
    goes on beside (None: `group` sums). `sharded` are the parameters of which this rank has a
    shard; the others are whole on every member of the shard group. `shared` are parameters
    other TaskGraphs hold as well: the group of all their holders, by parameter; `counted_elsewhere`
    those of them that another TaskGraph counts. Of `narrow` ones an engine holds the 16-bit values
    that autocast would make of them, and, of those that are trained, DeepSpeed an fp32 master
    partition (docs/adr/007). Gradients travel within `group` in `reduce_dtype`.
    """

    group: dist.ProcessGroup | None
    shard_group: dist.ProcessGroup | None = None
    sharded: frozenset[nn.Parameter] = frozenset()
    shared: Mapping[nn.Parameter, dist.ProcessGroup] = field(default_factory=dict)
    counted_elsewhere: frozenset[nn.Parameter] = frozenset()
    sums: dist.ProcessGroup | None = None
    narrow: frozenset[nn.Parameter] = frozenset()
    reduce_dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        return self.group.size() if self.group is not None else 1

    @property
    def is_first(self) -> bool:
        return self.group is None or self.group.rank() == 0

    @property
    def shards(self) -> int:
        return self.shard_group.size() if self.shard_group is not None else 1

    @property
    def index(self) -> int:
        return self.shard_group.rank() if self.shard_group is not None else 0

    def counts(self, parameter: nn.Parameter) -> bool:
        """Return whether this shard, and not another member's copy, is counted."""
        if parameter in self.counted_elsewhere:
            return False
        return parameter in self.sharded or self.index == 0
