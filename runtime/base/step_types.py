"""What a step is given and gives back, whoever runs it: batches, the loss, an evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

# The samples of a micro-batch, by field: [samples, ...] each.
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class PendingLoss:
    """The step's loss, the mean over the global batch, perhaps still on its way."""

    value: Tensor
    work: dist.Work | None

    def on_device(self) -> Tensor:
        """Return the loss as a scalar for work that follows: on a GPU nothing waits for it here."""
        if self.work is not None:
            self.work.wait()
        return self.value

    def item(self) -> float:
        return float(self.on_device())


def scaled_ones(loss: Tensor, scale: Tensor | None, weight: float = 1.0) -> Tensor:
    """Return the gradient that the backward of a loss of `weight` begins with, where all losses are
    multiplied by `scale`."""
    seed = torch.full_like(loss, weight)
    return seed if scale is None else (seed * scale).to(loss.dtype)


class EvaluationBatches(Protocol):
    """The held-back samples. Iterating over them gives, every time, each batch's weight with this
    rank's micro-batches of it."""

    @property
    def samples(self) -> int:
        """How many there are, over all ranks and each once."""

    def __iter__(self) -> Iterator[tuple[float, Sequence[Batch]]]: ...


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over all held-back samples, right answers, targets."""

    loss: float
    correct: float
    targets: float
