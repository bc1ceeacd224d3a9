"""Scale the loss of fp16 training dynamically, so that gradients keep their small values.

The scale multiplies a step's loss, and follows overflows of the gradients. It is training state,
one number for the whole job, and stays on the device. Whether a step's gradients are finite is read
off their global norm, which is the same number on every rank: all ranks skip the same steps.
"""

import torch
from torch import Tensor

from whale_train.runtime.train.not_finite import NotFinite

START = 2.0**15
GOOD_STEPS = 2000  # before it doubles; START and GOOD_STEPS are those of Whale's public code, EPL
# Squares of scaled gradients are added up in fp32, whose largest number is 2^128: up to here a
# norm of 2^32 still fits.
LARGEST = 2.0**32


class LossScale:
    """Loss scale of the next step.

    `value`, an fp32 scalar on `device`, multiplies the loss. `good_steps` is the number of finite
    steps in a row before it.
    """

    def __init__(
        self,
        value: float = START,
        good_steps: int = 0,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.value = torch.full((), value, device=device)
        self._good_steps = torch.full((), float(good_steps), device=device)

    def update(self, is_finite: Tensor) -> None:
        """Follow a step whose gradients were finite, or one that was skipped because they were not.

        `is_finite` is a bool scalar on the device. Nothing is read on the host.
        """
        good = torch.where(is_finite, self._good_steps + 1, 0.0)
        grows = good == GOOD_STEPS
        grown = torch.minimum(self.value * 2, self.value.clamp(min=LARGEST))
        kept = torch.where(grows, grown, self.value)
        self.value = torch.where(is_finite, kept, (self.value / 2).clamp(min=1.0))
        self._good_steps = torch.where(grows, 0.0, good)

    def state(self) -> dict[str, float | int]:
        """Return the arguments of an equal scale, for a checkpoint."""
        return {"value": self.value.item(), "good_steps": round(self._good_steps.item())}


def check_scaled(norm: float, loss_scale: float, step: int | None = None) -> None:
    """Raise NotFinite where gradients are not finite at a loss scale of 1 or less.

    `norm` is the gradients' global norm, and `step` the step, counted from 1.
    """
    if norm - norm != 0.0 and loss_scale <= 1.0:  # infinite, or no number
        raise NotFinite(
            "the gradients are not finite in fp16, even with a loss scale of 1; "
            "use train.precision=bf16 or fp32, or a lower optimizer.lr",
            step,
        )
