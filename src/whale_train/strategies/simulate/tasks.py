"""A step as tasks: the ranks' computations, messages and gradient reductions, in the runtime's
order.

An actor is a set of ranks that act as one (a replica of the model, or a shard group at a position
of a pipeline) and run the schedule's instructions. Owns the order; the caller gives the costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from whale_train.strategies.schedule.instructions import (
    COMPUTATIONS,
    ENDS,
    RECEIVES,
    SENDS,
    Instruction,
    Kind,
)
from whale_train.strategies.simulate.simulator import UPDATE, Lane, Task

PIECES = 8  # limit on the pieces in which a backward makes gradients ready to be reduced


def sum_pieces(elements: float, bucket_elements: int) -> int:
    """Return the number of pieces in which `elements` gradients are reduced in buckets, as the last
    backward makes them ready."""
    return max(1, min(PIECES, ceil(elements / bucket_elements)))


@dataclass(frozen=True)
class Cost:
    """Cost of an instruction.

    seconds: duration of the instruction.
    transfer_s: seconds of these that are spent in collectives.
    busy: the fraction of a send's time for which it occupies a processor.
    """

    seconds: float
    transfer_s: float = 0.0
    busy: float = 0.0


@dataclass(frozen=True)
class Actor:
    """Ranks that act as one in a step.

    ranks: the ranks.
    copy: number of their replica of the pipeline.
    instructions: the instructions they run, in order.
    cost: function that returns the cost of a computation, or of a send until it has arrived.
    update_s: seconds of the optimizer's update.
    """

    ranks: tuple[int, ...]
    copy: int
    instructions: Sequence[Instruction]
    cost: Callable[[Instruction], Cost]
    update_s: float


@dataclass(frozen=True)
class Sync:
    """A reduction of gradients over actors, for the chunks they hold.

    members: numbers of the actors.
    seconds: seconds of transfers.
    pieces: number of pieces in which the gradients become ready; each piece is then reduced.
    overlapped: True if the reduction overlaps with the last backward; if not, it has one piece.
    busy: the fraction of the transfers' time for which they occupy a rank's processor, which slows
        computation.
    gathers_s: seconds of all-gathering parameters after the update (ZeRO).
    """

    members: tuple[int, ...]
    seconds: float
    pieces: int = 1
    overlapped: bool = True
    busy: float = 0.0
    gathers_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """All work of a step.

    actors: the actors.
    syncs: the gradient reductions.
    norm_s: seconds of the gradient norm's all-reduce over all ranks.
    """

    actors: Sequence[Actor]
    syncs: Sequence[Sync]
    norm_s: float = 0.0


def floor_s(step: Step) -> float:
    """Return a lower bound on a step, in seconds: the computation of the busiest actor."""
    costs_of = (
        [
            actor.cost(instruction)
            for instruction in actor.instructions
            if instruction.kind in COMPUTATIONS
        ]
        for actor in step.actors
    )
    return max(sum(cost.seconds - cost.transfer_s for cost in costs) for costs in costs_of)


def tasks_of(step: Step) -> list[Task]:
    """Return the tasks of a step, each after those it waits for."""
    return _Writer(step).written()


class _Writer:
    """Writer of the tasks of one step, in the runtime's order."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.tasks: list[Task] = []
        # By actor: its last task, and the tasks that make its gradients ready, piece by piece.
        self.last: list[int | None] = [None] * len(step.actors)
        self.ready: list[list[int]] = [[] for _ in step.actors]
        self.sent: dict[tuple[int, bool, int, int, int], int] = {}
        self.final = [_last_backwards(actor.instructions) for actor in step.actors]
        # By actor: the pieces in which it makes gradients ready, and the processor seconds that the
        # reduction of one piece takes from it.
        self.pieces = [1] * len(step.actors)
        self.carried = [0.0] * len(step.actors)
        overlapped = [(sync, m) for sync in step.syncs if sync.overlapped for m in sync.members]
        for sync, member in overlapped:
            self.pieces[member] = max(self.pieces[member], sync.pieces)
        for sync, member in overlapped:
            others = self.pieces[member] * len(self.final[member]) - 1  # all but the last
            if others > 0:
                beside = sync.seconds * (1 - 1 / sync.pieces)
                self.carried[member] += beside * sync.busy / others

    def written(self) -> list[Task]:
        """Return the tasks of the step: instructions, gradient reductions, the norm, updates and
        all-gathers."""
        self.run()
        summed = self.sums()
        if self.step.norm_s:
            everyone = tuple(rank for actor in self.step.actors for rank in actor.ranks)
            before = (n for number in range(len(self.last)) for n in self.after(number))
            waits = tuple(
                dict.fromkeys((*before, *(n for actor_sums in summed for n in actor_sums)))
            )
            seconds = self.step.norm_s
            task = Task(everyone, Lane.COMPUTE, seconds, waits, seconds, UPDATE)
            norm = self.add(task)
            self.last = [norm for _ in self.last]
        for number, actor in enumerate(self.step.actors):
            waits = (*self.after(number), *summed[number])
            task = Task(actor.ranks, Lane.COMPUTE, actor.update_s, waits, 0.0, UPDATE)
            self.last[number] = self.add(task)
        for sync in self.step.syncs:
            if sync.gathers_s:
                ranks = tuple(r for member in sync.members for r in self.step.actors[member].ranks)
                waits = tuple(n for member in sync.members for n in self.after(member))
                seconds = sync.gathers_s
                task = Task(ranks, Lane.COMPUTE, seconds, waits, seconds, UPDATE)
                number = self.add(task)
                for member in sync.members:
                    self.last[member] = number
        return self.tasks

    def add(self, task: Task) -> int:
        """Append a task and return its number."""
        self.tasks.append(task)
        return len(self.tasks) - 1

    def after(self, number: int) -> tuple[int, ...]:
        """Return the tasks that an actor's next task waits for."""
        last = self.last[number]
        return () if last is None else (last,)

    def run(self) -> None:
        """Add the tasks of every actor's instructions, each receive after its send."""
        at = [0] * len(self.step.actors)
        arrived: list[list[int]] = [[] for _ in self.step.actors]
        moved = True
        while moved:
            moved = False
            for number, actor in enumerate(self.step.actors):
                instructions, start, here = actor.instructions, at[number], arrived[number]
                place, end = start, len(instructions)
                while place < end:
                    instruction = instructions[place]
                    if instruction.kind in RECEIVES:
                        sent = self.sent.get(_wire(actor.copy, instruction))
                        if sent is None:
                            break
                        here.append(sent)
                    elif instruction.kind in SENDS:
                        self.send(number, instruction)
                    else:
                        self.compute(number, place, here)
                        here.clear()
                    place += 1
                moved |= place > start
                at[number] = place
        assert all(
            position == len(actor.instructions)
            for position, actor in zip(at, self.step.actors, strict=True)
        ), "the schedule waits for what nobody sends"

    def compute(self, number: int, place: int, arrived: Sequence[int]) -> None:
        """Add the tasks of the computation at index `place` of actor `number`, split into pieces if
        it is a last backward. The first one waits for the messages `arrived`."""
        actor, final = self.step.actors[number], self.final[number]
        instruction = actor.instructions[place]
        cost = actor.cost(instruction)
        is_final = place in final
        pieces = self.pieces[number] if is_final else 1
        seconds, transfer = cost.seconds / pieces, cost.transfer_s / pieces
        waits = (*self.after(number), *arrived)
        for piece in range(1, pieces + 1):
            task = Task(actor.ranks, Lane.COMPUTE, seconds, waits, transfer, "", instruction)
            done = self.last[number] = self.add(task)
            waits = (done,)
            if is_final:
                self.ready[number].append(done)
                # The reduction of each piece but the last overlaps with the next computation.
                carried = self.carried[number]
                if carried and (piece < pieces or place < max(final)):
                    beside = Task(actor.ranks, Lane.COMPUTE, carried, waits, carried, _SUM)
                    self.last[number] = self.add(beside)
                    waits = self.after(number)

    def send(self, number: int, instruction: Instruction) -> None:
        """Add the task of a send of actor `number`."""
        actor = self.step.actors[number]
        cost, waits, sender = actor.cost(instruction), self.after(number), actor.ranks[:1]
        # The link of one member stands for those of the whole group, which send at the same time.
        task = Task(sender, Lane.LINK, cost.seconds, waits, 0.0, "", instruction, cost.busy)
        self.sent[_wire(actor.copy, instruction)] = self.add(task)

    def sums(self) -> list[list[int]]:
        """Add the gradient reductions, and return those that each actor's update waits for."""
        by_actor: list[list[int]] = [[] for _ in self.step.actors]
        for sync in self.step.syncs:
            ranks = tuple(self.step.actors[member].ranks[0] for member in sync.members)
            pieces = sync.pieces if sync.overlapped else 1
            for piece in range(pieces):
                waits = []
                for member in sync.members:
                    ready = self.ready[member]
                    # An actor with more pieces than this reduction has several of them in one.
                    waits.append(ready[(piece + 1) * len(ready) // pieces - 1])
                # The load of an overlapped reduction is already in `carried`.
                beside = sync.overlapped and piece + 1 < pieces
                busy = 0.0 if beside else sync.busy
                seconds = sync.seconds / pieces
                task = Task(ranks, Lane.LINK, seconds, tuple(waits), name=_SUM, busy=busy)
                number = self.add(task)
                for member in sync.members:
                    by_actor[member].append(number)
        return by_actor


_SUM = "sum of gradients"


def _wire(copy: int, instruction: Instruction) -> tuple[int, bool, int, int, int]:
    """Return the key that a send and its receive share."""
    kind, chunk, m, peer = instruction
    if kind is Kind.SEND or kind is Kind.SEND_GRADIENT:
        return copy, kind is Kind.SEND_GRADIENT, chunk, peer, m
    return copy, kind is Kind.RECEIVE_GRADIENT, peer, chunk, m


def _last_backwards(instructions: Sequence[Instruction]) -> set[int]:
    """Return the indices of the backwards after which the gradients of their chunk are complete."""
    last: dict[int, int] = {}
    for place, instruction in enumerate(instructions):
        if instruction.kind in ENDS:
            last[instruction.chunk] = place
    return set(last.values())
