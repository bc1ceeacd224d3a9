"""Run a part of the model as one unit, on the engine of its TaskGraph.

Values are detached where they cross to another chunk; the backward passes their gradients across.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from whale_train.runtime.base.step_types import Batch
from whale_train.runtime.comms.layout_collectives import ShardGroup, gather, slice_
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.graph.segment import SegmentModule


class Segments(nn.Module):
    """The segments of one TaskGraph, run in order by one engine."""

    def __init__(self, parts: Sequence[SegmentModule]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, number: int, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of segment `number` for the inputs `values`."""
        result: tuple[Tensor, ...] = self.parts[number](*values)
        return result


@dataclass(frozen=True)
class SavedForBackward:
    """The values that a forward saves for its backward.

    made: every value that the forward computed or took, by name.
    took: the values that the segment took, detached, by name.
    own: for a chunk whose samples are shared, the saved values of this member's own forward; None
        otherwise.
    """

    made: dict[str, Tensor]
    took: dict[str, Tensor]
    own: "SavedForBackward | None" = None


class Chunk:
    """A segment and the engine that runs it.

    `number` is the segment's number among the engine's. `lenders` are the engines of other
    parameters that the segment reads. `gives` are the names of the values that other chunks take,
    or the name of the loss.
    """

    def __init__(
        self,
        segment: SegmentModule,
        engine: Engine,
        number: int,
        lenders: Sequence[Engine] = (),
    ) -> None:
        self.segment, self.gives = segment, segment.gives
        self._engine, self._number = engine, number
        self.engines = (engine, *lenders)

    def of(self, micro_batch: int) -> "Chunk":
        """Return the chunk that runs `micro_batch` of a step: this one for all micro-batches."""
        return self

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield all parameters that the chunk reads, its own and the lent ones."""
        yield from self.segment.parameters()
        yield from self.segment.lent

    def forward(self, taken: Mapping[str, Tensor], batch: Batch) -> SavedForBackward:
        """Run the segment on `batch`, and return the values that the backward needs.

        `taken` are the values of earlier chunks, by name; each requires a gradient if its chunk
        needs one.
        """
        segment = self.segment
        detached = {name: taken[name].detach() for name in segment.takes}
        for name, value in detached.items():
            value.requires_grad_(taken[name].requires_grad)
        inputs = (batch[name] for name in segment.inputs)
        given = self._engine(self._number, *detached.values(), *inputs)
        return SavedForBackward({**taken, **dict(zip(segment.gives, given, strict=True))}, detached)

    def backward(
        self, passed: SavedForBackward, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Accumulate the parameters' gradients, and return gradients by name.

        `gradients` are the gradients of those values of `gives` that have one. The result also has
        the gradients of the values taken from other chunks.
        """
        known, values = dict(gradients), passed.made
        names = [n for n in self.segment.gives if n in known and values[n].requires_grad]
        if names:
            self._engine.backward([values[n] for n in names], [known[n] for n in names])
        for name, value in passed.took.items():
            gradient = self._engine.input_gradient(value) if value.requires_grad else None
            if gradient is not None:
                known[name] = known[name] + gradient if name in known else gradient
        return known

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run forwards inside the context in evaluation mode, without saving values for a
        backward."""
        for engine in self.engines:
            engine.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for engine in self.engines:
                engine.module.train()


class BatchShardedChunk(Chunk):
    """A chunk whose group shares the samples of a micro-batch.

    Every member has a batch of its own, takes its part of the values of other chunks, and returns
    the gradients of all samples. This is for copies of the layers beside a split head or experts.

    `members` gives the number of samples of each member. `shares` names the values that are
    gathered from all members for other chunks; other values of `gives` stay the member's own (a
    loss). Values may have several adjacent rows per sample.
    """

    def __init__(
        self,
        segment: SegmentModule,
        engine: Engine,
        number: int,
        lenders: Sequence[Engine],
        members: ShardGroup,
        shares: Collection[str],
    ) -> None:
        super().__init__(segment, engine, number, lenders)
        self._members, self._shares = members, shares

    def forward(self, taken: Mapping[str, Tensor], batch: Batch) -> SavedForBackward:
        """Run the segment on this member's samples, and gather the values that are shared.

        `taken` are values of all members' samples, [rows of all, ..]; `batch` has this member's
        samples.
        """
        own = {name: self._mine(value.detach()) for name, value in taken.items()}
        for name, value in own.items():
            value.requires_grad_(taken[name].requires_grad)
        passed, gathered = super().forward(own, batch), dict[str, Tensor]()
        for name in self._shares:
            value = passed.made[name]
            gathered[name] = self._all(value.detach())
            gathered[name].requires_grad_(value.requires_grad)
        return SavedForBackward({**passed.made, **gathered}, passed.took, passed)

    def backward(
        self, passed: SavedForBackward, gradients: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Accumulate the gradients of this member's samples, and return gradients by name.

        The `gradients` of shared values, and the returned gradients of taken values, cover all
        members' samples.
        """
        assert passed.own is not None
        own_gradients = {n: self._mine(x) if n in self._shares else x for n, x in gradients.items()}
        known = super().backward(passed.own, own_gradients)
        for name in self.segment.takes:
            if name in known:
                known[name] = self._all(known[name])
        return known

    def _mine(self, value: Tensor) -> Tensor:
        """Return this member's rows of a value of all samples, [rows, ..]."""
        return slice_(value, 0, 1, self._rows(len(value) // self._members.total))

    def _all(self, value: Tensor) -> Tensor:
        """Return the rows of all members, [rows, ..], gathered from their own."""
        return gather(value, 0, 1, self._rows(len(value) // self._members.size))

    def _rows(self, of_sample: int) -> ShardGroup:
        """Return each member's number of rows, at `of_sample` rows per sample."""
        sizes = tuple(of_sample * samples for samples in self._members.sizes)
        return replace(self._members, sizes=sizes)


class PerMicroBatchChunk(Chunk):
    """A chunk with one variant for every micro-batch of a step.

    The variants share engines and parameters. They differ in the number of samples of each member.
    """

    def __init__(self, variants: Sequence[Chunk]) -> None:
        first, *_ = variants
        super().__init__(first.segment, first._engine, first._number, first.engines[1:])
        self._variants = tuple(variants)

    def of(self, micro_batch: int) -> Chunk:
        """Return the variant that runs `micro_batch`."""
        return self._variants[micro_batch]
