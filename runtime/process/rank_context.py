"""Where a rank sits: what it must know of itself to be put together."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch import nn

from whale_train.runtime.engines.base import Copies, Engine
from whale_train.runtime.engines.optimizers import MakeOptimizer


class StandIns(Protocol):
    """What stands in for the parts of engines that need storage."""

    def buckets(self, module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        """Return what stands in for DistributedDataParallel."""

    def zero(
        self,
        module: nn.Module,
        copies: Copies,
        config: dict[str, Any],
        optimizer: MakeOptimizer,
        device: torch.device,
        precision: str,
    ) -> Engine:
        """Return what stands in for DeepSpeed's engine."""


@dataclass(frozen=True)
class Seat:
    """This rank's number, its device, and the groups it is in, by the plan's names. `channels` are
    groups of two for the messages of a pipeline, by the rank at the other end, where these do not
    go through the group of all. `stand_ins` are for a rank that is rehearsed."""

    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    channels: dict[int, dist.ProcessGroup]
    stand_ins: StandIns | None = None
