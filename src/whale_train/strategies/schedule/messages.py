"""The order of a pipeline's messages, the same at both ends of every link.

NCCL matches the messages between two ranks by their order alone, and a communicator carries one
message at a time: a send leaves when the receive at the same position in the sequence is posted.
Each rank therefore posts the messages between itself and another rank in the order in which one
execution of the schedule sends them, with both directions in one sequence.

Such an order cannot deadlock, whatever the real durations are. Let a rank that is about to receive
a message, or has made one to send, first post all messages that precede it. Sends that precede a
receive were made earlier in that execution, so the order of the rank's own instructions guarantees
that they are ready; receives can be posted at any time. By induction over the execution, every
message that a computation needs then finds both ends posted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from whale_train.strategies.schedule.instructions import (
    COMPUTATIONS,
    RECEIVES,
    SENDS,
    ChunkDurations,
    Durations,
    Instruction,
    Kind,
    Transits,
)


class Message(NamedTuple):
    """A message of one micro-batch from chunk `source` to chunk `target`: values to a later chunk,
    or their gradients to an earlier one."""

    source: int
    target: int
    micro_batch: int

    @property
    def is_gradient(self) -> bool:
        """Return True if the message is a gradient."""
        return self.source > self.target

    @property
    def edge(self) -> tuple[int, int]:
        """Return the two chunks at the ends of the message, in forward order."""
        return min(self.source, self.target), max(self.source, self.target)


def message_of(instruction: Instruction) -> Message:
    """Return the message that a communication instruction sends or receives."""
    chunk, peer, micro_batch = instruction.chunk, instruction.peer, instruction.micro_batch
    if instruction.kind in SENDS:
        return Message(chunk, peer, micro_batch)
    assert instruction.kind in RECEIVES, instruction
    return Message(peer, chunk, micro_batch)


class _Moment(NamedTuple):
    """A time in the execution.

    clock: the time.
    depth: the length of the chain of instructions that leads to it. It orders dependent
        instructions that take no time.
    """

    clock: float
    depth: int


def messages_as_sent(
    instructions: Sequence[Sequence[Instruction]],
    durations: ChunkDurations | None = None,
    transits: Transits | None = None,
) -> tuple[Message, ...]:
    """Return all messages in the order in which they are sent if every position runs its
    `instructions` as soon as it can.

    `durations` and `transits` are as in `orders.schedule`. A missing transit takes no time. Raises
    ValueError for instructions that wait for each other.
    """
    now = [_Moment(0.0, 0)] * len(instructions)
    places = [0] * len(instructions)
    sent: dict[Message, tuple[_Moment, int]] = {}

    def carry_out(position: int, instruction: Instruction) -> bool:
        clock, depth = now[position]
        if instruction.kind in COMPUTATIONS:
            clock += _seconds(instruction, position, durations)
        else:
            message = message_of(instruction)
            if instruction.kind in SENDS:
                sent[message] = (_Moment(clock, depth), position)
            elif message not in sent:
                return False
            else:
                (left, before), _ = sent[message]
                arrival = left + (transits or {}).get(message[:2], 0.0)
                clock, depth = max(clock, arrival), max(depth, before)
        now[position] = _Moment(clock, depth + 1)
        return True

    moved = True
    while moved:
        moved = False
        for position, sequence in enumerate(instructions):
            while places[position] < len(sequence) and carry_out(
                position, sequence[places[position]]
            ):
                places[position] += 1
                moved = True
    if any(place < len(sequence) for place, sequence in zip(places, instructions, strict=True)):
        raise ValueError("the instructions of the positions wait for each other")
    return tuple(sorted(sent, key=lambda message: (*sent[message], message)))


def _seconds(instruction: Instruction, position: int, durations: ChunkDurations | None) -> float:
    chunk_durations = Durations() if durations is None else durations[instruction.chunk, position]
    return {
        Kind.FORWARD: chunk_durations.forward,
        Kind.BACKWARD: chunk_durations.backward_input + chunk_durations.backward_weight,
        Kind.BACKWARD_INPUT: chunk_durations.backward_input,
        Kind.BACKWARD_WEIGHT: chunk_durations.backward_weight,
    }[instruction.kind]
