"""What one rank does with a batch: forward, backward, and the same for evaluation.

Programs have one contract. `WholeModel` runs the model as it is on this rank's share; `CutModel`
a rewritten graph, all of it on every rank; `runtime/pipeline.py`'s a rewritten graph of which
every rank has a part.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.chunk import Batch, Chunk
from whale_train.runtime.engine import Engine
from whale_train.runtime.evaluation import EvaluatedCopies, Evaluation, HeldBack
from whale_train.runtime.loss_means import GlobalMeans, Pieces, TargetCounter, Targets
from whale_train.runtime.rewrite import Counts
from whale_train.runtime.trace import Trace, span
from whale_train.strategies.instructions import Instruction, Kind
from whale_train.strategies.loss_weights import LossWeights


@dataclass(frozen=True)
class PendingLoss:
    """The step's loss, the mean over the global batch, perhaps still on its way."""

    value: Tensor
    work: dist.Work | None

    def item(self) -> float:
        if self.work is not None:
            self.work.wait()
        return float(self.value)


class Program(Protocol):
    """`engines` hold all of this rank's parameters; `forward_backward` leaves their gradients, and
    writes what it does to `trace`, if there is one."""

    trace: Trace | None

    @property
    def engines(self) -> Sequence[Engine]: ...

    def forward_backward(self, batches: Sequence[Batch], loss_scale: float = 1.0) -> PendingLoss:
        """Gradients of `loss_scale` times the global batch's mean loss, of which `batches` are
        this rank's micro-batches; the loss itself."""

    def evaluate(self, held: HeldBack) -> Evaluation:
        """The means over all held-back samples."""


class WholeModel:
    """The unmodified model, copied; each copy's loss weighted by its part of the batch.

    `sizes` are the samples of this copy's micro-batches, `weights` say what their losses count in
    the step's. With more than one, `counter` counts the
    targets of a step before the first.
    """

    def __init__(
        self,
        engine: Engine,
        group: dist.ProcessGroup,
        sizes: Sequence[int],
        weights: LossWeights,
        counter: TargetCounter | None = None,
    ) -> None:
        self._engine, self._group = engine, group
        self._sizes, self._weights = sizes, weights
        self._counter = counter
        self.trace: Trace | None = None

    @property
    def engines(self) -> Sequence[Engine]:
        return (self._engine,)

    def forward_backward(self, batches: Sequence[Batch], loss_scale: float = 1.0) -> PendingLoss:
        engine, parts = self._engine, []
        for number, (batch, targets) in enumerate(self._counted(batches)):
            last = number == len(batches) - 1
            with nullcontext() if last else engine.accumulating():
                weight = self._weights.of_step(self._sizes[number])
                means = GlobalMeans(self._group, weight, targets)
                with span(self.trace, Instruction(Kind.FORWARD, 0, number)), means:
                    part = engine(**batch) * weight
                with (
                    span(self.trace, Instruction(Kind.BACKWARD, 0, number)),
                    means.made_again.in_backward(),
                ):
                    engine.backward([part], [torch.full_like(part, loss_scale)])
            parts.append(part.detach().float())
        engine.finish_backward()
        value = torch.stack(parts).sum() if len(parts) > 1 else parts[0]
        if self._group.size() == 1:
            return PendingLoss(value, None)
        return PendingLoss(value, dist.all_reduce(value, group=self._group, async_op=True))

    @torch.no_grad()
    def evaluate(self, held: HeldBack) -> Evaluation:
        module = self._engine.module
        copies = EvaluatedCopies(
            self._engine, self._group, self._sizes, self._weights, self._counter
        )
        module.eval()
        try:
            return copies.evaluate(held)
        finally:
            module.train()

    def _counted(self, batches: Sequence[Batch]) -> list[tuple[Batch, Targets | None]]:
        if self._counter is None:
            return [(batch, None) for batch in batches]
        return list(zip(batches, self._counter.count(batches), strict=True))


class CutModel:
    """A rewritten graph, all of it on every rank; the loss is its last value.

    `chunks` run the micro-batches of a step, one each: they share engines and parameters, and
    differ in how many samples each rank gives. With more than one, `pieces` weights their losses.
    `held` weights those of an evaluation (None: there is none).
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        counts: Counts,
        pieces: Pieces | None = None,
        held: Pieces | None = None,
    ) -> None:
        self._chunks, self._counts, self._pieces = chunks, counts, pieces
        self._held = held
        self.trace: Trace | None = None

    @property
    def engines(self) -> Sequence[Engine]:
        return self._chunks[0].engines

    def forward_backward(self, batches: Sequence[Batch], loss_scale: float = 1.0) -> PendingLoss:
        total = None
        for number, (chunk, batch, weight) in enumerate(self._weighted(batches)):
            with ExitStack() as stack:
                if number < len(batches) - 1:
                    for engine in self.engines:
                        stack.enter_context(engine.accumulating())
                with span(self.trace, Instruction(Kind.FORWARD, 0, number)):
                    passed = chunk.forward({}, batch)
                (loss,) = (passed.made[name] for name in chunk.gives)
                seed = torch.full_like(loss, weight * loss_scale)
                with span(self.trace, Instruction(Kind.BACKWARD, 0, number)):
                    chunk.backward(passed, {chunk.gives[0]: seed})
            value = loss.detach().float() * weight
            total = value if total is None else total + value
        for engine in self.engines:
            engine.finish_backward()
        assert total is not None
        return PendingLoss(total, None)

    @torch.no_grad()
    def evaluate(self, held: HeldBack) -> Evaluation:
        pieces = self._held
        assert pieces is not None
        pieces.begin_evaluation(held, held.samples)
        sums = torch.zeros(3, dtype=torch.float64)
        for weight, batches in held:
            loss = 0.0
            for number, (chunk, batch) in enumerate(zip(self._chunks, batches, strict=True)):
                pieces.enter(number)
                with chunk.evaluating():
                    value = chunk.forward({}, batch).made[chunk.gives[0]]
                loss += float(value) * pieces.weight(number)
            sums += weight * torch.tensor((loss, *self._counts.take()), dtype=torch.float64)
        return Evaluation(*sums.tolist())

    def _weighted(self, batches: Sequence[Batch]) -> Iterator[tuple[Chunk, Batch, float]]:
        """Every micro-batch with the chunk that runs it and its part of the loss."""
        if self._pieces is None:
            yield self._chunks[0], batches[0], 1.0
            return
        self._pieces.begin(batches)
        for number, (chunk, batch) in enumerate(zip(self._chunks, batches, strict=True)):
            self._pieces.enter(number)
            yield chunk, batch, self._pieces.weight(number)
