"""A part of the model that one rank runs in one go, on its TaskGraph's engine.

Values are detached where they cross to another chunk; backward hands their gradients across.
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
    """The segments one TaskGraph runs, in order, under one engine."""

    def __init__(self, parts: Sequence[SegmentModule]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, number: int, *values: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = self.parts[number](*values)
        return result


@dataclass(frozen=True)
class Passed:
    """What a forward leaves to its backward: every value made or taken, and those it `took`,
    detached."""

    made: dict[str, Tensor]
    took: dict[str, Tensor]
    own: "Passed | None" = None  # of a chunk whose samples are shared, what this member made


class Chunk:
    """A segment, the engine that runs it, and its number among that engine's; and the `lenders`,
    engines of other parameters that it runs. `gives` are the values others want, or the loss
    alone."""

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
        """Return what runs a micro-batch of a step: all are run alike here."""
        return self

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All that it runs, whoever's they are."""
        yield from self.segment.parameters()
        yield from self.segment.lent

    def forward(self, taken: Mapping[str, Tensor], batch: Batch) -> Passed:
        """Run the segment; `taken` are the values of earlier chunks, which require a gradient where
        one is wanted."""
        segment = self.segment
        took = {name: taken[name].detach() for name in segment.takes}
        for name, value in took.items():
            value.requires_grad_(taken[name].requires_grad)
        inputs = (batch[name] for name in segment.inputs)
        given = self._engine(self._number, *took.values(), *inputs)
        return Passed({**taken, **dict(zip(segment.gives, given, strict=True))}, took)

    def backward(self, passed: Passed, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Accumulate the parameters' gradients, given those of the values of `gives` that have
        one; the gradients of what was taken from other chunks, by name."""
        known, made = dict(gradients), passed.made
        names = [n for n in self.segment.gives if n in known and made[n].requires_grad]
        if names:
            self._engine.backward([made[n] for n in names], [known[n] for n in names])
        for name, value in passed.took.items():
            found = self._engine.input_gradient(value) if value.requires_grad else None
            if found is not None:
                known[name] = known[name] + found if name in known else found
        return known

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside it, forwards are those of evaluation and keep nothing for a backward."""
        for engine in self.engines:
            engine.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for engine in self.engines:
                engine.module.train()


class SharingChunk(Chunk):
    """A chunk whose group shares the samples of a micro-batch: every member has a batch of its own,
    takes its part of what other chunks give, and hands back the gradients of all (copies of the
    rest beside a split head or experts). What it `shares` of what it gives are the values of all,
    put together for other chunks; the rest is its own (a loss). `members` are the samples of each;
    values may have several rows of a sample, next to each other."""

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

    def forward(self, taken: Mapping[str, Tensor], batch: Batch) -> Passed:
        own = {name: self._mine(value.detach()) for name, value in taken.items()}
        for name, value in own.items():
            value.requires_grad_(taken[name].requires_grad)
        passed, made = super().forward(own, batch), dict[str, Tensor]()
        for name in self._shares:
            value = passed.made[name]
            made[name] = self._all(value.detach())
            made[name].requires_grad_(value.requires_grad)
        return Passed({**passed.made, **made}, passed.took, passed)

    def backward(self, passed: Passed, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert passed.own is not None
        mine = {n: self._mine(x) if n in self._shares else x for n, x in gradients.items()}
        known = super().backward(passed.own, mine)
        for name in self.segment.takes:
            if name in known:
                known[name] = self._all(known[name])
        return known

    def _mine(self, value: Tensor) -> Tensor:
        return slice_(value, 0, 1, self._rows(len(value) // self._members.total))

    def _all(self, value: Tensor) -> Tensor:
        return gather(value, 0, 1, self._rows(len(value) // self._members.size))

    def _rows(self, of_sample: int) -> ShardGroup:
        """Return how many rows the members have of values with so many of each sample."""
        sizes = tuple(of_sample * samples for samples in self._members.sizes)
        return replace(self._members, sizes=sizes)


class VariedChunk(Chunk):
    """A chunk of which every micro-batch of a step has the variant that is given for it: they share
    engines and parameters, and differ in how many samples each member takes."""

    def __init__(self, variants: Sequence[Chunk]) -> None:
        first, *_ = variants
        super().__init__(first.segment, first._engine, first._number, first.engines[1:])
        self._variants = tuple(variants)

    def of(self, micro_batch: int) -> Chunk:
        return self._variants[micro_batch]
