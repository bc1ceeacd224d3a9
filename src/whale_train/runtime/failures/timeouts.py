"""Report a collective that timed out: where a rank waited, and which ranks did not come.

This file owns the report of a wait and the choice of the ranks blamed for it, on the host's side,
without torch. The rank itself determines where it waited (`runtime/failures/timeout_frames.py`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_train.strategies.plan.group_names import WORLD, group_name, plan_path
from whale_train.strategies.plan.plan import Plan

# Our own folders in which a rank waits for others: shared memory, casts and messages, slow links.
_TRANSPORTS = tuple(f"{Path(__file__).parents[1] / name}/" for name in ("cpu", "comms", "emulate"))


@dataclass(frozen=True)
class Wait:
    """The place where a rank waited when its wait timed out.

    group: the plan's name of the group.
    path: the key of the strategy that the group is made for.
    ranks: the ranks that had to come, the waiting one among them.
    timeout_s: the duration of the wait, in seconds.
    doing: the schedule's instruction that the rank was at; None outside of a pipeline.
    step: the optimizer step, from 1; None before the first.
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
        """Return the wait that `content`, a JSON object, describes."""
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
    """The wait of a rank for ranks that did not come.

    rank: the waiting rank.
    absent: the ranks that did not come.
    message: a sentence about the wait, without its subject.
    """

    rank: int
    absent: tuple[int, ...]
    message: str


def find_hang(
    waits: Mapping[int, Wait],
    others: Iterable[int],
    stacks: Mapping[int, Sequence[StackCall]],
    step: int | None,
) -> Hang:
    """Return the wait to report, and the ranks that are blamed for it.

    The absent ranks are, in this order of preference: members that have reported nothing and do not
    wait themselves; members that have reported nothing; members whose wait was cut off by the end
    of the others, as they may have come too late. Of the waits for an absent rank, the one in the
    smallest group is reported, as it is the most specific, and of those the earliest.

    waits: timed-out waits by rank, the earliest first, at least one.
    others: the ranks that failed otherwise.
    stacks: the calls of living ranks, the innermost first; empty for a rank that did not answer.
    step: the step after the last that the host has seen finished.
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
    """Return whether a stack, the innermost call first, is that of a rank waiting for other
    ranks."""
    if not stack:
        return False
    innermost = stack[0]
    # Backward waits for DistributedDataParallel's reductions inside of the autograd engine.
    return innermost.function == "_engine_run_backward" or any(
        part in innermost.file for part in ("/torch/distributed/", "/deepspeed/", *_TRANSPORTS)
    )


def read_stack(dump: str) -> tuple[StackCall, ...]:
    """Return the main thread's calls, the innermost first, from faulthandler's dump of all threads.

    The dump lists the main thread last. The result is empty if nothing was dumped.
    """
    _, header, main = dump.rpartition("(most recent call first):\n")
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    calls = (StackCall(file, int(line), function) for file, line, function in frames)
    return tuple(calls) if header else ()


def stack_text(stack: Sequence[StackCall]) -> str:
    """Return a stack in the form of a Python traceback, without the calls of the host process.

    The innermost call is last.
    """
    calls = [
        c for c in stack if Path(c.file).name != "fork_server.py" and not c.file.startswith("<")
    ]
    lines = (f'  File "{c.file}", line {c.line}, in {c.function}' for c in reversed(calls))
    return "\n".join(("Stack (most recent call last):", *lines))


_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: .*Timeout\(ms\)=(\d+)\)")
_WATCHED = re.compile(r"\[PG ID \d+ PG GUID [^\s(]+\(([^)]*)\) Rank \d+\] .*timeout")


def read_watchdog(log: str, plan: Plan, rank: int, step: int | None) -> Wait | None:
    """Return the wait for which NCCL's watchdog ended `rank`, from the rank's `log`, or None if it
    did not.

    The watchdog aborts the process, which then cannot report the wait itself. The two lines in the
    log, of the wait and of the group, have the form of torch 2.6 (ProcessGroupNCCL.cpp). If the
    second has another form, the group is assumed to be the whole job.
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
    """Return the part of a message that names the absent ranks and where each was last seen."""
    seen = [_last_seen(rank, stacks.get(rank, ()), step) for rank in absent]
    which = "which did not arrive" if len(absent) == 1 else "who did not arrive"
    return "; ".join((f"for {_ranks(absent)}, {which}", *filter(None, seen)))


def _last_seen(rank: int, stack: Sequence[StackCall], step: int | None) -> str:
    """Return a text about where `rank` was last seen, or '' if that is unknown."""
    if stack:
        return f"rank {rank} was last seen in {stack[0]}"
    return f"rank {rank} was last seen in step {step - 1}" if step is not None else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a text, such as "rank 1" or "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
