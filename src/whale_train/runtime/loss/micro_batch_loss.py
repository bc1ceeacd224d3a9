"""Compute the loss of a step whose micro-batches are spread over several ranks."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.base.step_types import Batch, Evaluation, PendingLoss
from whale_train.runtime.loss.global_mean import TargetCounter
from whale_train.strategies.plan.loss_weights import LossWeights


class MicroBatchLoss:
    """The loss of the global batch, of which every rank of a last stage has pieces.

    A piece is the loss of one micro-batch. If the loss is a mean, the weight of a micro-batch of n
    samples is n / N, where N is the number of samples in the global batch (`weights`). A
    cross-entropy is a mean over targets, of which micro-batches hold different numbers. It becomes
    a sum, scaled so that the weighted pieces add up to the mean over all targets. The targets are
    counted before the first forward (`counter`; None if one piece is the whole loss). An evaluation
    is treated as one step of all its batches: N is the number of held-back samples.

    `samples` gives the (start, stop) of each micro-batch in the global batch.
    """

    def __init__(
        self,
        samples: Sequence[tuple[int, int]],
        weights: LossWeights,
        counter: TargetCounter | None,
        device: torch.device,
    ) -> None:
        self._samples, self._weights = samples, weights
        self._held: int | None = None  # the number of samples, in an evaluation
        self._counter, self._device = counter, device
        self._pending: tuple[Tensor, dist.Work | None] | None = None
        self._now = 0
        losses = counter.losses if counter is not None else ()
        self._numbers = {name: i for i, name in enumerate(losses)}

    def begin(self, batches: Iterable[Batch]) -> None:
        """Count the targets of a step, of which this rank counts those in `batches`."""
        self._held = None
        self._count((1.0, batch) for batch in batches)

    def begin_evaluation(self, batches: Iterable[tuple[float, Batch]], samples: int) -> None:
        """Count the targets of an evaluation of `samples` samples.

        `batches` are the weighted batches whose loss is counted on this rank.
        """
        self._held = samples
        self._count(batches)

    def _count(self, batches: Iterable[tuple[float, Batch]]) -> None:
        """Start the all-reduce of the weighted targets of `batches`. A collective of the world."""
        if self._counter is None or not self._numbers:
            return
        total = torch.zeros(len(self._numbers), dtype=torch.float64, device=self._device)
        for weight, batch in batches:
            total += weight * self._counter.mine(batch)
        self._pending = (total, dist.all_reduce(total, async_op=True))

    def enter(self, micro_batch: int) -> None:
        """Set the micro-batch of the piece that runs next."""
        self._now = micro_batch

    def interval(self, micro_batch: int) -> slice:
        """Return the interval of this rank's piece of a micro-batch in the global batch's
        samples."""
        return slice(*self._samples[micro_batch])

    def weight(self, micro_batch: int) -> float:
        """Return the weight of a micro-batch's loss in the step, or in the evaluation."""
        start, stop = self._samples[micro_batch]
        if self._held is not None:
            return self._weights.of_evaluation(stop - start, self._held)
        return self._weights.of_step(stop - start)

    def scale(self, name: str) -> Tensor:
        """Return the factor for the sum of the cross-entropy `name` over the current micro-batch.

        The factor, times `weight`, makes the sum this micro-batch's term of a mean over all
        targets.
        """
        assert self._pending is not None
        total, work = self._pending
        if work is not None:
            work.wait()
            self._pending = (total, None)
        return 1.0 / (total[self._numbers[name]] * self.weight(self._now))

    def total(self, losses: Mapping[int, Tensor]) -> PendingLoss:
        """Return the loss of the global batch, on every rank. A collective of the world.

        `losses` are this rank's pieces, by micro-batch; it is empty on a rank whose pieces do not
        count.
        """
        value = torch.zeros((), device=self._device)
        for m, loss in losses.items():
            value += loss.float() * self.weight(m)
        return PendingLoss(value, dist.all_reduce(value, async_op=True))

    def evaluation(self, sums: Tensor) -> Evaluation:
        """Return the means of an evaluation, on every rank. A collective of the world.

        `sums` are the loss, right answers and targets of this rank's pieces, fp64 [3].
        """
        sums = sums.to(self._device)
        dist.all_reduce(sums)
        return Evaluation(*sums.tolist())
