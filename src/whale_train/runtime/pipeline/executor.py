"""Carry out one rank's part of a pipeline: the instructions of its position.

`strategies/schedule/orders.py` decides the order of the instructions; this file carries them out. A
strategy without a pipeline is one chunk on every rank, and runs in the same way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from whale_train.runtime.base.answers import Int64s
from whale_train.runtime.base.step_types import (
    Batch,
    Evaluation,
    EvaluationBatches,
    PendingLoss,
    scaled_ones,
)
from whale_train.runtime.base.trace import Trace, span
from whale_train.runtime.comms.p2p import Transport
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.graph.expert_loads import ExpertLoads
from whale_train.runtime.graph.segment import Counts
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.kernels.weight_gradients import WeightGradients
from whale_train.runtime.loss.micro_batch_loss import MicroBatchLoss
from whale_train.runtime.pipeline.chunk import Chunk, SavedForBackward
from whale_train.runtime.pipeline.grad_ready import Finality
from whale_train.runtime.pipeline.route import MessageTypes, Orders, Route
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.schedule.instructions import (
    COMPUTATIONS,
    RECEIVES,
    Instruction,
    Kind,
)
from whale_train.strategies.schedule.messages import Message, message_of

_LOOKAHEAD = 2  # computations between a posted receive and its use


class PipelineModel:
    """The chunks of one rank and the instructions that run them.

    A step runs inside the context of `casting_once`, in which each weight is cast to 16 bits at
    most once.
    """

    def __init__(
        self,
        plan: Plan,
        route: Route,
        chunks: Mapping[int, Chunk],
        loss: MicroBatchLoss,
        types: MessageTypes,
        transport: Transport,
        counts: Counts,
        weight_gradients: WeightGradients,
        shared_random: Sequence[SharedRandom],
        casting_once: Callable[[], AbstractContextManager[None]],
        loads: ExpertLoads | None = None,
    ) -> None:
        self.loads = loads
        assert plan.pipeline is not None
        self._casting_once = casting_once
        self.shared_random = shared_random
        self.route, self.place = route, route.place
        self._plan = plan.pipeline
        self._training = Orders.of(plan.pipeline, route)
        self.instructions = self._training.instructions
        self.trace: Trace | None = None
        self._chunks, self._loss = chunks, loss
        self._types, self._transport = types, transport
        self._takes, self._maker = route.takes, route.maker
        self._last = len(route.gives) - 1
        last = plan.pipeline.chunks[self._last]
        self._shares_samples = last.shares_samples
        # If all members have the same loss, only the first member's counts.
        self._counts_loss = last.own_losses or self.place.index == 0
        self._counts = counts
        self._weight_gradients = weight_gradients
        self._finality = Finality(chunks, self.instructions)
        owned = route.copy.owners[min(chunks)]
        micro_batches = [m for m, owner in enumerate(owned) if owner == self.place.position]
        self._batch_of = {m: i for i, m in enumerate(micro_batches)}

    @cached_property
    def _evaluation(self) -> Orders:
        """Return the orders of this rank in an evaluation: forwards and their messages."""
        return Orders.of(self._plan, self.route, _FORWARDS)

    @property
    def passing(self) -> Sequence[Tensor]:
        """Return the values in transit between this rank and others."""
        return self._transport.passing

    @property
    def engines(self) -> Sequence[Engine]:
        """Return the engines of all chunks, each once."""
        engines = (engine for chunk in self._chunks.values() for engine in chunk.engines)
        return tuple({id(engine): engine for engine in engines}.values())

    def forward_backward(
        self, batches: Sequence[Batch], loss_scale: Tensor | None = None
    ) -> PendingLoss:
        """Run the forwards and backwards of a step, and return its loss, which is still being
        reduced.

        `batches` are the micro-batches of this rank. `loss_scale` (a scalar) multiplies the
        gradients.
        """
        run = _Run(self, batches, self._training, loss_scale)
        if self.loads is not None:
            self.loads.begin()
        self._loss.begin(self._piece_batches(batches))
        with self._casting_once():
            run.run()
        for engine in self.engines:
            engine.finish_backward()
        self._transport.finish()
        return self._loss.total(run.losses if self._counts_loss else {})

    @torch.no_grad()
    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        """Return the means over the evaluation batches `held`. A collective of all ranks."""
        pieces = ((x.weight, y) for x in held for y in self._piece_batches(x.micro_batches))
        self._loss.begin_evaluation(pieces, held.samples)
        counted = self._last in self._chunks and self._counts_loss
        sums = torch.zeros(3, dtype=torch.float64)
        self._counts.answers = held.answers if counted else None
        self._counts.predicts = held.answers is not None and held.answers.predicts
        with ExitStack() as stack:
            for chunk in self._chunks.values():
                stack.enter_context(chunk.evaluating())
            for batch in held:
                self._counts.weight = batch.weight
                run = _Run(self, batch.micro_batches, self._evaluation, evaluated=batch.samples)
                run.run()
                self._transport.finish()
                loss = sum(float(x) * self._loss.weight(m) for m, x in run.losses.items())
                seen = (loss, *self._counts.take())
                if counted:
                    sums += batch.weight * torch.tensor(seen, dtype=torch.float64)
        return self._loss.evaluation(sums)

    def _piece_batches(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches whose targets this rank counts.

        If members share samples, each counts its own; in other groups the first member counts all.
        """
        if self._last not in self._chunks:
            return ()
        return batches if self._shares_samples or self.place.index == 0 else ()


_FORWARDS = (Kind.FORWARD, Kind.RECEIVE, Kind.SEND)


class _Run:
    """The execution of the instructions of one step or of one evaluated batch.

    evaluated: the numbers of an evaluated batch's samples in their set, int64 `[global batch]`.
    """

    def __init__(
        self,
        program: PipelineModel,
        batches: Sequence[Batch],
        orders: Orders,
        loss_scale: Tensor | None = None,
        evaluated: Int64s | None = None,
    ) -> None:
        self.loss_scale, self.evaluated = loss_scale, evaluated
        self.program, self.batches, self.orders = program, batches, orders
        self.losses: dict[int, Tensor] = {}
        self.passed: dict[tuple[int, int], SavedForBackward] = {}
        # Received values and gradients, by the chunk and micro-batch that read them.
        self.arrived: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.wanted: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.backward_gave: dict[tuple[int, int], dict[str, Tensor]] = {}

    def run(self) -> None:
        """Carry out all instructions; receives are posted ahead of their use."""
        trace, instructions = self.program.trace, self.orders.instructions
        self.program._transport.begin(self.orders.passages)
        ahead = receives_ahead(instructions)
        for place, instruction in enumerate(instructions):
            for upcoming in ahead[place]:
                message = message_of(upcoming)
                self.program._transport.expect(message, self.program.route.source(message))
            with span(trace, instruction):
                self.carry_out(instruction)

    def carry_out(self, instruction: Instruction) -> None:
        """Carry out one instruction."""
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
        """Run the forward of chunk `number` for micro-batch `m`."""
        program = self.program
        chunk = program._chunks[number].of(m)
        taken = self.arrived.pop((number, m), {})
        for name in program._takes[number]:
            maker = program._maker[name]
            if maker in program._chunks:  # another chunk of this rank has computed the value
                value = self.passed[maker, m].made[name]
                taken[name] = value.detach().requires_grad_(value.requires_grad)
        program._loss.enter(m)
        if self.evaluated is not None:
            program._counts.begin(self.evaluated[program._loss.interval(m)])
        loads = program.loads
        with nullcontext() if loads is None else loads.counting():
            passed = chunk.forward(taken, self.batches[program._batch_of[m]])
        self.passed[number, m] = passed
        if number == program._last:
            self.losses[m] = passed.made[chunk.gives[0]].detach()

    def backward(self, number: int, m: int) -> None:
        """Run the backward of chunk `number` for micro-batch `m`."""
        program = self.program
        chunk, passed = program._chunks[number].of(m), self.passed.pop((number, m))
        gradients = self.wanted.pop((number, m), {})
        if number == program._last:
            loss = passed.made[chunk.gives[0]]
            seed = scaled_ones(loss, self.loss_scale, program._loss.weight(m))
            gradients[chunk.gives[0]] = seed
        known = chunk.backward(passed, gradients)
        gave = {name: known[name] for name in program._takes[number] if name in known}
        for name in list(gave):
            maker = program._maker[name]
            if maker in program._chunks:
                _add(self.wanted.setdefault((maker, m), {}), name, gave.pop(name))
        # The sender of a value that nothing here depended on waits for its gradient: send zeros.
        for name in program._takes[number]:
            if name not in gave and program._maker[name] not in program._chunks:
                gave[name] = torch.zeros_like(passed.made[name])
        self.backward_gave[number, m] = gave

    def send(self, instruction: Instruction) -> None:
        values = self.passed[instruction.chunk, instruction.micro_batch].made
        self.pass_on(message_of(instruction), values)

    def send_gradient(self, instruction: Instruction) -> None:
        gave = self.backward_gave[instruction.chunk, instruction.micro_batch]
        message = message_of(instruction)
        names = self.program._types.names(message)
        # The gradient of a value goes to the one chunk that computed the value, so it can be
        # removed.
        self.pass_on(message, {name: gave.pop(name) for name in names})

    def pass_on(self, message: Message, named: Mapping[str, Tensor]) -> None:
        """Send the values of `message`, taken from `named`."""
        program = self.program
        values = [named[name] for name in program._types.names(message)]
        program._transport.send(message, values, program.route.targets(message))

    def receive(self, instruction: Instruction) -> None:
        message = message_of(instruction)
        gradient = self.program.route.gradient[message.edge] and torch.is_grad_enabled()
        values = self.arrived.setdefault((instruction.chunk, instruction.micro_batch), {})
        for name, value in self.taken_in(message):
            values[name] = value.requires_grad_(gradient and value.is_floating_point())

    def receive_gradient(self, instruction: Instruction) -> None:
        gradients = self.wanted.setdefault((instruction.chunk, instruction.micro_batch), {})
        for name, gradient in self.taken_in(message_of(instruction)):
            _add(gradients, name, gradient)

    def taken_in(self, message: Message) -> Iterator[tuple[str, Tensor]]:
        """Wait for the values of `message`, and yield them with their names."""
        program = self.program
        values = program._transport.receive(message, program.route.source(message))
        yield from zip(program._types.names(message), values, strict=True)


def _add(gradients: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    """Add `gradient` to the gradient of `name`, out of place."""
    gradients[name] = gradients[name] + gradient if name in gradients else gradient


def receives_ahead(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Return, for each instruction, the receives to post before it.

    A receive is posted up to `_LOOKAHEAD` computations ahead of its use; it is in one list only.
    """
    result: list[list[Instruction]] = []
    posted = 0
    for place in range(len(instructions)):
        due, computations, end = [], 0, place
        while end < len(instructions) and computations < _LOOKAHEAD:
            computations += instructions[end].kind in COMPUTATIONS
            end += 1
        for upcoming in instructions[posted:end]:
            if upcoming.kind in RECEIVES:
                due.append(upcoming)
        posted = max(posted, end)
        result.append(due)
    return result
