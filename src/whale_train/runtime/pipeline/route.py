"""Determine the place of a rank in a pipeline, its work in a step, and the peers of its messages.

All of it follows from the Plan, so both ends of a message agree.
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
    """The place of a rank in a pipeline.

    copy: the number of its copy of the pipeline.
    position: its position in that copy.
    index: its number in the shard group of that position.
    """

    copy: int
    position: int
    index: int

    @classmethod
    def of(cls, pipeline: PlannedPipeline, rank: int) -> "PipelinePlace":
        """Return the place of `rank`, a rank of `pipeline`."""
        for copy, described in enumerate(pipeline.copies):
            for position, ranks in enumerate(described.positions):
                if rank in ranks:
                    return cls(copy, position, ranks.index(rank))
        raise AssertionError(rank)


@dataclass(frozen=True)
class Route:
    """The senders and receivers of the values of one copy of the pipeline.

    place: the place of this rank.
    copy: the copy that this rank is in.
    gradient: edges between chunks, with True where a gradient is sent back.
    gives: names of the values that each chunk gives to others.
    takes: names of the values that each chunk takes from others.
    """

    place: PipelinePlace
    copy: PlannedCopy
    gradient: Mapping[tuple[int, int], bool]
    gives: Sequence[tuple[str, ...]]
    takes: Sequence[tuple[str, ...]]

    @classmethod
    def of(cls, plan: Plan, place: PipelinePlace) -> "Route":
        """Return the route of the rank at `place`."""
        assert plan.pipeline is not None
        assert plan.rewrite is not None
        gives, takes = values_of_chunks(plan.rewrite, plan.pipeline)
        pipeline = plan.pipeline
        return cls(place, pipeline.copies[place.copy], pipeline.gradient_edges, gives, takes)

    @cached_property
    def maker(self) -> dict[str, int]:
        """Return the number of the chunk that computes each value."""
        return {name: chunk for chunk, names in enumerate(self.gives) for name in names}

    @cached_property
    def _values(self) -> dict[tuple[int, int], list[str]]:
        """Return the names of the values that cross each edge, a pair of chunks."""
        names_of: dict[tuple[int, int], list[str]] = {}
        for chunk, names in enumerate(self.takes):
            for name in names:
                names_of.setdefault((self.maker[name], chunk), []).append(name)
        return names_of

    def values(self, message: Message) -> list[str]:
        """Return the names of the values of `message`; a gradient message carries their
        gradients."""
        return self._values[message.edge]

    @property
    def crossing(self) -> frozenset[str]:
        """Return the names of the values that cross between any two chunks."""
        return frozenset(name for names in self._values.values() for name in names)

    def num_samples(self, micro_batch: int) -> int:
        """Return the number of samples of a micro-batch."""
        start, stop = self.copy.samples[micro_batch]
        return stop - start

    def source(self, message: Message) -> int:
        """Return the rank that sends `message` to this rank."""
        owner = self.copy.owners[message.source][message.micro_batch]
        ranks = self.copy.positions[owner]
        return ranks[self.place.index % len(ranks)]

    def targets(self, message: Message) -> list[int]:
        """Return the ranks to which this rank sends `message`."""
        owner = self.copy.owners[message.target][message.micro_batch]
        receivers = self.copy.positions[owner]
        num_senders = len(self.copy.positions[self.place.position])
        return [rank for j, rank in enumerate(receivers) if j % num_senders == self.place.index]

    def passages(self, messages: Sequence[Message]) -> dict[int, list[Passage]]:
        """Return this rank's sends and receives among `messages`, by the rank at the other end."""
        passages: dict[int, list[Passage]] = {}
        for message in messages:
            source, target = (
                self.copy.owners[chunk][message.micro_batch]
                for chunk in (message.source, message.target)
            )
            if source == self.place.position:
                for rank in self.targets(message):
                    passages.setdefault(rank, []).append(Passage(message, is_sent=True))
            if target == self.place.position:
                rank = self.source(message)
                passages.setdefault(rank, []).append(Passage(message, is_sent=False))
        return passages


class MessageTypes:
    """The types of the values of every message of a route.

    `values` gives the types of the graph's values. A gradient message carries gradients, of the
    types of their values, for floating-point values only.
    """

    def __init__(self, route: Route, values: ValueTypes) -> None:
        self._route, self._values = route, values
        self._known: dict[tuple[tuple[int, int], bool, int], list[ValueType]] = {}

    def __call__(self, message: Message) -> Sequence[ValueType]:
        """Return the types of the values of `message`, in the order of `names`."""
        samples = self._route.num_samples(message.micro_batch)
        key = (message.edge, message.is_gradient, samples)
        if key not in self._known:
            names = self.names(message)
            self._known[key] = [self._values.of(name, samples) for name in names]
        return self._known[key]

    def names(self, message: Message) -> list[str]:
        """Return the names of the values of `message`, in the order of the message."""
        names = self._route.values(message)
        if not message.is_gradient:
            return names
        return [name for name in names if self._values.is_floating_point(name)]


def values_of_chunks(
    graph: PlannedGraph, pipeline: PlannedPipeline
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the names of the values that every chunk gives to other chunks, and takes from
    them."""
    segments = [graph.segments[chunk.segment] for chunk in pipeline.chunks]
    return [segment.gives for segment in segments], [segment.takes for segment in segments]


@dataclass(frozen=True)
class Orders:
    """The work of a rank in a step or an evaluation.

    instructions: the instructions of its position.
    passages: its messages by the rank at the other end, in the order in which both ends post them.
    """

    instructions: tuple[Instruction, ...]
    passages: Mapping[int, Sequence[Passage]]

    @classmethod
    def of(
        cls, pipeline: PlannedPipeline, route: Route, kinds: Sequence[Kind] = tuple(Kind)
    ) -> "Orders":
        """Return the orders of the rank of `route`, from the plan's schedule.

        Only instructions of the kinds `kinds` are included.
        """
        copy = route.copy
        durations = {
            (chunk, position): Durations(*times) for chunk, position, *times in copy.durations
        }
        transits = {(source, target): seconds for source, target, seconds in copy.transits}
        ordered = schedule(
            pipeline.schedule,
            [Position(chunks) for chunks in pipeline.positions],
            copy.owners,
            pipeline.gradient_edges,
            len(copy.samples),
            durations,
            transits,
        )
        selected = [tuple(x for x in operations if x.kind in kinds) for operations in ordered]
        messages = messages_as_sent(selected, durations, transits)
        return cls(selected[route.place.position], route.passages(messages))
