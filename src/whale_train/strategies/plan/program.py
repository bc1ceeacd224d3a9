"""Describe what the ranks of a plan run: segments of the model's graph, and a pipeline's chunks.

The resolver writes the program (`resolver/write.py`), the ranks read it (`runtime/assembly`).
Fields marked `OMITTED` are left out of plan.json where they are empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Interval = tuple[int, int]
# What JSON has as 0 is read as 0 and not as 0.0: a plan read and written again is the same bytes.
Number = int | float
OMITTED = {"omitted": True}


@dataclass(frozen=True)
class PlannedShard:
    """How a tensor is cut, as `layouts.types.Shard` says.

    dim: dimension that is cut.
    axis: name of the axis along which it is cut.
    outer: repetitions of `pieces` (0: they follow the batch, and so from the tensor's own size).
    pieces: extents of the pieces of one repetition.
    """

    dim: int
    axis: str
    outer: int = 1
    pieces: tuple[int, ...] = field(default=(), metadata=OMITTED)


@dataclass(frozen=True)
class PlannedCast:
    """A change of a value's layout before it is read.

    user: name of the operation that reads the value (empty: the segment gives it).
    value: name of the value.
    kind: name of the collective.
    shard: cut that the cast leads to, or that it undoes (None: there is neither).
    source: cut that a `reshard` starts from.
    ends: name of the value that says where the rows of each expert end, where rows are sent or
        counted.
    """

    user: str
    value: str
    kind: str
    shard: PlannedShard | None
    source: PlannedShard | None = field(default=None, metadata=OMITTED)
    ends: str = field(default="", metadata=OMITTED)


@dataclass(frozen=True)
class PlannedRewrite:
    """Operations that run in another way than one by one with autograd's backward.

    kind: `rms_norm`, `grouped_keys`, `joined_products`, `own_gradients` or `overlapped_rows`, of
        which strategies/graph/rewrites.py says what they are.
    operations: names of the operations, in the order they run.
    """

    kind: str
    operations: tuple[str, ...]


@dataclass(frozen=True)
class PlannedSegment:
    """A part of the graph that one TaskGraph runs without interruption.

    task_graph: id of the TaskGraph.
    operations: names of the operations, in the order they run.
    takes: names of the values that the segment reads.
    gives: names of the values that it hands on.
    layouts: layouts of the values that are cut.
    casts: changes of layout between the operations.
    becomes: by operation, the distributed operation that takes its place.
    random: by operation that draws random numbers, `shared` where all members of a shard group draw
        the same numbers, or `own`.
    sums: by value that is a sum over the batch, to which every copy adds its part, its degree. The
        value of n samples is n^degree times the sum of the parts, each over its own samples'
        n_r^degree (0: a sum, -1: a mean).
    changes: by operation that changes a value in place, that value.
    rewrites: groups of operations that run in another way.
    """

    task_graph: int
    operations: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    layouts: Mapping[str, PlannedShard]
    casts: tuple[PlannedCast, ...]
    becomes: Mapping[str, str]
    random: Mapping[str, str] = field(default_factory=dict, metadata=OMITTED)
    sums: Mapping[str, int] = field(default_factory=dict, metadata=OMITTED)
    changes: Mapping[str, str] = field(default_factory=dict, metadata=OMITTED)
    rewrites: tuple[PlannedRewrite, ...] = field(default=(), metadata=OMITTED)


@dataclass(frozen=True)
class PlannedGraph:
    """The model's graph, cut into segments.

    axes: by axis that a layout names, each member's interval [start, stop), in units of the axis.
    segments: the segments of the graph.
    """

    axes: Mapping[str, tuple[Interval, ...]]
    segments: tuple[PlannedSegment, ...]


@dataclass(frozen=True)
class PlannedChunk:
    """The part of a stage's model that is run at once.

    stage: number of the stage.
    segments: number, in the graph, of the one segment that it runs.
    recompute: `full` where the chunk is recomputed, or `none`.
    shares_samples: whether the members of a shard group take different samples of a micro-batch.
    own_losses: whether members that share samples have each a loss of their own samples.
    """

    stage: int
    segments: tuple[int, ...]
    recompute: Literal["full", "none"]
    shares_samples: bool
    own_losses: bool = field(default=False, metadata=OMITTED)

    @property
    def segment(self) -> int:
        """Return the number of the chunk's segment."""
        (number,) = self.segments
        return number


@dataclass(frozen=True)
class PlannedCopy:
    """One copy of the pipeline.

    positions: ranks of every position.
    samples: intervals of the global batch, one for each micro-batch.
    owners: by chunk and micro-batch, the position that runs it.
    durations: rows of (chunk, position, seconds of a forward, seconds of inputs' gradients, seconds
        of weights' gradients).
    transits: rows of (chunk, chunk, seconds of a send). The order of instructions follows from
        `durations` and `transits`.
    members: by position and micro-batch, the interval of each member of a shard group whose members
        share its samples.
    """

    positions: tuple[tuple[int, ...], ...]
    samples: tuple[Interval, ...]
    owners: tuple[tuple[int, ...], ...]
    durations: tuple[tuple[int, int, Number, Number, Number], ...]
    transits: tuple[tuple[int, int, Number], ...]
    members: tuple[tuple[tuple[Interval, ...], ...], ...] = field(default=(), metadata=OMITTED)

    def shared_at(self, position: int) -> tuple[tuple[Interval, ...], ...]:
        """Return the members' intervals at a position, by micro-batch; nothing if no position
        shares."""
        return self.members[position] if self.members else ()


@dataclass(frozen=True)
class PlannedPipeline:
    """Who runs which chunk of the pipeline for which micro-batch.

    schedule: order of the work.
    positions: chunks that every position holds.
    copies: copies of the pipeline.
    edges: rows of (chunk, chunk, whether a gradient comes back).
    chunks: parts of the model that are run at once.
    shared: by parameter that several stages hold, their TaskGraphs, of which the first counts it.
    one_backward: whether a step has one backward of all that a rank holds, in which
        DistributedDataParallel sums gradients.
    """

    schedule: str
    positions: tuple[tuple[int, ...], ...]
    copies: tuple[PlannedCopy, ...]
    edges: tuple[tuple[int, int, bool], ...]
    chunks: tuple[PlannedChunk, ...]
    shared: Mapping[str, tuple[int, ...]]
    one_backward: bool = field(default=False, metadata=OMITTED)

    @property
    def gradient_edges(self) -> dict[tuple[int, int], bool]:
        """Return whether a gradient comes back along each edge, by the two chunks of the edge."""
        return {(start, end): gradient for start, end, gradient in self.edges}
