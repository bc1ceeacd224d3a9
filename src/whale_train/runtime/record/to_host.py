"""Copy a step's scalars to the host, which reads them one step later."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whale_train.runtime.base.step_types import PendingLoss


class ToHost:
    """A copy of the loss of a step, and of the scalars `others`, each of which may be None.

    On a GPU they are copied to pinned memory, in stream order, and an event marks the end of the
    copy. On a CPU they are read in place; only the loss may have to be waited for, while ranks sum
    it.
    """

    def __init__(
        self, loss: PendingLoss, others: Sequence[Tensor | None], device: torch.device
    ) -> None:
        self._loss, self._others = loss, others
        self._copied: Tensor | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            scalars = [x for x in (loss.on_device(), *others) if x is not None]
            wide = torch.stack([x.detach().double() for x in scalars])
            self._copied = torch.empty(len(scalars), dtype=torch.float64, pin_memory=True)
            self._copied.copy_(wide, non_blocking=True)
            self._event.record()

    def read(self) -> tuple[float, list[float | None]]:
        """Return the loss and the others as numbers, after waiting for them."""
        if self._copied is None:
            return self._loss.item(), [None if x is None else float(x) for x in self._others]
        self._event.synchronize()
        loss, *others = self._copied.tolist()
        remaining = iter(others)
        return loss, [None if x is None else next(remaining) for x in self._others]
