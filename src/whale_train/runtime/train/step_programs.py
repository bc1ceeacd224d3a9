"""Define the work of one rank for a batch: forward and backward, and evaluation.

All programs have one contract. `WholeModel` runs the unmodified model on this rank's share of the
batch; `runtime/pipeline/executor.py` runs a rewritten graph of which every rank has a part.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.base.step_types import (
    Batch,
    Evaluation,
    EvaluationBatches,
    PendingLoss,
    scaled_ones,
)
from whale_train.runtime.base.trace import Trace, span
from whale_train.runtime.comms.forward_agreement import ForwardAgreement
from whale_train.runtime.compile.compiler import uncompiled
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.graph.expert_loads import ExpertLoads
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.loss.global_mean import GlobalMeans, TargetCounter, Targets
from whale_train.runtime.train.evaluation import EvaluatedCopies
from whale_train.strategies.plan.loss_weights import LossWeights
from whale_train.strategies.schedule.instructions import Instruction, Kind


class Program(Protocol):
    """The contract of a program.

    `engines` hold all of this rank's parameters. `forward_backward` leaves the gradients in them,
    and writes its spans to `trace`, unless `trace` is None. `shared_random` are the random states
    that the program draws from besides the default generator. `loads` counts the rows of a step's
    experts, or is None in a model without experts.
    """

    trace: Trace | None
    loads: ExpertLoads | None

    @property
    def shared_random(self) -> Sequence[SharedRandom]: ...

    @property
    def engines(self) -> Sequence[Engine]: ...

    def forward_backward(
        self, batches: Sequence[Batch], loss_scale: Tensor | None = None
    ) -> PendingLoss:
        """Compute gradients, and return the global batch's mean loss.

        The gradients are those of the mean loss times `loss_scale`, a scalar (None: 1). `batches`
        are this rank's micro-batches.
        """

    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        """Return the means over all held-back samples."""


class WholeModel:
    """The unmodified model on every copy; each copy's loss is weighted by its part of the batch.

    `sizes` are the numbers of samples of this copy's micro-batches, and `weights` gives the weights
    of their losses. With several micro-batches, `counter` counts the targets of a step before the
    first forward. With an `agreement`, ranks check that their forwards are at the same collective.
    """

    def __init__(
        self,
        engine: Engine,
        group: dist.ProcessGroup,
        sizes: Sequence[int],
        weights: LossWeights,
        counter: TargetCounter | None = None,
        loads: ExpertLoads | None = None,
        agreement: ForwardAgreement | None = None,
    ) -> None:
        self.loads = loads
        self._engine, self._group, self._agreement = engine, group, agreement
        self._sizes, self._weights = sizes, weights
        self._counter = counter
        self.shared_random: Sequence[SharedRandom] = ()
        self.trace: Trace | None = None

    @property
    def engines(self) -> Sequence[Engine]:
        return (self._engine,)

    def forward_backward(
        self, batches: Sequence[Batch], loss_scale: Tensor | None = None
    ) -> PendingLoss:
        """Run all micro-batches of a step, and return the loss, which is still being reduced."""
        engine, parts = self._engine, []
        watching: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.loads is not None:
            self.loads.begin()
            watching = self.loads.watching
        for number, (batch, targets) in enumerate(self._counted(batches)):
            last = number == len(batches) - 1
            with nullcontext() if last else engine.accumulating():
                weight = self._weights.of_step(self._sizes[number])
                means = GlobalMeans(self._group, weight, targets, agreement=self._agreement)
                with span(self.trace, Instruction(Kind.FORWARD, 0, number)), watching(), means:
                    part = engine(**batch) * weight
                with (
                    span(self.trace, Instruction(Kind.BACKWARD, 0, number)),
                    means.made_again.in_backward(),
                ):
                    engine.backward([part], [scaled_ones(part, loss_scale)])
            parts.append(part.detach().float())
        engine.finish_backward()
        value = torch.stack(parts).sum() if len(parts) > 1 else parts[0]
        if self._group.size() == 1:
            return PendingLoss(value, None)
        return PendingLoss(value, dist.all_reduce(value, group=self._group, async_op=True))

    @torch.no_grad()
    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        """Return the means over `held`, in evaluation mode and without torch.compile."""
        module = self._engine.module
        copies = EvaluatedCopies(
            *(self._engine, self._group, self._sizes, self._weights, self._counter),
            self._agreement,
        )
        module.eval()
        try:
            with uncompiled():  # few batches are not worth a second compilation
                return copies.evaluate(held)
        finally:
            module.train()

    def _counted(self, batches: Sequence[Batch]) -> list[tuple[Batch, Targets | None]]:
        """Return the micro-batches, each with the divisors of its losses if they are counted in
        advance."""
        if self._counter is None:
            return [(batch, None) for batch in batches]
        return list(zip(batches, self._counter.count(batches), strict=True))
