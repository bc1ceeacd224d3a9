"""Turn the requests of single ranks after a step into one request that all ranks follow a step
later.

A clock or a signal asks one rank for a checkpoint, and all ranks must save after the same step. In
every step each rank sends its request as a number, and reads the largest number of the step before:
no rank waits for a number that is still on its way.
"""

from enum import IntEnum

import torch
from torch import distributed as dist


class CheckpointRequest(IntEnum):
    """The request of a rank; the largest request of all ranks wins."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_DELINK = 2
    SAVE_AND_STOP = 3
    END = 4  # end as after the last step


class RequestConsensus:
    """The requests of all ranks, which every rank casts after every step."""

    def __init__(self) -> None:
        self._cast: tuple[torch.Tensor, dist.Work | None] | None = None

    def cast(self, wish: CheckpointRequest) -> CheckpointRequest:
        """Send this rank's request, and return the largest request of all ranks in the step
        before."""
        before = self._cast
        # The number is on the host even with GPUs, so that reading it waits for no work on a GPU.
        sent = torch.tensor([int(wish)], dtype=torch.int32)
        self._cast = (sent, dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True))
        return CheckpointRequest.NOTHING if before is None else _result(*before)

    def close(self) -> None:
        """Wait for the request that was sent last."""
        if self._cast is not None:
            _result(*self._cast)
            self._cast = None


def _result(sent: torch.Tensor, work: dist.Work | None) -> CheckpointRequest:
    """Return the largest request of all ranks, after waiting for `work`."""
    if work is not None:
        work.wait()
    return CheckpointRequest(int(sent))
