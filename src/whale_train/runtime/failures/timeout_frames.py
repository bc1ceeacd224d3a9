"""Determine where a rank waited when a collective timed out, from the exception.

gloo's message is `Timed out waiting 3000ms for recv operation` and nothing else. The frames of the
traceback still hold the group, the peer, the instruction and the step.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from whale_train.config import Request
from whale_train.runtime.comms.p2p import Transport
from whale_train.runtime.cpu import shm_p2p as shared_messages
from whale_train.runtime.failures.failure import CollectiveTimeout, is_timeout
from whale_train.runtime.failures.timeouts import Wait
from whale_train.runtime.train.loop import Loop
from whale_train.strategies.plan.group_names import group_name, plan_path
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.schedule.instructions import Instruction

_LIBRARIES = ("torch", "deepspeed")
_OURS = "whale_train"
# Our own modules between torch and the caller of a collective.
_BETWEEN = (
    "whale_train.runtime.emulate.delayed_work",
    "whale_train.runtime.emulate.emulated_group",
)
# The names of the group in frames and objects that communicate: torch's, DeepSpeed's and ours.
_GROUPS = ("group", "_group", "process_group", "dp_process_group")


@contextmanager
def named_waits(run_dir: Path, rank: int) -> Iterator[None]:
    """Turn exceptions of timed-out waits of `rank` inside this context into CollectiveTimeout.

    All other exceptions pass.
    """
    try:
        yield
    except Exception as error:
        plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
        request = Request.from_json((run_dir / "request.json").read_text(encoding="utf-8"))
        wait = find_wait(error, plan, rank, request.launcher.timeout_s)
        if wait is None:
            raise
        raise CollectiveTimeout(wait) from error


def find_wait(error: BaseException, plan: Plan, rank: int, timeout_s: float) -> Wait | None:
    """Return the wait that timed out with `error`, or with an error it was raised `from`.

    The result is None if no wait timed out, or if the user's own code raised the error.
    """
    cause: BaseException | None = error
    while cause is not None and not is_timeout(cause):
        cause = cause.__cause__
    if cause is None:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)][::-1]
    if not frames or _package(frames[0]) not in (*_LIBRARIES, _OURS):
        return None  # not a wait for ranks: raised by the user's own code
    group, path, ranks = _whom(frames, plan, rank)
    step = next((s for frame in frames if (s := _step(frame)) is not None), None)
    doing = next((d for frame in frames if (d := _doing(frame)) is not None), None)
    return Wait(group, path, ranks, timeout_s, doing, step)


def _whom(frames: Sequence[FrameType], plan: Plan, rank: int) -> tuple[str, str, tuple[int, ...]]:
    """Return the group's name, its path and its ranks; those of the whole job if no frame has a
    group.

    `frames` are the innermost first. The search ends at the first frame that is not a library's:
    outer frames may hold the groups of other collectives.
    """
    ranks = tuple(range(plan.world_size))
    for frame in frames:
        if frame.f_globals["__name__"] == shared_messages.__name__:
            continue  # a group of two has no name in the plan; the Transport's frame has the peer
        owner = frame.f_locals.get("self")
        if isinstance(owner, Transport) and isinstance(frame.f_locals.get("source"), int):
            return _between(plan, frame.f_locals["source"], rank)
        group = _group(frame, owner)
        if group is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            break
        if _package(frame) not in _LIBRARIES and frame.f_globals["__name__"] not in _BETWEEN:
            break
    name = group_name(plan, ranks)
    return name, plan_path(plan, name), ranks


def _between(plan: Plan, source: int, target: int) -> tuple[str, str, tuple[int, ...]]:
    """Return the name, the path and the ranks of a message, named by the TaskGraphs of its two
    ends."""
    ends = [plan.task_graphs[plan.ranks[rank].task_graphs[0]] for rank in (source, target)]
    paths = dict.fromkeys(task_graph.path for task_graph in ends)
    name = " to ".join(task_graph.name for task_graph in ends)
    return name, " to ".join(paths), (source, target)


def _group(frame: FrameType, owner: object) -> dist.ProcessGroup | None:
    """Return the process group that a frame's locals or its `self` hold, or None if they hold
    none."""
    if isinstance(owner, dist.ProcessGroup):
        return owner
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    run = attributes.get("_run")  # an engine's module, which reduces in its backward
    if isinstance(run, DistributedDataParallel):
        attributes = run.__dict__
    for holder in (frame.f_locals, attributes):
        for name in _GROUPS:
            if isinstance(holder.get(name), dist.ProcessGroup):
                group: dist.ProcessGroup = holder[name]
                return group
    return None


def _step(frame: FrameType) -> int | None:
    """Return the number of the training step that a frame runs, from 1, or None if it runs none."""
    number = frame.f_locals.get("number")
    if isinstance(frame.f_locals.get("self"), Loop) and isinstance(number, int):
        return number + 1
    return None


def _doing(frame: FrameType) -> str | None:
    """Return a text for the schedule's instruction that a frame runs, or None if it runs none."""
    instruction = frame.f_locals.get("instruction")
    if not isinstance(instruction, Instruction):
        return None
    return f"{instruction.kind} of chunk {instruction.chunk}, micro-batch {instruction.micro_batch}"


def _package(frame: FrameType) -> str:
    """Return the name of the top-level package of a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
