"""Describe the work of the ranks of a plan: segments of the model's graph, and a pipeline's chunks.

The resolver writes the program (`resolver/write.py`), the ranks read it (`runtime/assembly`).
Fields marked `OMITTED` are left out of plan.json where they are empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Interval = tuple[int, int]
# A 0 in JSON is read as 0 and not as 0.0, so that a plan read and written again is the same bytes.
Number = int | float
OMITTED = {"omitted": True}


@dataclass(frozen=True)
class PlannedShard:
    """The cut of a tensor, as in `layouts.types.Shard`.

    dim: dimension that is cut.
    axis: name of the axis along which it is cut.
    outer: repetitions of `pieces` (0: computed from the tensor's size, which depends on the batch).
    pieces: extents of the pieces of one repetition.
    """

    dim: int
    axis: str
    outer: int = 1
    pieces: tuple[int, ...] = field(default=(), metadata=OMITTED)


@dataclass(frozen=True)
class PlannedCast:
    """A change of a value's layout before it is read.

    user: name of the operation that reads the value (empty: the value leaves the segment).
    value: name of the value.
    kind: name of the collective.
    shard: cut of the target or else of the source (None: neither is cut).
    source: cut of the source of a `reshard`.
    ends: name of the value with the end offsets of each expert's rows, where rows are sent or
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
    """Operations that are executed differently than one by one with autograd's backward.

    kind: `rms_norm`, `grouped_keys`, `joined_products`, `gathered_products`, `own_gradients` or
        `overlapped_rows`, which strategies/graph/rewrites.py explains.
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
    gives: names of the values that leave the segment.
    layouts: layouts of the sharded values.
    casts: changes of layout between the operations.
    becomes: the distributed operation that replaces an operation, by name.
    random: for each operation that draws random numbers, `shared` where all members of a shard
        group draw the same numbers, or `own`.
    sums: the degree of each sum over the batch to which every replica adds its part, by name. The
        value of n samples is n^degree times the sum of the parts, each over n_r^degree of its own
        n_r samples (0: a sum, -1: a mean).
    changes: the value that an operation changes in place, by the operation's name.
    rewrites: groups of operations that are executed differently.
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

    axes: each member's interval [start, stop), in units, by the name of the axis.
    segments: the segments of the graph.
    """

    axes: Mapping[str, tuple[Interval, ...]]
    segments: tuple[PlannedSegment, ...]


@dataclass(frozen=True)
class PlannedChunk:
    """A part of a stage's model that runs without interruption.

    stage: number of the stage.
    segments: number of the one segment that it runs.
    recompute: `full` where all repeated blocks are recomputed in the backward, `some` where other
        modules are, or `none`.
    shares_samples: True if the members of a shard group take different samples of a micro-batch.
    own_losses: True if members that take different samples each have a loss of their own.
    recomputed: paths of the modules that are recomputed.
    offloaded: paths of the modules whose saved tensors are sent to the host.
    """

    stage: int
    segments: tuple[int, ...]
    recompute: Literal["full", "some", "none"]
    shares_samples: bool
    own_losses: bool = field(default=False, metadata=OMITTED)
    recomputed: tuple[str, ...] = field(default=(), metadata=OMITTED)
    offloaded: tuple[str, ...] = field(default=(), metadata=OMITTED)

    @property
    def segment(self) -> int:
        """Return the number of the chunk's segment."""
        (number,) = self.segments
        return number


@dataclass(frozen=True)
class PlannedCopy:
    """One replica of the pipeline.

    positions: ranks of every position.
    samples: intervals of the global batch, one for each micro-batch.
    owners: the position that runs a chunk of a micro-batch, by chunk and micro-batch.
    durations: rows of (chunk, position, seconds of a forward, seconds of input gradients, seconds
        of weight gradients).
    transits: rows of (chunk, chunk, seconds of a send). `durations` and `transits` determine the
        order of instructions.
    members: by position and micro-batch, the interval of each member of a shard group whose members
        divide its samples.
    """

    positions: tuple[tuple[int, ...], ...]
    samples: tuple[Interval, ...]
    owners: tuple[tuple[int, ...], ...]
    durations: tuple[tuple[int, int, Number, Number, Number], ...]
    transits: tuple[tuple[int, int, Number], ...]
    members: tuple[tuple[tuple[Interval, ...], ...], ...] = field(default=(), metadata=OMITTED)

    def shared_at(self, position: int) -> tuple[tuple[Interval, ...], ...]:
        """Return the members' intervals at a position, by micro-batch; () if no position has
        them."""
        return self.members[position] if self.members else ()


@dataclass(frozen=True)
class PlannedPipeline:
    """The assignment of chunks and micro-batches to the positions of a pipeline.

    schedule: name of the schedule.
    positions: chunks that every position holds.
    copies: replicas of the pipeline.
    edges: rows of (chunk, chunk, True if a gradient comes back).
    chunks: parts of the model that run without interruption.
    shared: TaskGraphs that hold a parameter of several stages, by path; the first one counts the
        parameter.
    one_backward: True if a step has one backward of everything that a rank holds, during which
        DistributedDataParallel reduces gradients.
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
        """Return, for each edge (a pair of chunks), True if a gradient comes back along it."""
        return {(start, end): gradient for start, end, gradient in self.edges}
