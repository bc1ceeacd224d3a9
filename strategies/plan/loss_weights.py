"""What the losses of a batch's parts count in the loss of the batch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses of parts of a global batch: their mean `over` samples, or their sum."""

    over: Literal["mean", "sum"]
    global_batch: int

    def of_step(self, samples: int) -> float:
        """Return the weight of the loss of so many of a step's samples in the step's loss."""
        return samples / self.global_batch if self.over == "mean" else 1.0

    def of_evaluation(self, samples: int, held: int) -> float:
        """Return the weight of the loss of so many samples in the mean over all that are `held`
        back; of a sum over samples too, a mean is what can be compared between evaluations."""
        return (samples if self.over == "mean" else 1) / held
