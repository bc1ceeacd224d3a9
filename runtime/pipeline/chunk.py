"""A part of the model that one rank runs in one go: segments, each on its TaskGraph's engine.

Values are detached where they cross from one segment to the next, and where they cross to another
rank's chunk; backward hands their gradients across.
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
class ChunkPart:
    """A segment, the engine that runs it, and its number among that engine's; and the `lenders`,
    engines of other parameters that it runs."""

    segment: SegmentModule
    engine: Engine
    number: int
    lenders: tuple[Engine, ...] = ()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return (self.engine, *self.lenders)

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All that it runs, whoever's they are."""
        yield from self.segment.parameters()
        yield from self.segment.lent


def parts_of(
    chunks: Sequence[Sequence[tuple[int, SegmentModule]]], engines: Mapping[int, Engine]
) -> list[list[ChunkPart]]:
    """Return the parts of each of `chunks`, given by their TaskGraph and in the order in which that
    TaskGraph's engine of `engines` has its segments."""
    seen = dict.fromkeys(engines, 0)
    found = []
    for segments in chunks:
        parts = []
        for owner, segment in segments:
            lent = {id(parameter) for parameter in segment.lent}
            lenders = tuple(
                engine
                for engine in engines.values()
                if not lent.isdisjoint(map(id, engine.module.parameters()))
            )
            parts.append(ChunkPart(segment, engines[owner], seen[owner], lenders))
            seen[owner] += 1
        found.append(parts)
    return found


@dataclass(frozen=True)
class Passed:
    """What a forward leaves to its backward: every value made or taken, and, per segment, those it
    took, detached."""

    made: dict[str, Tensor]
    taken: tuple[dict[str, Tensor], ...]
    own: "Passed | None" = None  # of a chunk whose samples are shared, what this member made


class Chunk:
    """Segments in forward order. `gives` are the values others want, or the loss alone."""

    def __init__(self, parts: Sequence[ChunkPart], gives: Sequence[str]) -> None:
        self.gives = tuple(gives)
        self.parts = tuple(parts)

    def of(self, micro_batch: int) -> "Chunk":
        """Return what runs a micro-batch of a step: all are run alike here."""
        return self

    @property
    def engines(self) -> Sequence[Engine]:
        return tuple({id(x): x for part in self.parts for x in part.engines}.values())

    def forward(self, taken: Mapping[str, Tensor], batch: Batch) -> Passed:
        """Run all segments; `taken` are the values of earlier chunks, which require a gradient
        where one is wanted."""
        made = dict(taken)
        detached = []
        for part in self.parts:
            segment = part.segment
            values = {name: made[name].detach() for name in segment.takes}
            for name, value in values.items():
                value.requires_grad_(made[name].requires_grad)
            detached.append(values)
            inputs = (batch[name] for name in segment.inputs)
            given = part.engine(part.number, *values.values(), *inputs)
            made |= dict(zip(segment.gives, given, strict=True))
        return Passed(made, tuple(detached))

    def backward(self, passed: Passed, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Accumulate the parameters' gradients, given those of the values of `gives` that have
        one; the gradients of what was taken from other chunks, by name."""
        known = dict(gradients)
        for part, values in zip(reversed(self.parts), reversed(passed.taken), strict=True):
            names = [
                name
                for name in part.segment.gives
                if name in known and passed.made[name].requires_grad
            ]
            if names:
                outputs = [passed.made[name] for name in names]
                part.engine.backward(outputs, [known[name] for name in names])
            for name, value in values.items():
                found = part.engine.input_gradient(value) if value.requires_grad else None
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
        parts: Sequence[ChunkPart],
        gives: Sequence[str],
        members: ShardGroup,
        shares: Collection[str],
    ) -> None:
        super().__init__(parts, gives)
        self._members, self._shares = members, shares
        self._made = {name for part in parts for name in part.segment.gives}

    def forward(self, taken: Mapping[str, Tensor], batch: Batch) -> Passed:
        own = {name: self._mine(value.detach()) for name, value in taken.items()}
        for name, value in own.items():
            value.requires_grad_(taken[name].requires_grad)
        passed, made = super().forward(own, batch), dict[str, Tensor]()
        for name in self._shares:
            value = passed.made[name]
            made[name] = self._all(value.detach())
            made[name].requires_grad_(value.requires_grad)
        return Passed({**passed.made, **made}, passed.taken, passed)

    def backward(self, passed: Passed, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert passed.own is not None
        mine = {n: self._mine(x) if n in self._shares else x for n, x in gradients.items()}
        known = super().backward(passed.own, mine)
        for part in self.parts:
            for name in part.segment.takes:
                if name in known and name not in self._made:
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
        super().__init__(variants[0].parts, variants[0].gives)
        self._variants = tuple(variants)

    def of(self, micro_batch: int) -> Chunk:
        return self._variants[micro_batch]
