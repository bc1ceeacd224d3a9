"""The order in which a pipeline computes, from a simulation of its positions.

Every schedule is the same list scheduling with different rules. The positions are simulated with
the given durations and travel times of messages. A free position takes the first computation that
can run: its next forward, unless its limit of micro-batches in flight is reached; a backward; the
weight part of a backward. The computations of the simulation, in their order, are the schedule. It
is valid for any widths and durations, and the textbook's where the pipeline is regular.

    gpipe             no limit; no backward before the position's last forward
                      (Huang et al. 2019, arXiv 1811.06965)
    1f1b              enough in flight to keep the position busy (Narayanan et al. 2021,
                      arXiv 2104.04473)
    interleaved_1f1b  the same, for positions of several chunks
    zero_bubble       ZB-H1 (Qi et al. 2023, arXiv 2401.10241): the limits hold for backward
                      input parts, which the next stage waits for; weight parts fill idle time,
                      at most as many activations waiting for them as 1f1b has anywhere

A position runs its forwards in one fixed order, the same at all positions, and the backwards of a
chunk by ascending micro-batch. So values cross each edge in the order in which they are received,
as transports without tags require. Some computation of the earliest unfinished group of
micro-batches can always run, so no limit can deadlock.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, isfinite, lcm
from typing import NamedTuple

from whale_train.strategies.grammar.nodes import SCHEDULES
from whale_train.strategies.schedule.instructions import (
    ChunkDurations,
    Durations,
    Edges,
    Instruction,
    Kind,
    Owners,
    Position,
    Transits,
)


@dataclass(frozen=True)
class ScheduledPipeline:
    """The checked arguments of `schedule`. Raises ValueError where they do not describe a
    pipeline."""

    name: str
    positions: Sequence[Position]
    owners: Owners
    edges: Edges
    micro_batches: int
    durations: ChunkDurations | None
    transits: Transits | None = None

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.name}; one of {', '.join(SCHEDULES)}")
        num_chunks, num_stages = len(self.owners), self.num_stages
        if num_chunks < 1 or self.micro_batches < 1:
            raise ValueError(f"{num_chunks} chunks, {self.micro_batches} micro-batches: no work")
        layouts = {tuple(range(s, num_chunks, num_stages)) for s in range(num_stages)} - {()}
        for index, position in enumerate(self.positions):
            if position.chunks not in layouts:
                rule = f"stage s of {num_stages} holds s, s + {num_stages}, ... of {num_chunks}"
                raise ValueError(f"position {index} holds chunks {position.chunks}; {rule}")
        for chunk, row in enumerate(self.owners):
            if len(row) != self.micro_batches:
                raise ValueError(f"{len(row)} owners in chunk {chunk}, not {self.micro_batches}")
            for owner in set(row):
                known = 0 <= owner < len(self.positions)
                if not known or chunk not in self.positions[owner].chunks:
                    raise ValueError(f"chunk {chunk} is not held by its owner {owner}")
                if self.durations is not None and (chunk, owner) not in self.durations:
                    raise ValueError(f"no durations of chunk {chunk} on position {owner}")
        for start, end in self.edges:
            if not 0 <= start < end < num_chunks:
                raise ValueError(f"edge {start} -> {end} is not forward in {num_chunks} chunks")
        for ends, seconds in (self.transits or {}).items():
            if not (isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{seconds} is no time from chunk {ends[0]} to chunk {ends[1]}")

    @property
    def is_plain(self) -> bool:
        """Return True if every stage is one position."""
        return len(self.positions) == len(self.owners) == self.num_stages

    @cached_property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len({position.chunks for position in self.positions})

    def limits(self, group: int) -> list[int]:
        """Return the number of (chunk, micro-batch) pairs that each position may have in flight.
        `group` is the number of micro-batches that fill the pipeline once.

        A position of one chunk may have one, plus its own micro-batches that the later stages have
        started when they are busy: S - s in a regular pipeline, the textbook's 1F1B. A replica that
        owns one micro-batch in n takes the time of n, so the slowest replica of a stage decides how
        many the stage has started. One more is allowed where the ratio of two stages is not 1:
        forwards and backwards do not alternate regularly there, and the position would wait for its
        turn.

        A position of v chunks may have one, plus the warm-up of Megatron-LM's interleaved schedule,
        2 (S - s - 1) + (v - 1) S for groups of S micro-batches, with the same ratios and the
        position's part of a group. (One, plus a group for every chunk but the last, is the smallest
        limit that is safe.)

        Each position may have as many more as the pipeline processes while one travels to the later
        stages and back.
        """
        rows = [_row_of(tuple(row), group) for row in self.owners]
        common = lcm(*(gap.denominator for row in rows for gap in row.spacings.values()))
        spacings = [
            {owner: int(gap * common) for owner, gap in row.spacings.items()} for row in rows
        ]
        slowest, underway = [max(gap.values()) for gap in spacings], self._underway()
        limits = []
        for index, position in enumerate(self.positions):
            ahead, in_group = 0, []
            for chunk in position.chunks:
                row, stop = rows[chunk], chunk + self.num_stages - position.chunks[0]
                in_group.append(row.most_in_group.get(index, 0))
                if row.counts[index] > 1:
                    spacing, later = spacings[chunk][index], slowest[chunk + 1 : stop]
                    uneven = later.count(spacing) < len(later)
                    passing = in_flight_for(underway[chunk], spacing / common)
                    ahead = max(ahead, -(-sum(later) // spacing) + uneven + passing)
            limits.append(1 + sum(in_group[:-1]) + ahead * (2 if len(in_group) > 1 else 1))
        return limits

    def _underway(self) -> list[float]:
        """Return, for each chunk, the number of micro-batches that the pipeline processes while a
        message travels through the later stages, chunk by chunk, and back."""
        transits, count = self.transits or {}, len(self.owners)
        if not transits or self.durations is None:
            return [0.0] * count
        busy = [0.0] * len(self.positions)
        for chunk, row in enumerate(self.owners):
            for owner, owned in _row_of(tuple(row), 1).counts.items():
                times = self.durations[chunk, owner]
                busy[owner] += owned * (
                    times.forward + times.backward_input + times.backward_weight
                )
        pace, underway = max(busy) / self.micro_batches, [0.0] * count
        for chunk in reversed(range(count - 1)) if pace else ():
            if (chunk + 1) % self.num_stages:
                onward = transits.get((chunk, chunk + 1), 0.0)
                back = transits.get((chunk + 1, chunk), 0.0)
                underway[chunk] = underway[chunk + 1] + (onward + back) / pace
        return underway


# Fraction of a micro-batch's time that a position may idle before one more goes in flight.
_WAITED_FOR = 0.125


def in_flight_for(underway: float, spacing: float) -> int:
    """Return the number of further micro-batches that a position has in flight while the pipeline
    processes `underway` micro-batches, of which the position owns one in `spacing`."""
    return max(0, ceil(underway / spacing - _WAITED_FOR))


class ChunkLinks:
    """The chunks that each chunk receives from and sends to, forward and backward, ascending."""

    def __init__(self, edges: Edges, num_chunks: int) -> None:
        def lists(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
            ordered = sorted(pairs)
            return [[b for a, b in ordered if a == chunk] for chunk in range(num_chunks)]

        gradients = [edge for edge, gradient in edges.items() if gradient]
        self.sources = lists((end, start) for start, end in edges)
        self.targets = lists(edges)
        self.gradient_sources = lists((end, start) for start, end in gradients)
        self.gradient_targets = lists(gradients)


@dataclass(frozen=True)
class _Row:
    """Owners of the micro-batches of a chunk.

    counts: the number of micro-batches of each owner.
    most_in_group: the most micro-batches of each owner in any group of consecutive micro-batches.
    spacings: the mean distance between the micro-batches of each owner; for an owner of a single
        one, the rest of the step.
    """

    counts: Counter[int]
    most_in_group: Mapping[int, int]
    spacings: Mapping[int, Fraction]


@lru_cache(maxsize=1 << 10)
def _row_of(row: tuple[int, ...], group: int) -> _Row:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for m, owner in enumerate(row):
        first.setdefault(owner, m)
        last[owner] = m
    counts = Counter(row)
    spacings = {
        owner: Fraction(last[owner] - first[owner], count - 1)
        if count > 1
        else Fraction(len(row) - first[owner])
        for owner, count in counts.items()
    }
    most: dict[int, int] = {}
    for start in range(0, len(row), group):
        for owner, count in Counter(row[start : start + group]).items():
            most[owner] = max(most.get(owner, 0), count)
    return _Row(counts, most, spacings)


@dataclass(slots=True)
class _Progress:
    """Remaining computations of one position, and the activations it holds.

    times: the time of every kind of computation, for each of its chunks.
    limit: the most forwards in flight.
    forwards: the remaining forwards as (chunk, micro-batch), in the order they must run.
    backwards: the remaining micro-batches of each chunk's backwards, in the order they must run.
    weights: a heap of the weight parts of backwards to run, as (micro-batch, chunk).
    waiting: the number of started forwards whose backward (input part) is not done.
    held: the number of started forwards whose activations are not freed.
    busy: True while the position is computing.
    """

    times: Mapping[int, Mapping[Kind, float]]
    limit: int
    forwards: deque[tuple[int, int]]
    backwards: dict[int, deque[int]]
    weights: list[tuple[int, int]] = field(default_factory=list)
    waiting: int = 0
    held: int = 0
    busy: bool = False


def simulated_orders(pipeline: ScheduledPipeline) -> "Simulation":
    """Return the simulation of the positions under the rules of `list_scheduling.py`.

    The textbook's 1F1B is patient: it alternates forwards and backwards, even if others wait.
    Between stages of unequal speed this is sometimes faster and sometimes slower. Both are tried
    where each stage is one position, since patience cannot deadlock there.
    """
    eager = Simulation(pipeline)
    if pipeline.name == "1f1b" and pipeline.is_plain:
        patient = Simulation(pipeline, patient=True)
        if patient.clock < eager.clock:
            return patient
    return eager


def _by_owner(row: Sequence[int]) -> dict[int, list[int]]:
    """Return the micro-batches of a chunk that each position owns, in order."""
    owned: dict[int, list[int]] = {}
    for micro_batch, owner in enumerate(row):
        owned.setdefault(owner, []).append(micro_batch)
    return owned


class Simulation:
    """The simulated positions: the computations of each, and the time at which the last is done."""

    def __init__(self, pipeline: ScheduledPipeline, patient: bool = False) -> None:
        """Simulate `pipeline`. If `patient`, a position that may take a forward waits for one to
        arrive instead of running a backward."""
        self.pipeline, self.patient = pipeline, patient
        self.owners = pipeline.owners
        self.owned = [_by_owner(row) for row in pipeline.owners]
        self.links = ChunkLinks(pipeline.edges, len(self.owners))
        # A group fills the pipeline once: a position of several chunks takes it through one
        # chunk after the other, as Megatron-LM does with its groups of S micro-batches.
        self.group = len({owner for row in self.owners for owner in row})
        self.limits = pipeline.limits(self.group)
        self.split = pipeline.name == "zero_bubble"
        # A single stage waits for no other: gpipe would hold every micro-batch for nothing.
        self.forwards_first = pipeline.name == "gpipe" and pipeline.num_stages > 1
        self.held_limit = max(self.limits)
        self.progress = [self._start(index) for index in range(len(pipeline.positions))]
        self.computations: list[list[Instruction]] = [[] for _ in pipeline.positions]
        # The number of computations that the forward and the backward of every chunk and
        # micro-batch still wait for: earlier forwards; the own forward and later backwards.
        count = pipeline.micro_batches
        self.before = [[len(sources)] * count for sources in self.links.sources]
        self.after = [[1 + len(targets)] * count for targets in self.links.gradient_targets]
        self.transits = pipeline.transits or {}
        # Event queue: time, sequence number, position, and the arrival (None: the position's
        # computation ends).
        self.coming: list[tuple[float, int, int, _Arrival | None]] = []
        self.number = 0
        self.clock: float = 0
        self._run()

    def _start(self, index: int) -> _Progress:
        durations, owned, times = self.pipeline.durations, {}, {}
        for chunk in self.pipeline.positions[index].chunks:
            owned[chunk] = self.owned[chunk].get(index, [])
            chunk_durations = (
                Durations() if durations is None else durations.get((chunk, index), Durations())
            )
            times[chunk] = {
                Kind.FORWARD: chunk_durations.forward,
                Kind.BACKWARD: chunk_durations.backward_input + chunk_durations.backward_weight,
                Kind.BACKWARD_INPUT: chunk_durations.backward_input,
                Kind.BACKWARD_WEIGHT: chunk_durations.backward_weight,
            }
        forwards = sorted(
            ((chunk, m) for chunk, row in owned.items() for m in row),
            key=lambda pair: (pair[1] // self.group, *pair),
        )
        backwards = {chunk: deque(row) for chunk, row in owned.items()}
        return _Progress(times, self.limits[index], deque(forwards), backwards)

    def _run(self) -> None:
        awake = set(range(len(self.progress)))
        while True:
            for index in sorted(awake):
                progress = self.progress[index]
                if not progress.busy and (work := self._choose(progress)):
                    progress.busy = True
                    self.computations[index].append(work)
                    self._at(self.clock + progress.times[work.chunk][work.kind], index, None)
            if not self.coming:
                break
            awake = set()
            # All computations that end at this time end before others start.
            self.clock = self.coming[0][0]
            while self.coming and self.coming[0][0] == self.clock:
                _, _, index, arrival = heapq.heappop(self.coming)
                awake.add(index)
                if arrival is None:
                    self._finish(index, awake)
                else:
                    arrival.waits[arrival.micro_batch] -= 1
        assert not any(
            left.forwards or left.weights or any(left.backwards.values()) for left in self.progress
        ), "deadlock"

    def _at(self, clock: float, index: int, arrival: "_Arrival | None") -> None:
        """Queue the end of a position's computation, or an arrival that it waits for, at a time."""
        self.number += 1
        heapq.heappush(self.coming, (clock, self.number, index, arrival))

    def _choose(self, progress: _Progress) -> Instruction | None:
        """Take the next computation of a free position; None where none can run."""
        free = progress.waiting < progress.limit and progress.held < self.held_limit
        if progress.forwards and (free or self.forwards_first):
            chunk, m = progress.forwards[0]
            if not self.before[chunk][m]:
                progress.forwards.popleft()
                progress.waiting += 1
                progress.held += 1
                return Instruction(Kind.FORWARD, chunk, m)
            if self.patient:
                return None
        if not (self.forwards_first and progress.forwards):
            ready = [
                (row[0] // self.group, -chunk, row[0])
                for chunk, row in progress.backwards.items()
                if row and not self.after[chunk][row[0]]
            ]
            if ready:
                _, negative_chunk, m = min(ready)
                progress.backwards[-negative_chunk].popleft()
                kind = Kind.BACKWARD_INPUT if self.split else Kind.BACKWARD
                return Instruction(kind, -negative_chunk, m)
        if progress.weights:
            m, chunk = heapq.heappop(progress.weights)
            return Instruction(Kind.BACKWARD_WEIGHT, chunk, m)
        return None

    def _finish(self, index: int, awake: set[int]) -> None:
        """End a position's computation, and wake the positions that may have waited for it."""
        progress, (kind, chunk, m, _) = self.progress[index], self.computations[index][-1]
        progress.busy = False
        if kind is Kind.FORWARD:
            self.after[chunk][m] -= 1
            self._send(index, chunk, m, self.links.targets[chunk], self.before, awake)
            return
        if kind is Kind.BACKWARD_INPUT:
            heapq.heappush(progress.weights, (m, chunk))
        else:
            progress.held -= 1
        if kind is Kind.BACKWARD_WEIGHT:
            return
        progress.waiting -= 1
        self._send(index, chunk, m, self.links.gradient_sources[chunk], self.after, awake)

    def _send(
        self,
        index: int,
        chunk: int,
        m: int,
        peers: Sequence[int],
        waits: Sequence[list[int]],
        awake: set[int],
    ) -> None:
        """Send the result of a computation to the owners of micro-batch `m` in the chunks `peers`,
        which wait for it."""
        for peer in peers:
            receiver = self.owners[peer][m]
            transit = self.transits.get((chunk, peer), 0.0) if receiver != index else 0.0
            if transit:
                self._at(self.clock + transit, receiver, _Arrival(waits[peer], m))
            else:
                waits[peer][m] -= 1
                awake.add(receiver)


class _Arrival(NamedTuple):
    """The arrival of a message, which reduces `waits[micro_batch]` by one."""

    waits: list[int]
    micro_batch: int
