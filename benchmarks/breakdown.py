"""Break down a step of ours into compute, bridges, collectives, waiting for others, and the rest.

The ranks write a timeline (runtime/record/timeline.py), to which this file adds the collectives.
All ranks of a run are on one machine and read one clock, so a transfer can be divided at the moment
when its last rank arrives. The time before that moment is *waiting*: the bubble of a pipeline, or a
slower rank. The time after it is the cost of moving data. Between TaskGraphs this cost counts as
*bridges*: the messages of a pipeline, the gather of a batch for a split head, and the way back of
its gradient. Inside a TaskGraph it counts as *collectives*, such as the sums of a split. All other
time in forward, backward and update is *compute*. Time in none of these is *outside*: reading data,
metrics, and the bookkeeping between instructions.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Any

import sides
from interleave import Running, Side
from torch import distributed as dist

from whale_train.config import Request
from whale_train.runtime.base.trace import Trace
from whale_train.runtime.comms import layout_collectives as casts
from whale_train.runtime.comms.p2p import Transport
from whale_train.runtime.process import rank_main as worker
from whale_train.runtime.record.timeline import write_events
from whale_train.strategies.plan.plan import Plan

COMPUTE = {"forward", "backward", "backward_input", "backward_weight"}
RECEIVES = {"receive": "send", "receive_gradient": "send_gradient"}
SENDS = set(RECEIVES.values())
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Shares:
    """Fractions of a step's time that sum to 1, as means over ranks and steps.

    compute: forward, backward and update, without communication.
    bridges: moving data between TaskGraphs.
    collectives: moving data inside a TaskGraph.
    waiting: waiting for other ranks.
    outside: everything else.
    """

    compute: float
    bridges: float
    collectives: float
    waiting: float
    outside: float


class Watched:
    """A rank of ours that writes its timeline, collectives included, after the last step."""

    def __init__(self, start: Callable[..., Running], folder: Path, rank: int) -> None:
        self._trace, self._folder = Trace(rank, "cpu"), folder
        watch_collectives(self._trace)
        self._running = start(rank, trace=self._trace)

    def step(self, number: int, grad_norm: bool) -> None:
        self._running.step(number, grad_norm)

    def loss(self) -> float:
        write_events(self._trace, self._folder)
        return self._running.loss()


def watched(request: Request, plan: Plan, folder: Path) -> Side:
    """Return our side, with a timeline that is written into `folder`."""
    start = partial(sides.Ours, folder, plan, worker.prepare(request))
    return Side("ours, watched", partial(Watched, start, folder), huge_pages=True)


def watch_collectives(trace: Trace) -> None:
    """Record every later collective of this process as a span of `trace`.

    The span is `bridge N` where the collective gathers a batch or returns the gradient of a
    gathered batch, and else `collective N`, with the number N of the collective. An asynchronous
    collective has two spans, `post N` and `wait N`. The wait for a step's sends is a span `settle`.
    """
    numbers = iter(range(10**9))
    kind = "collective"

    def watching(collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def run(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            if not kwargs.get("async_op"):
                with trace.span(f"{kind} {number}"):
                    return collective(*args, **kwargs)
            with trace.span(f"post {number}"):
                work = collective(*args, **kwargs)
            return _Work(work, trace, number)

        return run

    for module, name in (
        (dist, "all_reduce"),
        (dist, "reduce_scatter"),
        (casts, "_all_gather_single"),
        (casts, "_reduce_scatter_single"),
    ):
        setattr(module, name, watching(getattr(module, name)))

    def bridging(cast: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(cast)
        def run(x: Any, place: Any) -> Any:
            nonlocal kind
            kind = "bridge" if place.dim == 0 else "collective"  # the dimension of the batch
            try:
                return cast(x, place)
            finally:
                kind = "collective"

        return run

    for name in ("_all_gather", "_sum_slice"):
        setattr(casts, name, bridging(getattr(casts, name)))
    settle = Transport.settle

    def settling(transport: Transport) -> None:
        with trace.span("settle"):
            settle(transport)

    Transport.settle = settling  # type: ignore[method-assign, assignment]


class _Work:
    """The handle of an asynchronous collective that records its wait as a span."""

    def __init__(self, work: dist.Work, trace: Trace, number: int) -> None:
        self._work, self._trace, self._number = work, trace, number

    def wait(self) -> None:
        with self._trace.span(f"wait {self._number}"):
            self._work.wait()


def shares(folder: Path, ranks: int, skipped: int) -> Shares:
    """Return the shares of the timelines in `folder`, leaving out the first `skipped` steps."""
    timelines = []
    for rank in range(ranks):
        events = json.loads((folder / "trace" / f"rank_{rank}.json").read_text())["traceEvents"]
        timelines.append([event for event in events if event["ph"] == "X"])
    return shares_of(timelines, skipped)


def shares_of(timelines: Sequence[Sequence[Event]], skipped: int) -> Shares:
    """Return the shares of timelines.

    timelines: the events of each rank.
    skipped: number of first steps to leave out.
    """
    posted = _posted(timelines)
    totals = dict.fromkeys((field.name for field in fields(Shares)), 0.0)
    total = 0.0
    for events in timelines:
        for number, step in enumerate(_steps(events)):
            if number < skipped:
                continue
            parts = _parts(step, number, posted)
            for name, amount in parts.items():
                totals[name] += amount
            total += sum(parts.values())
    return Shares(**{name: amount / total for name, amount in totals.items()})


def _steps(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Yield the events of each step, in order. A step begins with reading data."""
    step: list[Event] = []
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if event["name"] == "data" and step:
            yield step
            step = []
        step.append(event)
    if step:
        yield step


def _posted(timelines: Sequence[Sequence[Event]]) -> dict[tuple[Any, ...], float]:
    """Return the time, in microseconds, at which the last rank posted its part of each transfer.

    The keys identify a transfer in the same way on all ranks.
    """
    posted: dict[tuple[Any, ...], float] = {}
    for events in timelines:
        for number, step in enumerate(_steps(events)):
            for event in step:
                kind, _, which = event["name"].partition(" ")
                if kind in ("collective", "bridge", "post"):
                    key: tuple[Any, ...] = (which,)
                elif event["cat"] in SENDS:
                    at = event["args"]
                    key = (number, event["cat"], at["chunk"], at["peer"], at["micro_batch"])
                else:
                    continue
                posted[key] = max(posted.get(key, 0.0), event["ts"])
    return posted


def _parts(step: Sequence[Event], number: int, posted: Mapping[Any, float]) -> dict[str, float]:
    """Return the microseconds of each part of one rank's step.

    step: the events of the step.
    number: the number of the step.
    posted: the times at which the last rank posted each transfer, as in `_posted`.
    """
    parts = dict.fromkeys(("compute", "bridges", "collectives", "waiting"), 0.0)
    end = max(event["ts"] + event["dur"] for event in step)
    computed = [e for e in step if e["cat"] in COMPUTE or e["name"] == "update"]
    for event in step:
        kind, _, which = event["name"].partition(" ")
        if event in computed:
            parts["compute"] += event["dur"]
            continue
        if event["cat"] in RECEIVES:
            at = event["args"]
            sent = RECEIVES[event["cat"]]
            ready = posted[number, sent, at["peer"], at["chunk"], at["micro_batch"]]
        elif kind in ("collective", "bridge", "wait"):
            ready = posted[which,]
        elif event["cat"] in SENDS or kind == "post":
            ready = event["ts"]
        elif kind == "settle":
            ready = event["ts"] + event["dur"]
        else:
            continue
        waiting = min(max(ready - event["ts"], 0.0), event["dur"])
        parts["waiting"] += waiting
        inside = kind in ("collective", "wait", "post")
        parts["collectives" if inside else "bridges"] += event["dur"] - waiting
        if any(_inside(event, outer) for outer in computed):
            parts["compute"] -= event["dur"]
    parts["outside"] = end - step[0]["ts"] - sum(parts.values())
    return parts


def _inside(event: Event, outer: Event) -> bool:
    stop = outer["ts"] + outer["dur"]
    return bool(outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= stop)
