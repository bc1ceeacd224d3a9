"""The instructions of every position of a pipeline, communication included, for one step.

Owns the owner of every micro-batch, and the positions of sends and receives; `list_scheduling.py`
owns the order in which a position computes.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from whale_train.strategies.schedule.apportion import optimal_shares
from whale_train.strategies.schedule.instructions import (
    ChunkDurations,
    Edges,
    Instruction,
    Kind,
    Owners,
    Position,
    Transits,
)
from whale_train.strategies.schedule.list_scheduling import (
    ChunkLinks,
    ScheduledPipeline,
    simulated_orders,
)


def schedule(
    name: str,
    positions: Sequence[Position],
    owners: Owners,
    edges: Edges,
    micro_batches: int,
    durations: ChunkDurations | None = None,
    transits: Transits | None = None,
) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of every position, in the order in which it executes them.

    name: the name of the schedule.
    positions: the places of the pipeline, with their chunks.
    owners: `owners[chunk][m]` is the index of the position that computes micro-batch m of the
        chunk.
    edges: has a key (from, to) for every pair of chunks between which values flow; the value is
        True if a gradient flows back.
    micro_batches: number of micro-batches in a step.
    durations: `durations[chunk, position]`; None for 1, 1, 1 everywhere.
    transits: travel time of a message from one chunk to another, in the same unit; a missing pair
        takes no time.

    Values that cross to another position are received just before the computation that needs them
    and sent just after the one that made them, by ascending peer. Sends must not block. Raises
    ValueError for an unknown name and for arguments that do not describe a pipeline.
    """
    pipeline = ScheduledPipeline(name, positions, owners, edges, micro_batches, durations, transits)
    simulation = simulated_orders(pipeline)
    return tuple(
        tuple(_with_communication(computations, position, owners, simulation.links))
        for position, computations in enumerate(simulation.computations)
    )


def makespan(
    name: str,
    positions: Sequence[Position],
    owners: Owners,
    edges: Edges,
    micro_batches: int,
    durations: ChunkDurations | None = None,
    transits: Transits | None = None,
) -> float:
    """Return the time at which the last position is done, in the unit of `durations`. The arguments
    and the errors are those of `schedule`."""
    pipeline = ScheduledPipeline(name, positions, owners, edges, micro_batches, durations, transits)
    return simulated_orders(pipeline).clock


def owners(weights: Sequence[float], micro_batches: int) -> tuple[int, ...]:
    """Return the owner of each micro-batch of a stage, as the replica's index in `weights`.

    `weights` are the replicas' speeds (positive, any common unit). The numbers of micro-batches
    minimise the finish of the slowest replica (`optimal_shares`). Each replica owns at least one if
    there are enough, since a replica without any could not take part in a step.

    Micro-batches are dealt by smooth weighted round robin: every turn credits each replica with its
    number, and the replica with the most credit (ties: the first) takes the micro-batch and pays
    the sum of the numbers. No replica is ever a whole micro-batch ahead of its share, and after
    `micro_batches` turns every credit is spent. Raises ValueError for weights that are not positive
    and finite, and for no weights.
    """
    return _dealt(tuple(weights), micro_batches)


@lru_cache(maxsize=1 << 12)
def _dealt(weights: tuple[float, ...], micro_batches: int) -> tuple[int, ...]:
    minimum = int(micro_batches >= len(weights))
    counts = optimal_shares(micro_batches, weights, [micro_batches] * len(weights), minimum)
    if counts is None or not counts:
        raise ValueError(f"{micro_batches} micro-batches cannot be shared by {len(weights)}")
    if len(set(counts)) == 1:  # in turns: each replica has the most credit once a round
        return tuple(range(len(counts))) * counts[0]
    credits = [0] * len(counts)
    dealt = []
    for _ in range(micro_batches):
        credits = [credit + count for credit, count in zip(credits, counts, strict=True)]
        owner = credits.index(max(credits))
        credits[owner] -= micro_batches
        dealt.append(owner)
    return tuple(dealt)


def _with_communication(
    computations: Iterable[Instruction], here: int, owners: Owners, links: ChunkLinks
) -> Iterator[Instruction]:
    """Yield the computations of position `here`, each between its receives and its sends."""
    for work in computations:
        kind, chunk, m, _ = work
        if kind is Kind.BACKWARD_WEIGHT:
            yield work
            continue
        receive, send = Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT
        before, after = links.gradient_targets[chunk], links.gradient_sources[chunk]
        if kind is Kind.FORWARD:
            receive, send = Kind.RECEIVE, Kind.SEND
            before, after = links.sources[chunk], links.targets[chunk]
        for peer in before:
            if owners[peer][m] != here:
                yield Instruction(receive, chunk, m, peer)
        yield work
        for peer in after:
            if owners[peer][m] != here:
                yield Instruction(send, chunk, m, peer)
