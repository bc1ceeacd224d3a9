"""Define what a scheduler knows of a training job, and of the devices that it gives to it.

A device is counted, not named: which devices of a node or host a job gets is decided where jobs are
started.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol


class Throughput(Protocol):
    """A job's speed by resources and plan. Must be hashable: sensitivity curves are kept by it."""

    def __call__(self, devices: int, plan: str) -> float:
        """Return samples a second on `devices` devices under the plan of that name, or 0.0 where
        the job has no such plan on that many."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class SchedulableJob:
    """A training job as it was submitted.

    name: the job's name, unique in its schedule.
    devices: number of devices that were requested.
    plan: name of the plan that was requested.
    plans: names of all plans that the job may run under, the requested one included.
    arrival_s: when the job was submitted, in seconds from the start of the schedule.
    steps: number of optimizer steps.
    global_batch: samples of a step, the same on any number of devices.
    throughput: the job's speed.
    is_guaranteed: whether the job is never slower than on the resources and plan that were
        requested, once it runs; a best-effort job gets what is left, and may be stopped.
    """

    name: str
    devices: int
    plan: str
    plans: tuple[str, ...]
    arrival_s: float
    steps: int
    global_batch: int
    throughput: Throughput
    is_guaranteed: bool = True

    @cached_property
    def requested_samples_per_s(self) -> float:
        """Return the speed on the requested devices under the requested plan; 0.0 where the request
        has no such plan."""
        return self.throughput(self.devices, self.plan)


@dataclass(frozen=True)
class Allocation:
    """What a running job has: a number of devices, and the name of its plan on them."""

    devices: int
    plan: str


@dataclass(frozen=True)
class JobState:
    """A job that has been submitted and has not ended, as a policy sees it.

    job: the job.
    allocation: what the job runs on; None for a job that waits.
    remaining_steps: optimizer steps that are left; may be a fraction.
    waiting_since_s: when the job last began to wait.
    started_s: when the job first began to run; None for one that never has.
    reconfigurations: how often the job has been stopped and gone on under another allocation.
    """

    job: SchedulableJob
    allocation: Allocation | None
    remaining_steps: float
    waiting_since_s: float
    started_s: float | None = None
    reconfigurations: int = 0


class Policy(Protocol):
    """A rule that shares devices among jobs."""

    def __call__(
        self, now_s: float, states: "list[JobState]", devices: int
    ) -> "dict[str, Allocation]":
        """Return the allocation of every job that is to run, by its name; all others wait.

        now_s: seconds from the start of the schedule.
        states: all jobs that have been submitted and have not ended, in the order of submission.
        devices: number of devices of the cluster. Allocations never need more in all.
        """
        ...
