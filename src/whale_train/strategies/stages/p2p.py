"""The point-to-point messages between the chunks of a pipeline: their bytes and seconds."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from whale_train.strategies.cost.collectives import (
    NicContention,
    group_link,
    nic_contention,
    send_time_s,
)
from whale_train.strategies.hardware.cluster import Link
from whale_train.strategies.stages.micro_batches import Batches
from whale_train.strategies.stages.placement import PlanningContext, StageChunk


class P2PCosts:
    """The bytes, links and seconds of the messages between the positions that hold `chunks`."""

    def __init__(self, job: PlanningContext, chunks: Sequence[StageChunk]) -> None:
        self._job, self._chunks = job, chunks
        self._bytes: dict[tuple[int, int, int], float] = {}

    def link(self, copy: int, positions: tuple[int, int]) -> Link:
        """Return the link between two positions of a replica."""
        seats = self._job.seats.positions[copy]
        ends = [seats[position][0] for position in positions]
        return group_link(self._job.cluster, ends, self._senders, by_memory=True)

    def num_bytes(self, sender: int, receiver: int, samples: int) -> float:
        """Return the bytes that one chunk sends to another for a micro-batch of `samples`: values
        to a later chunk, or their gradients to an earlier one."""
        key = (sender, receiver, samples)
        if key not in self._bytes:
            maker, taker = sorted((sender, receiver))
            taken, graph = set(self._chunks[taker].slice.takes), self._job.graph
            view = self._job.findings.view
            self._bytes[key] = sum(
                view.crossing_bytes(name, samples)
                for name in self._chunks[maker].slice.gives
                if name in taken and (sender == maker or "float" in graph[name].dtype)
            )
        return self._bytes[key]

    def transits(
        self, copy: int, batches: Batches, edges: Mapping[tuple[int, int], bool]
    ) -> dict[tuple[int, int], float]:
        """Return the seconds of sending a replica's largest micro-batch, by (sender, receiver)
        chunk: forward along `edges`, and back along those with a gradient.

        Each transfer is over the slowest link between the positions involved. Edges within a
        position are left out.
        """
        samples = batches.largest(copy)
        owners, seconds = batches.owners[copy], dict[tuple[int, int], float]()
        for (first, last), gradient in edges.items():
            pairs = {p for p in zip(owners[first], owners[last], strict=True) if p[0] != p[1]}
            if not pairs:
                continue
            links = [self.link(copy, pair) for pair in pairs]
            for ends in ((first, last), (last, first))[: 1 + gradient]:
                sent = self.num_bytes(*ends, samples)
                seconds[ends] = max(send_time_s(sent, link) for link in links)
        return seconds

    @cached_property
    def _senders(self) -> NicContention:
        return nic_contention(self._job.cluster, self._job.seats.edges())
