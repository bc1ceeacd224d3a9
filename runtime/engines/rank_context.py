"""Where a rank sits: what it must know of itself to be put together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.compile.compiler import Compiler
from whale_train.runtime.engines.base import Engine


@dataclass(frozen=True)
class StandIns:
    """Make what stands in for the parts of engines that need storage: `buckets`, of a module and
    its copies, for DistributedDataParallel, `zero`, of DeepSpeedEngine's arguments with an
    optimizer after the config, for that, and `streamed`, of StreamedEngine's, for that. `forget` is
    told of tensors that stand for the host's."""

    buckets: Callable[[nn.Module, Copies], nn.Module]
    zero: Callable[..., Engine]
    streamed: Callable[..., Engine]
    forget: Callable[[Tensor], None]


@dataclass(frozen=True)
class Seat:
    """This rank's number, its device, and the groups it is in, by the plan's names. `channels` are
    groups of two for the messages of a pipeline, by the rank at the other end, where these do not
    go through the group of all. `stand_ins` are for a rank that is rehearsed; `compiler` is given
    where the model is compiled."""

    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    channels: dict[int, dist.ProcessGroup]
    stand_ins: StandIns | None = None
    compiler: Compiler | None = None
