"""Where a rank sits: what it must know of itself to be put together."""

from dataclasses import dataclass

import torch
from torch import distributed as dist


@dataclass(frozen=True)
class Seat:
    """This rank's number, its device, and the groups it is in, by the plan's names."""

    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
