"""The instructions that the positions of a pipeline run in a step.

A pipeline is cut into chunks 0..C-1 in forward order. A position is one place in it (a rank, or the
ranks of one shard group). Positions that hold the same chunks are the replicas of one stage; each
micro-batch of a chunk is computed by one of them, its owner. With S stages, stage s holds the
chunks s, s + S, s + 2S, ...: one, or several virtual stages (interleaving).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of an instruction. BACKWARD combines BACKWARD_INPUT and BACKWARD_WEIGHT."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    RECEIVE = "receive"
    SEND = "send"
    RECEIVE_GRADIENT = "receive_gradient"
    SEND_GRADIENT = "send_gradient"


COMPUTATIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
SENDS = (Kind.SEND, Kind.SEND_GRADIENT)
RECEIVES = (Kind.RECEIVE, Kind.RECEIVE_GRADIENT)
# The instruction that ends a backward, in one part or two: it makes the gradients of weights.
ENDS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class Instruction(NamedTuple):
    """One action of a position.

    kind: the action.
    chunk: the chunk of the position that the action is for.
    micro_batch: the micro-batch that the action is for.
    peer: for the four communication kinds, the chunk at the other end of the edge, at the position
        that owns this micro-batch in that chunk; -1 for other kinds.
    """

    kind: Kind
    chunk: int
    micro_batch: int
    peer: int = -1


@dataclass(frozen=True)
class Position:
    """A place in the pipeline.

    chunks: the chunks it holds, ascending.
    """

    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Durations:
    """Time of one micro-batch of one chunk at one position, in any common unit.

    forward: time of the forward.
    backward_input: time of the backward's gradients of inputs.
    backward_weight: time of the backward's gradients of weights.

    Raises ValueError unless all are finite and at least 0.
    """

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1

    def __post_init__(self) -> None:
        times = (self.forward, self.backward_input, self.backward_weight)
        if not all(isfinite(time) and time >= 0 for time in times):
            raise ValueError(f"durations must be finite and not negative: {times}")


Owners = Sequence[Sequence[int]]
Edges = Mapping[tuple[int, int], bool]
ChunkDurations = Mapping[tuple[int, int], Durations]
Transits = Mapping[tuple[int, int], float]


def in_flight(instructions: Iterable[Instruction]) -> int:
    """Return the peak number of (chunk, micro-batch) pairs whose activations a position holds at
    once.

    Activations are held from the forward to the end of the backward. A split backward ends with its
    weight part.
    """
    held = most = 0
    for instruction in instructions:
        if instruction.kind is Kind.FORWARD:
            held += 1
            most = max(most, held)
        elif instruction.kind in ENDS:
            held -= 1
    return most
