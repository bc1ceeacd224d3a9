"""A timeline of what ranks do, for chrome://tracing and ui.perfetto.dev, measured or simulated.

The Trace Event Format: complete events ("ph": "X"), microseconds, one process per rank.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from whale_train.strategies.schedule.instructions import Instruction
from whale_train.strategies.simulate.simulator import Lane, Spans

Event = dict[str, Any]


def named(rank: int, device: str) -> Event:
    """Return what a rank is called."""
    name = {"name": f"rank {rank} ({device})"}
    return {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": name}


def event(rank: int, what: Instruction | str, started_us: float, took_us: float) -> Event:
    """Return the event of an instruction, or of a part of the step, that a rank was at."""
    args: dict[str, Any] = {}
    name, category = str(what), "step"
    if isinstance(what, Instruction):
        args = {"chunk": what.chunk, "micro_batch": what.micro_batch}
        if what.peer >= 0:
            args["peer"] = what.peer
        name, category = f"{what.kind} {what.micro_batch}", what.kind
    return {
        "name": name, "cat": category, "ph": "X", "ts": started_us, "dur": took_us,
        "pid": rank, "tid": 0, "args": args,
    }  # fmt: skip


def _goes_on(first: Event, second: Event) -> bool:
    """Return whether two events are pieces of one: a backward whose gradients become ready in
    pieces."""
    same = all(first[key] == second[key] for key in ("name", "tid", "args"))
    return same and abs(first["ts"] + first["dur"] - second["ts"]) < 1e-3


def events_of(spans: Spans, stands: Mapping[int, int], devices: Sequence[str]) -> list[Event]:
    """Return the events of a simulated step. Every rank does what the one does that `stands` for
    it; transfers that go on beside its computing are a second row of its."""
    found = [named(rank, device) for rank, device in enumerate(devices)]
    by_rank: dict[int, list[Event]] = {}
    for task, start, end in zip(spans.tasks, spans.starts, spans.ends, strict=True):
        if end == start:
            continue
        what: Instruction | str = task.instruction or task.name
        for rank in task.ranks:
            made = event(rank, what, start * 1e6, (end - start) * 1e6)
            made["tid"] = 0 if task.lane is Lane.COMPUTE else 1
            mine = by_rank.setdefault(rank, [])
            if mine and _goes_on(mine[-1], made):
                mine[-1]["dur"] = made["ts"] + made["dur"] - mine[-1]["ts"]
            else:
                mine.append(made)
    for rank, other in stands.items():
        found += [{**made, "pid": rank} for made in by_rank.get(other, ())]
    return found
