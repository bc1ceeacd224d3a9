"""Where a rank sits in a pipeline, what it does in a step, and what it sends to whom.

All of it follows from the Plan, the same on both sides of every message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale_train.runtime.base.value_type import ValueType
from whale_train.runtime.comms.p2p import Passage
from whale_train.runtime.graph.value_types import ValueTypes
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.program import PlannedCopy, PlannedGraph, PlannedPipeline
from whale_train.strategies.schedule.instructions import Durations, Instruction, Kind, Position
from whale_train.strategies.schedule.messages import Message, messages_as_sent
from whale_train.strategies.schedule.orders import schedule


@dataclass(frozen=True)
class PipelinePlace:
    """Where a rank sits: its copy of the pipeline, its position in it, its number in that
    position's shard group."""

    copy: int
    position: int
    index: int

    @classmethod
    def of(cls, pipeline: PlannedPipeline, rank: int) -> "PipelinePlace":
        for copy, described in enumerate(pipeline.copies):
            for position, ranks in enumerate(described.positions):
                if rank in ranks:
                    return cls(copy, position, ranks.index(rank))
        raise AssertionError(rank)


@dataclass(frozen=True)
class Route:
    """Who sends what to whom, for one copy of the pipeline. `gives` and `takes` are the values of
    every chunk that others have a part in, `gradient` the edges between chunks, and whether a
    gradient comes back."""

    place: PipelinePlace
    copy: PlannedCopy
    gradient: Mapping[tuple[int, int], bool]
    gives: Sequence[tuple[str, ...]]
    takes: Sequence[tuple[str, ...]]

    @classmethod
    def of(cls, plan: Plan, place: PipelinePlace) -> "Route":
        """Return the route of a rank that sits at `place`."""
        assert plan.pipeline is not None
        assert plan.rewrite is not None
        gives, takes = values_of_chunks(plan.rewrite, plan.pipeline)
        pipeline = plan.pipeline
        return cls(place, pipeline.copies[place.copy], pipeline.gradient_edges, gives, takes)

    @cached_property
    def maker(self) -> dict[str, int]:
        """The chunk that makes each value."""
        return {name: chunk for chunk, names in enumerate(self.gives) for name in names}

    @cached_property
    def _values(self) -> dict[tuple[int, int], list[str]]:
        found: dict[tuple[int, int], list[str]] = {}
        for chunk, names in enumerate(self.takes):
            for name in names:
                found.setdefault((self.maker[name], chunk), []).append(name)
        return found

    def values(self, message: Message) -> list[str]:
        """Return the values that a message has, or whose gradients it has."""
        return self._values[message.edge]

    @property
    def crossing(self) -> frozenset[str]:
        """The values that cross between any two chunks."""
        return frozenset(name for names in self._values.values() for name in names)

    def num_samples(self, micro_batch: int) -> int:
        start, stop = self.copy.samples[micro_batch]
        return stop - start

    def source(self, message: Message) -> int:
        """Return the rank that sends a message to me."""
        owner = self.copy.owners[message.source][message.micro_batch]
        ranks = self.copy.positions[owner]
        return ranks[self.place.index % len(ranks)]

    def targets(self, message: Message) -> list[int]:
        """Return the ranks that I send a message to."""
        owner = self.copy.owners[message.target][message.micro_batch]
        there = self.copy.positions[owner]
        mine = len(self.copy.positions[self.place.position])
        return [rank for j, rank in enumerate(there) if j % mine == self.place.index]

    def passages(self, messages: Sequence[Message]) -> dict[int, list[Passage]]:
        """Return those of `messages` that are mine, by the rank at the other end."""
        found: dict[int, list[Passage]] = {}
        for message in messages:
            source, target = (
                self.copy.owners[chunk][message.micro_batch]
                for chunk in (message.source, message.target)
            )
            if source == self.place.position:
                for rank in self.targets(message):
                    found.setdefault(rank, []).append(Passage(message, is_sent=True))
            if target == self.place.position:
                rank = self.source(message)
                found.setdefault(rank, []).append(Passage(message, is_sent=False))
        return found


class MessageTypes:
    """What values every message of a route has, where the graph's are of `values`' types: of a
    gradient, which is like its value, floating-point ones alone."""

    def __init__(self, route: Route, values: ValueTypes) -> None:
        self._route, self._values = route, values
        self._known: dict[tuple[tuple[int, int], bool, int], list[ValueType]] = {}

    def __call__(self, message: Message) -> Sequence[ValueType]:
        samples = self._route.num_samples(message.micro_batch)
        key = (message.edge, message.is_gradient, samples)
        if key not in self._known:
            names = self.names(message)
            self._known[key] = [self._values.of(name, samples) for name in names]
        return self._known[key]

    def names(self, message: Message) -> list[str]:
        """Return the names of a message's values."""
        names = self._route.values(message)
        if not message.is_gradient:
            return names
        return [name for name in names if self._values.is_floating_point(name)]


def values_of_chunks(
    graph: PlannedGraph, pipeline: PlannedPipeline
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return what every chunk gives to other chunks, and what it takes from them."""
    segments = [graph.segments[chunk.segment] for chunk in pipeline.chunks]
    return [segment.gives for segment in segments], [segment.takes for segment in segments]


@dataclass(frozen=True)
class Orders:
    """What a rank does in a step or an evaluation: the instructions of its position, and its
    messages by the rank at their other end, in the order that both ends post them in."""

    instructions: tuple[Instruction, ...]
    passages: Mapping[int, Sequence[Passage]]

    @classmethod
    def of(
        cls, pipeline: PlannedPipeline, route: Route, kinds: Sequence[Kind] = tuple(Kind)
    ) -> "Orders":
        """Return the orders of a rank, as the plan's schedule has them; instructions of `kinds`
        alone."""
        copy = route.copy
        durations = {
            (chunk, position): Durations(*times) for chunk, position, *times in copy.durations
        }
        transits = {(here, there): seconds for here, there, seconds in copy.transits}
        ordered = schedule(
            pipeline.schedule,
            [Position(chunks) for chunks in pipeline.positions],
            copy.owners,
            pipeline.gradient_edges,
            len(copy.samples),
            durations,
            transits,
        )
        kept = [tuple(x for x in listed if x.kind in kinds) for listed in ordered]
        messages = messages_as_sent(kept, durations, transits)
        return cls(kept[route.place.position], route.passages(messages))
