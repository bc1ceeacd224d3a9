"""The segments of a cut graph in the form that a plan has: layouts whose sizes do not depend on the
batch."""

from collections.abc import Sequence

from whale_train.strategies.graph.operation_graph import OperationGraph, Size
from whale_train.strategies.graph.rewrites import Rewrite, run_order
from whale_train.strategies.layouts.propagation import Cast, Shard
from whale_train.strategies.layouts.segment import Segment
from whale_train.strategies.layouts.types import DispatchedRows
from whale_train.strategies.plan.program import (
    PlannedCast,
    PlannedRewrite,
    PlannedSegment,
    PlannedShard,
)


def planned_segment(
    graph: OperationGraph, segment: Segment, rewrites: Sequence[Rewrite]
) -> PlannedSegment:
    """Return one segment of `graph` in the form that a plan has.

    It has the operations in the order they run, the values that the segment takes and gives, the
    layouts of sharded values, and the casts, replacements and `rewrites` to write into the graph.
    """
    typed = segment.assignment
    values = {*segment.operations, *segment.takes}
    return PlannedSegment(
        task_graph=segment.task_graph,
        operations=run_order(graph, segment.operations, rewrites),
        takes=tuple(segment.takes),
        gives=tuple(segment.gives),
        layouts={
            name: planned_shard(layout)
            for name, layout in (typed.layouts if typed else {}).items()
            if isinstance(layout, Shard) and name in values
        },
        casts=tuple(_cast(cast) for cast in (typed.casts if typed else ())),
        becomes=dict(typed.becomes) if typed else {},
        random=dict(typed.random) if typed else {},
        sums=dict(segment.sums),
        changes={name: graph[name].changes for name in segment.operations if graph[name].changes},
        rewrites=tuple(PlannedRewrite(x.kind, x.operations) for x in rewrites),
    )


def planned_shard(layout: Shard) -> PlannedShard:
    """Return a layout in the form that a plan has; `outer` is 0 where it depends on the batch."""
    outer = 0 if isinstance(layout.outer, Size) else layout.outer
    return PlannedShard(layout.dim, layout.axis, outer, layout.pieces)


def _cast(cast: Cast) -> PlannedCast:
    """Return a cast in the form that a plan has. It has one layout, that of the target or else of
    the source; a cast between two shards has the source as well."""
    source = planned_shard(cast.source) if isinstance(cast.source, Shard) else None
    target = planned_shard(cast.target) if isinstance(cast.target, Shard) else None
    is_between_cuts = cast.kind == "reshard"
    routed = next((x for x in (cast.source, cast.target) if isinstance(x, DispatchedRows)), None)
    return PlannedCast(
        *(cast.user, cast.value, cast.kind, target or source),
        source=source if is_between_cuts else None,
        ends=routed.ends if routed else "",
    )
