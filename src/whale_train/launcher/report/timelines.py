"""Choose what one chart shows of a timeline of all ranks: a step of a rank of each kind."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whale_train.launcher.report.rank_kinds import RankKind

MOST_RANKS = 16
MOST_SPANS = 4000
_WORK = {  # the parts of a step that the legend names, by the category or name of an event
    **{"forward": "forward", "backward": "backward", "update": "update"},
    **{"send": "communication", "receive": "communication"},
    **{"send_gradient": "communication", "receive_gradient": "communication"},
    **{"sum": "communication", "gather": "communication"},
    **{"data": "data", "metrics": "metrics", "recompute": "recompute"},
}


@dataclass(frozen=True)
class Span:
    """A piece of work of a rank.

    rank: the rank.
    lane: 0 for computing, 1 for transfers beside it.
    work: the part of a step that it is, as the legend names it.
    name: the event's own name.
    start_ms: milliseconds since the step began.
    end_ms: milliseconds since the step began.
    """

    rank: int
    lane: int
    work: str
    name: str
    start_ms: float
    end_ms: float


def ranks_to_show(kinds: Sequence[RankKind]) -> list[int]:
    """Return a rank of each kind, ascending, `MOST_RANKS` at most."""
    return sorted(kind.ranks[0] for kind in kinds)[:MOST_RANKS]


def step_spans(events: Iterable[Mapping[str, Any]], ranks: Sequence[int]) -> list[Span]:
    """Return the spans of the last whole step of `ranks`.

    A step of a rank ends with its update. Of a timeline with one step alone that step is returned.
    Of a step with more than `MOST_SPANS` spans those that begin first are returned.
    """
    wanted = set(ranks)
    by_rank: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] in wanted:
            by_rank.setdefault(event["pid"], []).append(event)
    ends = [_ends(of_rank) for of_rank in by_rank.values()]
    if not ends:
        return []
    num_steps = min(map(len, ends))
    begin = max((x[num_steps - 2] for x in ends), default=0.0) if num_steps > 1 else 0.0
    stop = (
        max((x[num_steps - 1] for x in ends), default=float("inf")) if num_steps else float("inf")
    )
    chosen = [
        event
        for of_rank in by_rank.values()
        for event in of_rank
        if begin <= event["ts"] and event["ts"] + event["dur"] <= stop
    ]
    first = min((event["ts"] for event in chosen), default=0.0)
    spans = sorted((_span(event, first) for event in chosen), key=lambda x: x.start_ms)
    return sorted(spans[:MOST_SPANS], key=lambda x: (x.rank, x.start_ms))


def _ends(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return when the updates of a rank ended, in microseconds, ascending."""
    return sorted(x["ts"] + x["dur"] for x in events if x["name"] == "update")


def _span(event: Mapping[str, Any], first: float) -> Span:
    work = _WORK.get(event["cat"]) or _WORK.get(event["name"].split()[0], "other")
    start = (event["ts"] - first) / 1e3
    return Span(event["pid"], event["tid"], work, event["name"], start, start + event["dur"] / 1e3)
