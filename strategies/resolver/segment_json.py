"""The cut graph as the plan's JSON: what each segment runs, and how its values lie.

Written once by the resolver and read by the ranks (`runtime/graph/shard_graph.py`), which assign no
layout themselves.
"""

from typing import Any

from whale_train.strategies.graph.operation_graph import Size
from whale_train.strategies.layouts.propagation import Cast, Shard
from whale_train.strategies.partition.head_partition import HeadCut, Segment

Intervals = tuple[tuple[int, int], ...]


def rewrite_plan(cut: HeadCut, axes: dict[str, Intervals]) -> dict[str, Any]:
    """`axes` gives each rank's [start, stop) along every axis a layout names."""
    return {"axes": axes, "segments": tuple(segment_plan(segment) for segment in cut.segments)}


def segment_plan(segment: Segment) -> dict[str, Any]:
    """What one segment runs, takes and gives, how its values lie where they are sharded, and
    what is inserted and replaced."""
    typed = segment.assignment
    there = {*segment.operations, *segment.takes}
    return {
        "task_graph": segment.task_graph,
        "operations": segment.operations,
        "takes": segment.takes,
        "gives": segment.gives,
        "layouts": {
            name: shard_plan(layout)
            for name, layout in (typed.layouts if typed else {}).items()
            if isinstance(layout, Shard) and name in there
        },
        "casts": tuple(_cast(cast) for cast in (typed.casts if typed else ())),
        "becomes": dict(typed.becomes) if typed else {},
        **({"random": dict(typed.random)} if typed and typed.random else {}),
    }


def shard_plan(layout: Shard) -> dict[str, Any]:
    """A cut as plain data; `outer` is 0 where the batch says how many, and follows from a
    tensor's own size."""
    outer = 0 if isinstance(layout.outer, Size) else layout.outer
    pieces = {"pieces": layout.pieces} if layout.pieces else {}
    return {"dim": layout.dim, "axis": layout.axis, "outer": outer, **pieces}


def _cast(cast: Cast) -> dict[str, Any]:
    """A change between two cuts names both: `from` is the one it starts at."""
    source, target = cast.source, cast.target
    found = target if isinstance(target, Shard) else source
    laid = shard_plan(found) if isinstance(found, Shard) else _NOT_CUT
    both = {"from": shard_plan(source)} if cast.kind == "reshard" else {}  # type: ignore[arg-type]
    return {"user": cast.user, "value": cast.value, "kind": cast.kind, **laid, **both}


_NOT_CUT = {"dim": 0, "axis": "", "outer": 1}
