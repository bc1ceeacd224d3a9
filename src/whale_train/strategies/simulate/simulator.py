"""The simulator of a step: tasks run on the lanes of ranks as soon as their dependencies are done.

A rank has two lanes: one computes while the other transfers. Tasks of a lane run in the order of
the list. A task of several ranks (a collective) occupies the lanes of all of them, from a common
start to a common end. Owns the clock; `tasks.py` owns the tasks of a plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import NamedTuple

from whale_train.strategies.schedule.instructions import Instruction

UPDATE = "update"  # name of the tasks of the optimizer's update


class Lane(Enum):
    """The lane of a rank that a task runs on."""

    COMPUTE = "compute"
    LINK = "link"


class Task(NamedTuple):
    """Work that ranks do together.

    ranks: the ranks.
    lane: the lane of each rank that the task occupies.
    seconds: duration of the task.
    after: the tasks that it waits for, as positions in the list.
    transfer_s: seconds of a compute task that are spent in collectives.
    name: the part of the step that the task is, if it has no `instruction`.
    instruction: the instruction that the task is.
    busy: the fraction of a transfer's time for which it occupies a processor of each of `ranks`.
    """

    ranks: tuple[int, ...]
    lane: Lane
    seconds: float
    after: tuple[int, ...] = ()
    transfer_s: float = 0.0
    name: str = ""
    instruction: Instruction | None = None
    busy: float = 0.0

    @property
    def load(self) -> float:
        """Return the number of processors that the task needs on each of its ranks."""
        return 1.0 if self.lane is Lane.COMPUTE else self.busy


@dataclass(frozen=True)
class Spans:
    """Start and end of each task of a list, in seconds from the start of the step."""

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds until the last task is done."""
        return max(self.ends, default=0.0)


def simulate(tasks: Sequence[Task], processors: float = inf) -> Spans:
    """Return the start and the end of each task. In the list, a task comes after those it waits
    for.

    Where ranks need more than `processors` at once, for computations or transfers, they share them
    evenly. Raises ValueError for a task that waits for a later one.
    """
    for number, task in enumerate(tasks):
        if task.after and max(task.after) >= number:
            raise ValueError(f"task {number} waits for a later one: {task.after}")
    needed: dict[tuple[int, Lane], float] = {}
    for task in tasks if processors < inf else ():
        for rank in task.ranks:
            on = (rank, task.lane)
            needed[on] = max(needed.get(on, 0.0), task.load)
    if sum(needed.values()) > processors:
        return _sharing(tasks, processors)
    ranks = {rank for task in tasks for rank in task.ranks}
    # The end of the last task of each rank's lanes.
    computing, linked = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    starts, ends = list[float](), list[float]()
    for task in tasks:
        lane, start = computing if task.lane is Lane.COMPUTE else linked, 0.0
        for rank in task.ranks:
            start = max(start, lane[rank])
        for dependency in task.after:
            start = max(start, ends[dependency])
        end = start + task.seconds
        starts.append(start)
        ends.append(end)
        for rank in task.ranks:
            lane[rank] = end
    return Spans(tuple(tasks), tuple(starts), tuple(ends))


def _sharing(tasks: Sequence[Task], processors: float) -> Spans:
    """Return the start and the end of each task where ranks share `processors`.

    The clock advances from one end of a task to the next. Others slow only the fraction of a task
    that needs a processor.
    """
    waits = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    queues: dict[tuple[int, Lane], list[int]] = {}
    for number, task in enumerate(tasks):
        for dependency in set(task.after):
            followers[dependency].append(number)
        for rank in task.ranks:
            queues.setdefault((rank, task.lane), []).append(number)
    heads = dict.fromkeys(queues, 0)
    starts, ends = [inf] * len(tasks), [inf] * len(tasks)
    running: dict[int, float] = {}  # remaining seconds of each task, at full speed
    clock = 0.0

    def begin(candidates: Iterable[int]) -> None:
        for number in candidates:
            task = tasks[number]
            lanes = [(rank, task.lane) for rank in task.ranks]
            first = all(
                heads[lane] < len(queues[lane]) and queues[lane][heads[lane]] == number
                for lane in lanes
            )
            if first and not waits[number] and starts[number] == inf:
                starts[number] = clock
                running[number] = task.seconds

    begin(range(len(tasks)))
    while running:
        needed = sum(len(tasks[n].ranks) * tasks[n].load for n in running)
        slower = max(1.0, needed / processors)
        rate = {n: 1.0 + tasks[n].load * (slower - 1.0) for n in running}
        step = min(left * rate[n] for n, left in running.items())
        clock += step
        done = [n for n, left in running.items() if left * rate[n] <= step * (1 + 1e-12)]
        for number in running:
            running[number] -= step / rate[number]
        candidates = []
        for number in done:
            del running[number]
            ends[number] = clock
            for follower in followers[number]:
                waits[follower] -= 1
                candidates.append(follower)
            for rank in tasks[number].ranks:
                lane = (rank, tasks[number].lane)
                heads[lane] += 1
                if heads[lane] < len(queues[lane]):
                    candidates.append(queues[lane][heads[lane]])
        begin(dict.fromkeys(candidates))
    return Spans(tuple(tasks), tuple(starts), tuple(ends))


@dataclass(frozen=True)
class RankTime:
    """Seconds of a rank in a step, by use; they add up to the step.

    compute_s: seconds of computing.
    communication_s: seconds in transfers or waiting for them.
    optimizer_s: seconds of the optimizer's update.
    idle_s: seconds waiting for other ranks.
    """

    compute_s: float
    communication_s: float
    optimizer_s: float
    idle_s: float


def rank_times(spans: Spans) -> dict[int, RankTime]:
    """Return the seconds of every rank, by use. A gap before a task counts as communication while
    transfers that the task waits for are in progress."""
    lists: dict[int, list[int]] = {}
    for number, task in enumerate(spans.tasks):
        if task.lane is Lane.COMPUTE:
            for rank in task.ranks:
                lists.setdefault(rank, []).append(number)
    by_rank = {}
    for rank, numbers in lists.items():
        compute = communication = optimizer = idle = clock = 0.0
        for number in numbers:
            task, start, end = spans.tasks[number], spans.starts[number], spans.ends[number]
            going = sum(
                min(spans.ends[dependency], start) - max(spans.starts[dependency], clock)
                for dependency in task.after
                if spans.tasks[dependency].lane is Lane.LINK and spans.ends[dependency] > clock
            )
            waited = min(max(going, 0.0), start - clock)
            communication += waited
            idle += start - clock - waited
            part = task.transfer_s / task.seconds if task.seconds else 0.0
            communication += part * (end - start)
            if task.name == UPDATE:
                optimizer += (1 - part) * (end - start)
            else:
                compute += (1 - part) * (end - start)
            clock = end
        idle += spans.seconds - clock
        by_rank[rank] = RankTime(compute, communication, optimizer, idle)
    return by_rank
