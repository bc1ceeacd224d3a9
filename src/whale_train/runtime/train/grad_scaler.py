"""Scale the loss of fp16 training dynamically, so that small gradients do not underflow.

The scale multiplies a step's loss, and is lowered when gradients overflow. It is training state,
one number for the whole job, and stays on the device. A step's gradients are finite if their global
norm is. The norm is the same number on every rank, so all ranks skip the same steps.
"""

import torch
from torch import Tensor

from whale_train.runtime.train.not_finite import NotFinite

START = 2.0**15
GOOD_STEPS = 2000  # before the scale doubles; as START, the value of Whale's public code, EPL
# Squares of scaled gradients are added up in fp32, whose largest number is 2^128. With scales up to
# this one, a norm of 2^32 still fits.
LARGEST = 2.0**32


class LossScale:
    """The loss scale of the next step.

    `value`, an fp32 scalar on `device`, multiplies the loss. `good_steps` is the number of
    consecutive finite steps before it. A `fixed` scale stays as it is.
    """

    def __init__(
        self,
        value: float = START,
        good_steps: int = 0,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        fixed: bool = False,
    ) -> None:
        self._fixed = fixed
        self.value = torch.full((), value, device=device)
        self._good_steps = torch.full((), float(good_steps), device=device)

    def update(self, is_finite: Tensor) -> None:
        """Update the scale after a step with finite gradients, or after a skipped step.

        `is_finite` is a bool scalar on the device. Nothing is read on the host.
        """
        if self._fixed:
            return
        good = torch.where(is_finite, self._good_steps + 1, 0.0)
        grows = good == GOOD_STEPS
        grown = torch.minimum(self.value * 2, self.value.clamp(min=LARGEST))
        next_value = torch.where(grows, grown, self.value)
        self.value = torch.where(is_finite, next_value, (self.value / 2).clamp(min=1.0))
        self._good_steps = torch.where(grows, 0.0, good)

    def state(self) -> dict[str, float | int]:
        """Return the constructor's arguments for an equal scale, for a checkpoint."""
        return {"value": self.value.item(), "good_steps": round(self._good_steps.item())}


def check_scaled(norm: float, loss_scale: float, step: int | None = None) -> None:
    """Raise NotFinite where gradients are not finite at a loss scale of 1 or less.

    `norm` is the global norm of the gradients, and `step` the step, counted from 1.
    """
    if norm - norm != 0.0 and loss_scale <= 1.0:  # infinite or NaN
        raise NotFinite(
            "the gradients are not finite in fp16, even with a loss scale of 1; "
            "use train.precision=bf16 or fp32, or a lower optimizer.lr",
            step,
        )
