"""One rank's part of a pipeline: the instructions of its position, carried out.

The order of the instructions is `strategies/schedule/orders.py`'s; what they do is here. A strategy
without a pipeline that splits the model is one chunk on every rank, and goes the same way.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from whale_train.runtime.comms.p2p import Transport, Wire
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.grad_ready import Finality
from whale_train.runtime.graph.segment import Counts
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.kernels.weight_gradients import WeightGradients
from whale_train.runtime.loss.micro_batch_loss import LossOfPieces
from whale_train.runtime.pipeline.chunk import Batch, Chunk, Passed
from whale_train.runtime.train.evaluation import Evaluation, EvaluationBatches
from whale_train.runtime.train.step_programs import PendingLoss
from whale_train.runtime.train.timeline import Trace, span
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.program import PlannedGraph, PlannedPipeline
from whale_train.strategies.schedule.instructions import (
    COMPUTATIONS,
    Durations,
    Instruction,
    Kind,
    Position,
)
from whale_train.strategies.schedule.orders import schedule

_LOOKAHEAD = 2  # computations ahead of which receives are posted


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


class Route:
    """Who sends what to whom, for one copy of the pipeline."""

    def __init__(
        self,
        pipeline: PlannedPipeline,
        place: PipelinePlace,
        values: Mapping[tuple[int, int], list[str]],
    ) -> None:
        copy = pipeline.copies[place.copy]
        self.place = place
        self.positions, self.owners, self.samples = copy.positions, copy.owners, copy.samples
        self.values = values  # of each edge
        self.gradient = pipeline.gradient_edges
        self._numbers = {edge: i for i, edge in enumerate(self.gradient)}
        self._most_values = max((len(names) for names in values.values()), default=1)

    def sources(self, chunk: int, micro_batch: int) -> int:
        """Return the rank that sends to me what `chunk` holds of a micro-batch."""
        ranks = self.positions[self.owners[chunk][micro_batch]]
        return ranks[self.place.index % len(ranks)]

    def targets(self, chunk: int, micro_batch: int) -> list[int]:
        """Return the ranks to which I send for `chunk`."""
        there = self.positions[self.owners[chunk][micro_batch]]
        mine = len(self.positions[self.place.position])
        return [rank for j, rank in enumerate(there) if j % mine == self.place.index]

    def wire(self, edge: tuple[int, int], value: int, micro_batch: int, backward: bool) -> Wire:
        number = 2 * self._numbers[edge] + backward
        tag = (number * len(self.samples) + micro_batch) * self._most_values + value
        start, stop = self.samples[micro_batch]
        return Wire(number, tag, (number, value, stop - start))


class PipelineModel:
    """The chunks of one rank and the instructions that run them."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        chunks: Mapping[int, Chunk],
        loss: LossOfPieces,
        transport: Transport,
        counts: Counts,
        weight_gradients: WeightGradients,
        shared_random: Sequence[SharedRandom],
    ) -> None:
        assert plan.pipeline is not None
        assert plan.rewrite is not None
        self.shared_random = shared_random
        self.place = PipelinePlace.of(plan.pipeline, rank)
        self.instructions = instructions_of(plan.pipeline, self.place)
        self.trace: Trace | None = None
        gives, takes = values_of_chunks(plan.rewrite, plan.pipeline)
        maker = {name: chunk for chunk, names in enumerate(gives) for name in names}
        values: dict[tuple[int, int], list[str]] = {}
        for chunk, names in enumerate(takes):
            for name in names:
                values.setdefault((maker[name], chunk), []).append(name)
        self.route = Route(plan.pipeline, self.place, values)
        self._chunks, self._loss, self._transport = chunks, loss, transport
        self._takes = takes
        self._maker = maker
        self._last = len(gives) - 1
        self._shares_samples = plan.pipeline.chunks[self._last].shares_samples
        self._counts = counts
        self._weight_gradients = weight_gradients
        self._finality = Finality(chunks, self.instructions)
        owned = self.route.owners[min(chunks)]
        mine = [m for m, owner in enumerate(owned) if owner == self.place.position]
        self._batch_of = {m: i for i, m in enumerate(mine)}

    @property
    def engines(self) -> Sequence[Engine]:
        found = (engine for chunk in self._chunks.values() for engine in chunk.engines)
        return tuple({id(engine): engine for engine in found}.values())

    def forward_backward(self, batches: Sequence[Batch], loss_scale: float = 1.0) -> PendingLoss:
        run = _Run(self, batches, self.instructions, loss_scale)
        self._loss.begin(self._piece_batches(batches))
        run.run()
        for engine in self.engines:
            engine.finish_backward()
        self._transport.settle()
        return self._loss.total(run.losses if self.place.index == 0 else {})

    @torch.no_grad()
    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        forwards = [x for x in self.instructions if x.kind in _FORWARDS]
        pieces = ((w, x) for w, batches in held for x in self._piece_batches(batches))
        self._loss.begin_evaluation(pieces, held.samples)
        counted = self._last in self._chunks and self.place.index == 0
        sums = torch.zeros(3, dtype=torch.float64)
        with ExitStack() as stack:
            for chunk in self._chunks.values():
                stack.enter_context(chunk.evaluating())
            for weight, batches in held:
                run = _Run(self, batches, forwards)
                run.run()
                self._transport.settle()
                loss = sum(float(x) * self._loss.weight(m) for m, x in run.losses.items())
                seen = (loss, *self._counts.take())
                if counted:
                    sums += weight * torch.tensor(seen, dtype=torch.float64)
        return self._loss.evaluation(sums)

    def _piece_batches(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches whose targets this rank counts: members that share the samples
        each count their own."""
        if self._last not in self._chunks:
            return ()
        return batches if self._shares_samples or self.place.index == 0 else ()


_FORWARDS = (Kind.FORWARD, Kind.RECEIVE, Kind.SEND)


def values_of_chunks(
    graph: PlannedGraph, pipeline: PlannedPipeline
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return what every chunk gives to other chunks, and what it takes from them."""
    gives, takes = [], []
    for chunk in pipeline.chunks:
        segments = [graph.segments[number] for number in chunk.segments]
        made = {name for segment in segments for name in segment.gives}
        read = dict.fromkeys(name for segment in segments for name in segment.takes)
        gives.append(segments[-1].gives)
        takes.append(tuple(name for name in read if name not in made))
    return gives, takes


def instructions_of(pipeline: PlannedPipeline, place: PipelinePlace) -> tuple[Instruction, ...]:
    """Return the instructions of a position, as the plan's schedule orders them."""
    copy = pipeline.copies[place.copy]
    return schedule(
        pipeline.schedule,
        [Position(chunks) for chunks in pipeline.positions],
        copy.owners,
        pipeline.gradient_edges,
        len(copy.samples),
        {(chunk, position): Durations(*times) for chunk, position, *times in copy.durations},
        {(here, there): seconds for here, there, seconds in copy.transits},
    )[place.position]


class _Run:
    """The instructions of one step, or of one evaluated batch."""

    def __init__(
        self,
        program: PipelineModel,
        batches: Sequence[Batch],
        instructions: Sequence[Instruction],
        loss_scale: float = 1.0,
    ) -> None:
        self.loss_scale = loss_scale
        self.program, self.batches, self.instructions = program, batches, instructions
        self.losses: dict[int, Tensor] = {}
        self.passed: dict[tuple[int, int], Passed] = {}
        # Values and gradients that wait for the computation that wants them.
        self.arrived: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.wanted: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.backward_gave: dict[tuple[int, int], dict[str, Tensor]] = {}

    def run(self) -> None:
        trace = self.program.trace
        ahead = _receives_ahead(self.instructions)
        for place, instruction in enumerate(self.instructions):
            for upcoming in ahead[place]:
                self.expect(upcoming)
            with span(trace, instruction):
                self.carry_out(instruction)

    def carry_out(self, instruction: Instruction) -> None:
        key = (instruction.chunk, instruction.micro_batch)
        finality, weight_gradients = self.program._finality, self.program._weight_gradients
        match instruction.kind:
            case Kind.FORWARD:
                self.forward(*key)
            case Kind.BACKWARD:
                with finality.during(instruction), weight_gradients.accumulating():
                    self.backward(*key)
            case Kind.BACKWARD_INPUT:
                with weight_gradients.deferring(key):
                    self.backward(*key)
            case Kind.BACKWARD_WEIGHT:
                with finality.during(instruction, weight_gradients.left(key)) as added:
                    weight_gradients.accumulate(key, added)
            case Kind.SEND:
                self.send(instruction)
            case Kind.RECEIVE:
                self.receive(instruction)
            case Kind.SEND_GRADIENT:
                self.send_gradient(instruction)
            case Kind.RECEIVE_GRADIENT:
                self.receive_gradient(instruction)

    def forward(self, number: int, m: int) -> None:
        program = self.program
        chunk = program._chunks[number].of(m)
        taken = self.arrived.pop((number, m), {})
        for name in program._takes[number]:
            maker = program._maker[name]
            if maker in program._chunks:  # made here, by another chunk of this position
                value = self.passed[maker, m].made[name]
                taken[name] = value.detach().requires_grad_(value.requires_grad)
        program._loss.enter(m)
        passed = chunk.forward(taken, self.batches[program._batch_of[m]])
        self.passed[number, m] = passed
        if number == program._last:
            self.losses[m] = passed.made[chunk.gives[0]].detach()

    def backward(self, number: int, m: int) -> None:
        program = self.program
        chunk, passed = program._chunks[number].of(m), self.passed.pop((number, m))
        gradients = self.wanted.pop((number, m), {})
        if number == program._last:
            loss = passed.made[chunk.gives[0]]
            seed = program._loss.weight(m) * self.loss_scale
            gradients[chunk.gives[0]] = torch.full_like(loss, seed)
        known = chunk.backward(passed, gradients)
        gave = {name: known[name] for name in program._takes[number] if name in known}
        for name in list(gave):
            maker = program._maker[name]
            if maker in program._chunks:
                _add(self.wanted.setdefault((maker, m), {}), name, gave.pop(name))
        # A value that got no gradient (nothing here depended on it) is owed one of zeros.
        for name in program._takes[number]:
            if name not in gave and program._maker[name] not in program._chunks:
                gave[name] = torch.zeros_like(passed.made[name])
        self.backward_gave[number, m] = gave

    def send(self, instruction: Instruction) -> None:
        edge, m = (instruction.chunk, instruction.peer), instruction.micro_batch
        route = self.program.route
        targets = route.targets(instruction.peer, m)
        for number, name in enumerate(route.values[edge]):
            value = self.passed[instruction.chunk, m].made[name]
            wire = route.wire(edge, number, m, backward=False)
            self.program._transport.send(value, targets, wire)

    def receive(self, instruction: Instruction) -> None:
        edge, m = (instruction.peer, instruction.chunk), instruction.micro_batch
        route = self.program.route
        source = route.sources(instruction.peer, m)
        values = self.arrived.setdefault((instruction.chunk, m), {})
        for number, name in enumerate(route.values[edge]):
            value = self.program._transport.receive(source, route.wire(edge, number, m, False))
            values[name] = value.requires_grad_(
                route.gradient[edge] and value.is_floating_point() and torch.is_grad_enabled()
            )

    def send_gradient(self, instruction: Instruction) -> None:
        edge, m = (instruction.peer, instruction.chunk), instruction.micro_batch
        route = self.program.route
        gave = self.backward_gave[instruction.chunk, m]
        targets = route.targets(instruction.peer, m)
        for number, name in enumerate(route.values[edge]):
            if gave[name].is_floating_point():
                wire = route.wire(edge, number, m, backward=True)
                self.program._transport.send(gave[name], targets, wire)

    def receive_gradient(self, instruction: Instruction) -> None:
        edge, m = (instruction.chunk, instruction.peer), instruction.micro_batch
        route = self.program.route
        source = route.sources(instruction.peer, m)
        gradients = self.wanted.setdefault((instruction.chunk, m), {})
        made = self.passed[instruction.chunk, m].made
        for number, name in enumerate(route.values[edge]):
            if made[name].is_floating_point():
                wire = route.wire(edge, number, m, backward=True)
                _add(gradients, name, self.program._transport.receive(source, wire))

    def expect(self, instruction: Instruction) -> None:
        """Post the receives of an instruction that is still ahead."""
        backward = instruction.kind is Kind.RECEIVE_GRADIENT
        here, there, m = instruction.chunk, instruction.peer, instruction.micro_batch
        edge = (here, there) if backward else (there, here)
        route = self.program.route
        source = route.sources(there, m)
        for number in range(len(route.values[edge])):
            wire = route.wire(edge, number, m, backward)
            self.program._transport.expect(source, wire)


def _add(gradients: dict[str, Tensor], name: str, found: Tensor) -> None:
    gradients[name] = gradients[name] + found if name in gradients else found


def _receives_ahead(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """For each instruction, the receives to post before it is carried out, each once."""
    result: list[list[Instruction]] = []
    posted = 0
    for place in range(len(instructions)):
        due, computations, end = [], 0, place
        while end < len(instructions) and computations < _LOOKAHEAD:
            computations += instructions[end].kind in COMPUTATIONS
            end += 1
        for upcoming in instructions[posted:end]:
            if upcoming.kind in (Kind.RECEIVE, Kind.RECEIVE_GRADIENT):
                due.append(upcoming)
        posted = max(posted, end)
        result.append(due)
    return result
