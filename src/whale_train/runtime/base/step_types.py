"""Inputs and outputs of a step, for every kind of program: batches, the loss, an evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.base.answers import AnswerKeeper, Int64s

# The samples of a micro-batch, by field: [samples, ...] each.
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class PendingLoss:
    """The loss of a step, which a collective may still be computing.

    value: the mean over the global batch, as a scalar.
    work: the collective that computes `value`; None if it is computed.
    """

    value: Tensor
    work: dist.Work | None

    def on_device(self) -> Tensor:
        """Return the loss as a scalar tensor. On a GPU the host does not wait for its value."""
        if self.work is not None:
            self.work.wait()
        return self.value

    def item(self) -> float:
        """Return the loss as a number; the host waits for it."""
        return float(self.on_device())


def scaled_ones(loss: Tensor, scale: Tensor | None, weight: float = 1.0) -> Tensor:
    """Return the gradient that the backward of a loss begins with, of the shape and dtype of
    `loss`.

    scale: the factor of all losses (fp16's loss scale); None: 1.
    weight: the weight of this loss in the loss of the step.
    """
    seed = torch.full_like(loss, weight)
    return seed if scale is None else (seed * scale).to(loss.dtype)


@dataclass(frozen=True)
class EvaluationBatch:
    """A batch of samples to evaluate.

    weight: the factor of the batch in sums over samples (`data/order.py`).
    micro_batches: this rank's micro-batches.
    samples: numbers of all ranks' samples in their set, int64 `[global batch]`.
    own: the sample numbers of each of this rank's micro-batches, int64 `[micro-batch]` each.
    """

    weight: float
    micro_batches: Sequence[Batch]
    samples: Int64s
    own: Sequence[Int64s]


class EvaluationBatches(Protocol):
    """The held-out samples, in batches."""

    @property
    def samples(self) -> int:
        """Return the number of samples over all ranks, each counted once."""

    @property
    def answers(self) -> AnswerKeeper | None:
        """Return the object to which this rank adds its answers, or None where answers are not
        stored."""

    def __iter__(self) -> Iterator[EvaluationBatch]: ...


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation over all held-out samples.

    loss: the mean loss.
    correct: the number of right predictions.
    targets: the number of targets.
    """

    loss: float
    correct: float
    targets: float
