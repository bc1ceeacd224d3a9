"""Scalars of a step on their way to the host, which looks at them a step later."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whale_train.runtime.base.step_types import PendingLoss


class ToHost:
    """The loss of a step and `others`, scalars that may be missing.

    From a GPU they are copied to pinned memory, in the order of its work, and an event says when
    they are there. On a CPU they are where they are read, but for the loss, which ranks may still
    be summing.
    """

    def __init__(
        self, loss: PendingLoss, others: Sequence[Tensor | None], device: torch.device
    ) -> None:
        self._loss, self._others = loss, others
        self._copied: Tensor | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            here = [x for x in (loss.on_device(), *others) if x is not None]
            wide = torch.stack([x.detach().double() for x in here])
            self._copied = torch.empty(len(here), dtype=torch.float64, pin_memory=True)
            self._copied.copy_(wide, non_blocking=True)
            self._event.record()

    def read(self) -> tuple[float, list[float | None]]:
        """Return the loss and the others, when they have come."""
        if self._copied is None:
            return self._loss.item(), [None if x is None else float(x) for x in self._others]
        self._event.synchronize()
        loss, *others = self._copied.tolist()
        left = iter(others)
        return loss, [None if x is None else next(left) for x in self._others]
