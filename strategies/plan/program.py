"""What the ranks of a plan run: the segments of the model's graph, and the pipeline's chunks.

The resolver writes it (`resolver/write.py`), the ranks read it (`runtime/assembly`). Fields marked
`OMITTED` are left out of plan.json where they are empty.
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
    """How a tensor is cut: `dim` along `axis`, as `layouts.types.Shard` says. `outer` is 0 where
    it follows the batch, and so from the tensor's own size."""

    dim: int
    axis: str
    outer: int = 1
    pieces: tuple[int, ...] = field(default=(), metadata=OMITTED)


@dataclass(frozen=True)
class PlannedCast:
    """A change of the layout of `value` before `user` reads it (empty: before the segment gives
    it). `kind` names the collective; `shard` is the cut it leads to, or that it undoes (None: there
    is neither); `source` the cut that a `reshard` starts from; `ends` the value that says where the
    rows of each expert end that are sent, or counted."""

    user: str
    value: str
    kind: str
    shard: PlannedShard | None
    source: PlannedShard | None = field(default=None, metadata=OMITTED)
    ends: str = field(default="", metadata=OMITTED)


@dataclass(frozen=True)
class PlannedSegment:
    """A part of the graph that one TaskGraph runs without interruption: its `operations`, the
    values it `takes` and `gives`, the `layouts` of those that are cut, the `casts` between,
    what distributed operation an operation `becomes`, and which draw `random` numbers that all
    members of a shard group `shared`. `sums` over the batch, to which every copy adds its part, are
    given with their degrees: n samples' is n^degree times the sum of the parts', each over its own
    samples' n_r^degree (0: a sum, -1: a mean)."""

    task_graph: int
    operations: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    layouts: Mapping[str, PlannedShard]
    casts: tuple[PlannedCast, ...]
    becomes: Mapping[str, str]
    random: Mapping[str, str] = field(default_factory=dict, metadata=OMITTED)
    sums: Mapping[str, int] = field(default_factory=dict, metadata=OMITTED)


@dataclass(frozen=True)
class PlannedGraph:
    """The model's graph, cut into `segments`. `axes` gives each member's [start, stop) along every
    axis that a layout names, in units of the axis."""

    axes: Mapping[str, tuple[Interval, ...]]
    segments: tuple[PlannedSegment, ...]


@dataclass(frozen=True)
class PlannedChunk:
    """The part of a stage's model that is run at once: the one of `segments`, by its number in the
    graph. `shares_samples`: the members of a shard group take different samples of a micro-batch,
    and, where they have `own_losses`, each a loss of its own samples."""

    stage: int
    segments: tuple[int, ...]
    recompute: Literal["full", "none"]
    shares_samples: bool
    own_losses: bool = field(default=False, metadata=OMITTED)

    @property
    def segment(self) -> int:
        """The number of its segment."""
        (number,) = self.segments
        return number


@dataclass(frozen=True)
class PlannedCopy:
    """One copy of the pipeline. `positions` are the ranks of every position, `samples` its
    micro-batches as intervals of the global batch, `owners` the position that runs a micro-batch,
    by chunk and micro-batch. `durations` are rows of (chunk, position, seconds of a forward, of
    inputs' gradients, of weights' gradients) and `transits` rows of (chunk, chunk, seconds), from
    which the order of instructions follows. `members` are, by position, the intervals
    of every micro-batch that the members of its shard group take, where they share its samples."""

    positions: tuple[tuple[int, ...], ...]
    samples: tuple[Interval, ...]
    owners: tuple[tuple[int, ...], ...]
    durations: tuple[tuple[int, int, Number, Number, Number], ...]
    transits: tuple[tuple[int, int, Number], ...]
    members: tuple[tuple[tuple[Interval, ...], ...], ...] = field(default=(), metadata=OMITTED)

    def shared_at(self, position: int) -> tuple[tuple[Interval, ...], ...]:
        """Return the members' intervals at a position, by micro-batch; nothing if none share."""
        return self.members[position] if self.members else ()


@dataclass(frozen=True)
class PlannedPipeline:
    """Who runs which chunk for which micro-batch. `positions` are the chunks that every position
    holds; `edges` rows of (chunk, chunk, whether a gradient comes back); `shared` the TaskGraphs
    that hold a parameter of several stages, the first of which counts it."""

    schedule: str
    positions: tuple[tuple[int, ...], ...]
    copies: tuple[PlannedCopy, ...]
    edges: tuple[tuple[int, int, bool], ...]
    chunks: tuple[PlannedChunk, ...]
    shared: Mapping[str, tuple[int, ...]]

    @property
    def gradient_edges(self) -> dict[tuple[int, int], bool]:
        """The edges between chunks, and whether a gradient comes back along each."""
        return {(start, end): gradient for start, end, gradient in self.edges}
