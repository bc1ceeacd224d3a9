"""What one rank does with a batch: forward, backward, and the same for evaluation.

Programs have one contract. `WholeModel` runs the model as it is on this rank's share;
`runtime/pipeline/executor.py`'s a rewritten graph of which every rank has a part.
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
    """`engines` hold all of this rank's parameters; `forward_backward` leaves their gradients, and
    writes what it does to `trace`, if there is one. `shared_random` is what it draws from beside
    the default generator. `loads` counts the rows of a step's experts, in a model that has any."""

    trace: Trace | None
    loads: ExpertLoads | None

    @property
    def shared_random(self) -> Sequence[SharedRandom]: ...

    @property
    def engines(self) -> Sequence[Engine]: ...

    def forward_backward(
        self, batches: Sequence[Batch], loss_scale: Tensor | None = None
    ) -> PendingLoss:
        """Gradients of `loss_scale`, a scalar (None: 1), times the global batch's mean loss, of
        which `batches` are this rank's micro-batches; the loss itself."""

    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        """Return the means over all held-back samples."""


class WholeModel:
    """The unmodified model, copied; each copy's loss weighted by its part of the batch.

    `sizes` are the samples of this copy's micro-batches, `weights` say what their losses count in
    the step's. With more than one, `counter` counts the targets of a step before the first. With an
    `agreement`, ranks make sure that their forwards are at the same collective.
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
        module = self._engine.module
        copies = EvaluatedCopies(
            *(self._engine, self._group, self._sizes, self._weights, self._counter),
            self._agreement,
        )
        module.eval()
        try:
            with uncompiled():  # a second compilation of all would be for few batches
                return copies.evaluate(held)
        finally:
            module.train()

    def _counted(self, batches: Sequence[Batch]) -> list[tuple[Batch, Targets | None]]:
        if self._counter is None:
            return [(batch, None) for batch in batches]
        return list(zip(batches, self._counter.count(batches), strict=True))
