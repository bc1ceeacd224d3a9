"""Turn what some rank wants after a step into what all ranks do after the next.

A clock or a signal asks one rank for a checkpoint, and all ranks must save after the same step.
Every step each rank sends a number, and reads the largest of the step before: no rank waits for a
number that is still on its way.
"""

from enum import IntEnum

import torch
from torch import distributed as dist


class CheckpointRequest(IntEnum):
    """Request of a rank; the largest of all ranks' wins."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_DELINK = 2
    SAVE_AND_STOP = 3
    END = 4  # as after the last step


class RequestConsensus:
    """Requests of all ranks, cast by all of them after every step."""

    def __init__(self) -> None:
        self._cast: tuple[torch.Tensor, dist.Work | None] | None = None

    def cast(self, wish: CheckpointRequest) -> CheckpointRequest:
        """Send this rank's wish, and return the largest wish of all ranks in the step before."""
        before = self._cast
        # On the host, also beside GPUs: reading it waits for no work of theirs.
        sent = torch.tensor([int(wish)], dtype=torch.int32)
        self._cast = (sent, dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True))
        return CheckpointRequest.NOTHING if before is None else _result(*before)

    def close(self) -> None:
        """Wait for the wish that was sent last."""
        if self._cast is not None:
            _result(*self._cast)
            self._cast = None


def _result(sent: torch.Tensor, work: dist.Work | None) -> CheckpointRequest:
    """Return the largest wish of all ranks, after waiting for `work`."""
    if work is not None:
        work.wait()
    return CheckpointRequest(int(sent))
