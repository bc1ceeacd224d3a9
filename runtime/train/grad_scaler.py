"""The dynamic loss scale of fp16: what a step's loss is multiplied by, so that gradients keep
their small values, and how that follows what overflows.

The scale is training state, one for the whole job. Whether a step's gradients are finite is read
off their global norm, which is the same number on every rank: all ranks skip the same steps.
"""

from dataclasses import dataclass

START = 2.0**15
GOOD_STEPS = 2000  # until it is doubled; START and this are those of Whale's public code, EPL
# Squares of scaled gradients are added up in fp32, whose largest number is 2^128: up to here a
# norm of 2^32 still fits.
LARGEST = 2.0**32


@dataclass
class LossScale:
    """`value` multiplies the loss of the next step, after `good_steps` finite ones in a row."""

    value: float = START
    good_steps: int = 0

    def update(self, is_finite: bool) -> None:
        """After a step whose gradients were finite, or one that was skipped as they were not.

        Raises FloatingPointError for gradients that are not finite without any scale.
        """
        if not is_finite:
            if self.value <= 1.0:
                raise FloatingPointError(
                    "the gradients are not finite in fp16, even with a loss scale of 1; "
                    "use train.precision=bf16 or fp32, or a lower optimizer.lr"
                )
            self.value, self.good_steps = max(self.value / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS:
            self.value, self.good_steps = min(self.value * 2, max(LARGEST, self.value)), 0
