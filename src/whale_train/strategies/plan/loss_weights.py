"""Weight the losses of a batch's parts in the loss of the batch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses of parts of a global batch.

    over: the reduction of the loss over its samples, `mean` or `sum`.
    global_batch: samples of a step.
    """

    over: Literal["mean", "sum"]
    global_batch: int

    def of_step(self, samples: int) -> float:
        """Return the weight of the loss of `samples` samples in the loss of their step."""
        return samples / self.global_batch if self.over == "mean" else 1.0

    def of_evaluation(self, samples: int, held: int) -> float:
        """Return the weight of the loss of `samples` samples in the mean of an evaluation.

        The mean is over all `held` held-out samples. A loss that is a sum over samples is divided
        by `held` as well: only a mean can be compared between evaluations.
        """
        return (samples if self.over == "mean" else 1) / held
