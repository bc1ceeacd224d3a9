"""The cut graph as the plan's JSON: what each segment runs, and how its values lie.

Written once by the resolver and read by the ranks (`runtime/rewrite.py`), which assign no layout
themselves.
"""

from typing import Any

from whale_train.strategies.cut import HeadCut, Segment
from whale_train.strategies.layouts import Cast, Shard

Intervals = tuple[tuple[int, int], ...]


def rewrite_plan(cut: HeadCut, axes: dict[str, Intervals]) -> dict[str, Any]:
    """`axes` gives each rank's [start, stop) along every axis a layout names."""
    return {"axes": axes, "segments": tuple(_segment(segment) for segment in cut.segments)}


def _segment(segment: Segment) -> dict[str, Any]:
    typed = segment.assignment
    there = {*segment.operations, *segment.takes}
    return {
        "task_graph": segment.task_graph,
        "operations": segment.operations,
        "takes": segment.takes,
        "gives": segment.gives,
        "layouts": {
            name: _shard(layout)
            for name, layout in (typed.layouts if typed else {}).items()
            if isinstance(layout, Shard) and name in there
        },
        "casts": tuple(_cast(cast) for cast in (typed.casts if typed else ())),
        "becomes": dict(typed.becomes) if typed else {},
    }


def _cast(cast: Cast) -> dict[str, Any]:
    shard = next((x for x in (cast.source, cast.target) if isinstance(x, Shard)), None)
    return {
        "user": cast.user,
        "value": cast.value,
        "kind": cast.kind,
        **(_shard(shard) if shard else {"dim": 0, "axis": "", "outer": 1}),
    }


def _shard(layout: Shard) -> dict[str, Any]:
    return {"dim": layout.dim, "axis": layout.axis, "outer": layout.outer}
