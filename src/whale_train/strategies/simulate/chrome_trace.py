"""A timeline of ranks, measured or simulated, for chrome://tracing and ui.perfetto.dev.

The Trace Event Format: complete events ("ph": "X"), microseconds, one process per rank.
"""

from collections.abc import Mapping
from typing import Any

from whale_train.strategies.schedule.instructions import Instruction
from whale_train.strategies.simulate.simulator import Lane, Spans

Event = dict[str, Any]


def named(rank: int, device: str) -> Event:
    """Return the event that names a rank's process."""
    name = {"name": f"rank {rank} ({device})"}
    return {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": name}


def event(rank: int, label: Instruction | str, started_us: float, took_us: float) -> Event:
    """Return the event of an instruction, or of a named part of the step, on a rank. `started_us`
    and `took_us` are microseconds."""
    args: dict[str, Any] = {}
    name, category = str(label), "step"
    if isinstance(label, Instruction):
        args = {"chunk": label.chunk, "micro_batch": label.micro_batch}
        if label.peer >= 0:
            args["peer"] = label.peer
        name, category = f"{label.kind} {label.micro_batch}", label.kind
    return {
        "name": name, "cat": category, "ph": "X", "ts": started_us, "dur": took_us,
        "pid": rank, "tid": 0, "args": args,
    }  # fmt: skip


def _goes_on(first: Event, second: Event) -> bool:
    """Return True if two events are consecutive pieces of one backward, which makes its gradients
    ready piece by piece."""
    same = all(first[key] == second[key] for key in ("name", "tid", "args"))
    return same and abs(first["ts"] + first["dur"] - second["ts"]) < 1e-3


def events_of(spans: Spans, stands: Mapping[int, int], devices: Mapping[int, str]) -> list[Event]:
    """Return the events of a simulated step. Transfers that overlap with computation are in a
    second row.

    stands: the simulated rank of every shown rank, which has its events.
    devices: the name of the device of every shown rank.
    """
    events = [named(rank, device) for rank, device in devices.items()]
    by_rank: dict[int, list[Event]] = {}
    simulated = set(stands.values())
    for task, start, end in zip(spans.tasks, spans.starts, spans.ends, strict=True):
        if end == start:
            continue
        label: Instruction | str = task.instruction or task.name
        for rank in simulated.intersection(task.ranks):
            made = event(rank, label, start * 1e6, (end - start) * 1e6)
            made["tid"] = 0 if task.lane is Lane.COMPUTE else 1
            rank_events = by_rank.setdefault(rank, [])
            if rank_events and _goes_on(rank_events[-1], made):
                rank_events[-1]["dur"] = made["ts"] + made["dur"] - rank_events[-1]["ts"]
            else:
                rank_events.append(made)
    for rank, simulated_rank in stands.items():
        events += [{**made, "pid": rank} for made in by_rank.get(simulated_rank, ())]
    return events
