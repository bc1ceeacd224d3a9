"""Evaluate: compute the means over all held-back samples, in batches.

An evaluation batch has the size of a training batch, for which ranks have their shares and graphs.
A smaller last batch is filled with samples that were seen before, and their part is subtracted
again: batches have weights such that each weighted sum counts every sample once (`data/order.py`).
A mean over samples is such a sum divided by the number of samples. A mean over targets is divided
by the number of targets in all batches, which are counted first.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.base.answers import Int64s
from whale_train.runtime.base.step_types import Batch, Evaluation, EvaluationBatches
from whale_train.runtime.comms.forward_agreement import ForwardAgreement
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.loss.global_mean import GlobalMeans, TargetCounter, Targets
from whale_train.strategies.plan.loss_weights import LossWeights


class EvaluatedCopies:
    """The unmodified model on every rank of `group`; each rank evaluates its part of every batch.

    `sizes` are the numbers of samples of this rank's micro-batches, and `weights` gives the weights
    of their losses. If a rank has several micro-batches, `counter` counts the targets. `agreement`
    is that of GlobalMeans. `rows` are the number of rows of the sums, and the row of each
    micro-batch: the rows are summed one after another, on every rank (None: one row). `begin` is
    called with the row of each micro-batch, before its forward.
    """

    def __init__(
        self,
        engine: Engine,
        group: dist.ProcessGroup,
        sizes: Sequence[int],
        weights: LossWeights,
        counter: TargetCounter | None,
        agreement: ForwardAgreement | None = None,
        rows: tuple[int, Sequence[int]] | None = None,
        begin: Callable[[int], None] | None = None,
    ) -> None:
        self._agreement, self._begin = agreement, begin
        self._num_rows, self._rows = rows or (1, [0] * len(sizes))
        self._engine, self._group, self._sizes = engine, group, sizes
        self._weights, self._counter = weights, counter

    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        """Return the means over `held`. All members of the group must call it."""
        counter = self._counter
        if counter is None:
            return self._uncounted(held)
        return self._counted(held, counter.whole(held), lambda _, batch: counter.mine(batch))

    def _counted(
        self, held: EvaluationBatches, num_targets: Tensor, targets: Callable[[int, Batch], Tensor]
    ) -> Evaluation:
        """Return the means over `held`, whose losses have `num_targets` targets over all ranks and
        batches, fp64 [losses].

        `targets` returns the targets of a micro-batch, given the number of its batch and the
        micro-batch.
        """
        if held.answers is not None:
            held.answers.clear()  # drop the answers of uncounted forwards
        shape = self._num_rows, 3
        sums = torch.zeros(shape, dtype=torch.float64, device=num_targets.device)
        for number, evaluated in enumerate(held):
            parts = zip(self._sizes, evaluated.micro_batches, evaluated.own, strict=True)
            for row, (size, batch, samples) in zip(self._rows, parts, strict=True):
                share = self._weights.of_evaluation(size, held.samples)
                if self._begin is not None:
                    self._begin(row)
                with self._means(
                    held, share, Targets(targets(number, batch), num_targets)
                ) as means:
                    loss = self._engine(**batch)
                sums[row] += evaluated.weight * _row(loss * share, means)
                _keep(held, evaluated.weight, samples, means)
        dist.all_reduce(sums, group=self._group)
        return Evaluation(*sums.sum(0).tolist())

    def _uncounted(self, held: EvaluationBatches) -> Evaluation:
        """Return the means over `held`, whose targets cannot be counted before the forwards run.

        The forwards run with each batch's own means, which give the number of targets of every
        batch. That is enough where all batches have equally many targets, or where the loss is one
        mean over targets and nothing else. Otherwise the forwards run again, with the counted
        targets. Raises RuntimeError where the model calls more losses in some batches than in
        others.
        """
        (size,), batch = self._sizes, self._weights.global_batch
        share = self._weights.of_evaluation(size, batch)
        weights, batch_rows, counted = [], [], []
        alone = True
        for evaluated in held:
            (inputs,), (samples,) = evaluated.micro_batches, evaluated.own
            with self._means(held, share) as means:
                loss = self._engine(**inputs)
            row = _row(loss * share, means)
            _keep(held, evaluated.weight, samples, means)
            divisors = [x.to(row) for x in means.divisors]
            alone = alone and len(means.made) == 1 and torch.equal(means.made[0], loss)
            weights.append(evaluated.weight)
            counted.append(torch.stack(divisors) if divisors else row[:0])
            batch_rows.append(torch.cat([row, counted[-1]]))
        if len({len(row) for row in batch_rows}) > 1:
            raise RuntimeError("the model calls more losses in some evaluated batches than others")
        rows = torch.stack(batch_rows)
        has_others = torch.tensor(float(not alone), dtype=rows.dtype, device=rows.device)
        dist.all_reduce(rows, group=self._group)
        dist.all_reduce(has_others, group=self._group)
        weight_of = torch.tensor(weights, dtype=rows.dtype, device=rows.device)
        losses, divisors_of = rows[:, 0], rows[:, 3:]
        num_targets = weight_of @ divisors_of
        _, correct, targets = (weight_of @ rows[:, :3]).tolist()
        if torch.equal(divisors_of, divisors_of[:1].expand_as(divisors_of)):
            return Evaluation(float(weight_of @ losses) * batch / held.samples, correct, targets)
        if not has_others:
            total = torch.where(divisors_of[:, 0] > 0, losses * divisors_of[:, 0], 0.0)
            return Evaluation(float(weight_of @ total / num_targets[0]), correct, targets)
        return self._counted(held, num_targets, lambda number, _: counted[number])

    def _means(
        self, held: EvaluationBatches, weight: float, targets: Targets | None = None
    ) -> GlobalMeans:
        predicts = held.answers is not None and held.answers.predicts
        return GlobalMeans(
            *(self._group, weight, targets),
            accuracy=True,
            predicts=predicts,
            agreement=self._agreement,
        )


def _keep(held: EvaluationBatches, weight: float, samples: Int64s, means: GlobalMeans) -> None:
    """Add the answers for `samples` of a batch of weight `weight` to the keeper, if there is
    one."""
    if held.answers is not None:
        for call, answers in enumerate(means.answers):
            held.answers.add(weight, samples, call, answers)


def _row(loss: Tensor, means: GlobalMeans) -> Tensor:
    """Return [loss, right answers, targets] in fp64, on the loss's device."""
    seen = (loss, means.correct, means.targets)
    return torch.stack([torch.as_tensor(x, device=loss.device).double() for x in seen])
