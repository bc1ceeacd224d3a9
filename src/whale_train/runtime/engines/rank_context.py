"""The context in which a rank's program is built: its number, its device and its groups."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.compile.compiler import Compiler
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.uneven.flat_unit import FlatUnit


@dataclass(frozen=True)
class StandIns:
    """Substitutes for the parts of engines that need storage, for a rehearsed rank.

    buckets: makes the substitute for DistributedDataParallel, given a module and its copies.
    zero: makes the substitute for DeepSpeedEngine, given its arguments with an optimizer after the
        configuration.
    gathers: called with a unit of an UnevenEngine under ZeRO 3 when it is made, gathered (True) or
        freed (False).
    streamed: makes the substitute for StreamedEngine, given the same arguments.
    forget: called with tensors that stand for tensors of the host.
    """

    buckets: Callable[[nn.Module, Copies], nn.Module]
    zero: Callable[..., Engine]
    gathers: Callable[[FlatUnit, bool], None]
    streamed: Callable[..., Engine]
    forget: Callable[[Tensor], None]


@dataclass(frozen=True)
class RankContext:
    """The place of this rank in the job.

    rank: the rank.
    device: the device that the rank computes on.
    groups: the groups that the rank is a member of, by the plan's names.
    channels: groups of two for a pipeline's messages, by the rank at the other end. Messages with
        other ranks go through the world.
    stand_ins: given where the rank is rehearsed.
    compiler: given where the model is compiled.
    """

    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]
    channels: dict[int, dist.ProcessGroup]
    stand_ins: StandIns | None = None
    compiler: Compiler | None = None
