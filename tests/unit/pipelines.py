"""Pipelines of chunks for the tests of schedules, and their orders in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from whale_train.strategies.schedule.instructions import Durations, Instruction, Kind, Position
from whale_train.strategies.schedule.orders import makespan, schedule

COMPUTATIONS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}
Lists = Sequence[Sequence[Instruction]]


@dataclass(frozen=True)
class Pipeline:
    """The arguments of `schedule` after the name."""

    positions: tuple[Position, ...]
    owners: tuple[tuple[int, ...], ...]
    edges: dict[tuple[int, int], bool]
    micro_batches: int
    durations: dict[tuple[int, int], Durations] | None = None
    transits: dict[tuple[int, int], float] | None = None

    def run(self, name: str) -> Lists:
        given = (self.positions, self.owners, self.edges, self.micro_batches)
        return schedule(name, *given, self.durations, self.transits)

    def makespan(self, name: str) -> float:
        given = (self.positions, self.owners, self.edges, self.micro_batches)
        return makespan(name, *given, self.durations, self.transits)


def wide(widths: Sequence[int], micro_batches: int, chunks_each: int = 1) -> Pipeline:
    """Stages of these widths, the micro-batches dealt to their replicas in turn."""
    stages = len(widths)
    first = [sum(widths[:stage]) for stage in range(stages)]
    chunks = range(stages * chunks_each)
    return Pipeline(
        positions=tuple(
            Position(tuple(range(stage, len(chunks), stages)))
            for stage, width in enumerate(widths)
            for _ in range(width)
        ),
        owners=tuple(
            tuple(first[c % stages] + m % widths[c % stages] for m in range(micro_batches))
            for c in chunks
        ),
        edges={(c, c + 1): True for c in chunks[:-1]},
        micro_batches=micro_batches,
    )


def regular(stages: int, micro_batches: int, chunks_each: int = 1) -> Pipeline:
    return wide([1] * stages, micro_batches, chunks_each)


def words(instructions: Sequence[Instruction]) -> str:
    """The computations of a position of one chunk, as in "F0 F1 B0 B1"."""
    done = (each for each in instructions if each.kind in COMPUTATIONS)
    return " ".join(f"{COMPUTATIONS[each.kind]}{each.micro_batch}" for each in done)
