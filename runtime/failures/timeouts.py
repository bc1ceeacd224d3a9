"""A collective that timed out: where a rank waited in it, and which ranks did not come.

Owns what is said of a wait and who is blamed for it, on the host's side: nothing here needs
torch. Where a rank waited is found by the rank itself (`runtime/failures/timeout_frames.py`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_train.strategies.plan.group_names import WORLD, group_name, plan_path
from whale_train.strategies.plan.plan import Plan


@dataclass(frozen=True)
class Wait:
    """Where a rank was waiting when its time was up.

    `group` is the plan's name and `path` the key of the strategy the group is made for; `ranks`
    are those who had to come, the waiting one among them. `timeout_s` is how long it waited,
    `doing` the schedule's instruction it was at (None outside of a pipeline), `step` the optimizer
    step, from 1 (None before the first).
    """

    group: str
    path: str
    ranks: tuple[int, ...]
    timeout_s: float
    doing: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        doing = "" if self.doing is None else f", in {self.doing},"
        return f"waited {self.timeout_s:g} s{at}{doing} in group {self.group} ({self.path})"

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Wait":
        return cls(**{**content, "ranks": tuple(content["ranks"])})


@dataclass(frozen=True)
class StackCall:
    """One call of a stack: its file, line and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True)
class Hang:
    """The wait of `rank`, for ranks that did not come; `message` says it without its subject."""

    rank: int
    absent: tuple[int, ...]
    message: str


def find_hang(
    waits: Mapping[int, Wait],
    others: Iterable[int],
    stacks: Mapping[int, Sequence[StackCall]],
    step: int | None,
) -> Hang:
    """Return who waited for whom. `waits` are by rank, the earliest first, at least one; `others`
    failed otherwise, `stacks` are those of ranks that live (empty where a rank did not answer).
    `step` is the one after the last that the host has seen finished.

    Absent is a member that has said nothing and does not wait itself; if there is none, one that
    has said nothing; if there is none, one whose wait was cut off by the end of the others: it
    may have come too late. Of the waits for one that is absent, the one in the smallest group is
    reported, for it says most, and of those the earliest.
    """
    awaited = {rank for wait in waits.values() for rank in wait.ranks}
    silent = (awaited | stacks.keys()) - waits.keys() - set(others)
    not_waiting = {rank for rank in silent if not is_waiting(stacks.get(rank, ()))}
    narrow_first = sorted(waits.items(), key=lambda item: len(item[1].ranks))
    for suspects in (not_waiting, silent, set(others)):
        for rank, wait in narrow_first:
            absent = tuple(sorted(suspects & set(wait.ranks)))
            if absent:
                return Hang(rank, absent, f"{wait} {_for_absent(absent, stacks, step)}")
    rank, wait = next(iter(waits.items()))
    if not_waiting:
        absent = tuple(sorted(not_waiting))
        return Hang(rank, absent, f"{wait} {_for_absent(absent, stacks, step)}")
    elsewhere = "; ".join(f"rank {r} {w}" for r, w in waits.items() if r != rank)
    return Hang(rank, (), f"{wait}, whose other members waited elsewhere: {elsewhere}")


def is_waiting(stack: Sequence[StackCall]) -> bool:
    """Return whether a stack (the innermost call first) is of a rank that waits for others
    itself."""
    if not stack:
        return False
    innermost = stack[0]
    ours = str(Path(__file__).parent)
    # Backward waits for DistributedDataParallel's reductions inside of the autograd engine.
    return innermost.function == "_engine_run_backward" or any(
        part in innermost.file for part in ("/torch/distributed/", "/deepspeed/", ours)
    )


def read_stack(dump: str) -> tuple[StackCall, ...]:
    """Return the main thread's calls, the innermost first, of what faulthandler wrote of all
    threads (it lists the first one last); empty where it wrote nothing."""
    _, header, main = dump.rpartition("(most recent call first):\n")
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    calls = (StackCall(file, int(line), function) for file, line, function in found)
    return tuple(calls) if header else ()


def stack_text(stack: Sequence[StackCall]) -> str:
    """Return a stack as Python shows a traceback: the innermost call last, without the calls of the
    host process."""
    calls = [
        c for c in stack if Path(c.file).name != "fork_server.py" and not c.file.startswith("<")
    ]
    lines = (f'  File "{c.file}", line {c.line}, in {c.function}' for c in reversed(calls))
    return "\n".join(("Stack (most recent call last):", *lines))


_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*Timeout\(ms\)=(\d+)\)")
_WATCHED = re.compile(r"\[PG ID \d+ PG GUID [^\s(]+\(([^)]*)\) Rank \d+\] .*timeout")


def read_watchdog(log: str, plan: Plan, rank: int, step: int | None) -> Wait | None:
    """Return the wait that NCCL's watchdog ended `rank` for, by what its log says of it; None where
    it does not. The watchdog aborts the process, which can then not speak for itself.

    The two lines, the wait's and the group's, are those of torch 2.6 (ProcessGroupNCCL.cpp); where
    the second is another, the group is taken for the whole job.
    """
    timed_out = _WATCHDOG.search(log)
    if timed_out is None:
        return None
    described = _WATCHED.search(log, timed_out.end())
    name = described[1] if described else WORLD
    lists = plan.groups.get(name, ())
    ranks = next((ranks for ranks in lists if rank in ranks), tuple(range(plan.world_size)))
    name = group_name(plan, ranks)
    return Wait(name, plan_path(plan, name), ranks, int(timed_out[1]) / 1000, step=step)


def _for_absent(
    absent: Sequence[int], stacks: Mapping[int, Sequence[StackCall]], step: int | None
) -> str:
    seen = [_last_seen(rank, stacks.get(rank, ()), step) for rank in absent]
    which = "which did not arrive" if len(absent) == 1 else "who did not arrive"
    return "; ".join((f"for {_ranks(absent)}, {which}", *filter(None, seen)))


def _last_seen(rank: int, stack: Sequence[StackCall], step: int | None) -> str:
    if stack:
        return f"rank {rank} was last seen in {stack[0]}"
    return f"rank {rank} was last seen in step {step - 1}" if step is not None else ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
