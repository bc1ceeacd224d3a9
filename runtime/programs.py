"""What one rank does with a batch: forward, backward, and the same for evaluation.

Two programs, one contract. `WholeModel` runs the model as it is on this rank's share; `CutModel`
runs the segments of a rewritten graph, each on its TaskGraph's engine, joined where values cross.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.engine import Engine
from whale_train.runtime.loss_means import GlobalMeans
from whale_train.runtime.rewrite import Counts, Segment

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """One evaluated batch: the mean loss over the whole global batch, right answers, targets."""

    loss: float
    correct: float
    targets: float


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
    """`engines` hold all of this rank's parameters; `backward` leaves their gradients."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    def forward_backward(self, batch: Batch) -> PendingLoss:
        """Gradients of the global batch's mean loss, of which `batch` is this rank's share."""

    def evaluate(self, batch: Batch) -> Evaluation: ...


class WholeModel:
    """The unmodified model, copied; each copy's loss weighted by its part of the batch."""

    def __init__(
        self, engine: Engine, group: dist.ProcessGroup, share: int, global_batch: int
    ) -> None:
        self._engine, self._group = engine, group
        self._share, self._global_batch = share, global_batch

    @property
    def engines(self) -> Sequence[Engine]:
        return (self._engine,)

    def forward_backward(self, batch: Batch) -> PendingLoss:
        with GlobalMeans(self._group, self._share, self._global_batch):
            part = self._engine(**batch) * (self._share / self._global_batch)
        self._engine.backward(part)
        value = part.detach().float()
        if self._group.size() == 1:
            return PendingLoss(value, None)
        return PendingLoss(value, dist.all_reduce(value, group=self._group, async_op=True))

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        module = self._engine.module
        module.eval()
        try:
            means = GlobalMeans(self._group, self._share, self._global_batch, accuracy=True)
            with means:
                part = self._engine(**batch) * (self._share / self._global_batch)
        finally:
            module.train()
        sums = torch.stack(
            [
                torch.as_tensor(x, device=part.device).double()
                for x in (part, means.correct, means.targets)
            ]
        )
        dist.all_reduce(sums, group=self._group)
        return Evaluation(*sums.tolist())


class Segments(nn.Module):
    """The segments one TaskGraph runs, in order, under one engine."""

    def __init__(self, parts: Sequence[Segment]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, number: int, *values: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = self.parts[number](*values)
        return result


@dataclass(frozen=True)
class Part:
    """A segment, the engine that runs it, and its number among that engine's."""

    segment: Segment
    engine: Engine
    number: int


class CutModel:
    """Segments in forward order, detached where values cross; the loss is the last one's."""

    def __init__(self, parts: Sequence[Part], counts: Counts) -> None:
        self._parts = parts
        self._counts = counts

    @property
    def engines(self) -> Sequence[Engine]:
        return tuple({id(part.engine): part.engine for part in self._parts}.values())

    def forward_backward(self, batch: Batch) -> PendingLoss:
        made: dict[str, Tensor] = {}
        taken: list[dict[str, Tensor]] = []
        for part in self._parts:
            segment = part.segment
            values = {name: made[name].detach() for name in segment.takes}
            for name, value in values.items():
                value.requires_grad_(made[name].requires_grad)
            taken.append(values)
            inputs = (batch[name] for name in segment.inputs)
            given = part.engine(part.number, *values.values(), *inputs)
            made |= dict(zip(segment.gives, given, strict=True))
        loss = made[self._parts[-1].segment.gives[0]]
        gradients: dict[str, Tensor] = {}
        for part, values in zip(reversed(self._parts), reversed(taken), strict=True):
            outputs = [name for name in part.segment.gives if name in gradients]
            # A scalar whose gradient is the one wanted: engines take no other kind of backward.
            scalars = [(made[name] * gradients[name]).sum() for name in outputs]
            part.engine.backward(sum(scalars[1:], scalars[0]) if scalars else loss)
            for name, value in values.items():
                if value.requires_grad:
                    gradients[name] = part.engine.input_gradient(value)
        return PendingLoss(loss.detach().float(), None)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        for engine in self.engines:
            engine.module.eval()
        try:
            made: dict[str, Tensor] = {}
            for part in self._parts:
                values = [made[name] for name in part.segment.takes]
                inputs = [batch[name] for name in part.segment.inputs]
                given = part.engine(part.number, *values, *inputs)
                made |= dict(zip(part.segment.gives, given, strict=True))
        finally:
            for engine in self.engines:
                engine.module.train()
        loss = made[self._parts[-1].segment.gives[0]]
        return Evaluation(float(loss), *self._counts.take())
