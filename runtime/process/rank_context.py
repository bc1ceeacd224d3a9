"""Where a rank sits: what it must know of itself to be put together."""

from dataclasses import dataclass

import torch
from torch import distributed as dist


@dataclass(frozen=True)
class Seat:
    """This rank's number, its device, and the groups it is in, by the plan's names. `channels` are
    groups of two for the messages of a pipeline, by the rank at the other end, where these do not
    go through the group of all."""

    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    channels: dict[int, dist.ProcessGroup]
