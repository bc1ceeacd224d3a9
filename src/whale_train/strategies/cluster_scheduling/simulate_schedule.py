"""Simulate a schedule event by event: jobs arrive, run at the speed of their allocation, and end.

A job that is reconfigured computes nothing for as long as a checkpoint and a resume take.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from whale_train.strategies.cluster_scheduling.schedulable_job import (
    Allocation,
    JobState,
    Policy,
    SchedulableJob,
)

_DONE_STEPS = 1e-6  # fewer steps than this are none, after additions of floating-point numbers


@dataclass(frozen=True)
class JobRecord:
    """What became of a job.

    job: the job.
    started_s: when it first ran; None where it never did.
    ended_s: when it had taken all steps; None where it never did.
    reconfigurations: how often it was stopped and went on under another allocation.
    history: every allocation with the time it began; None where the job was stopped to wait.
    """

    job: SchedulableJob
    started_s: float | None
    ended_s: float | None
    reconfigurations: int
    history: tuple[tuple[float, Allocation | None], ...]

    @property
    def completion_s(self) -> float:
        """Return seconds from the job's submission to its end; infinite where it never ended."""
        return inf if self.ended_s is None else self.ended_s - self.job.arrival_s


@dataclass(frozen=True)
class SimulatedSchedule:
    """A simulated schedule.

    records: the jobs, in the order of submission.
    devices: number of devices of the cluster.
    """

    records: tuple[JobRecord, ...]
    devices: int

    @property
    def ended(self) -> list[JobRecord]:
        """Return the jobs that ended."""
        return [record for record in self.records if record.ended_s is not None]

    @property
    def average_completion_s(self) -> float:
        """Return the mean seconds from submission to end, over the jobs that ended; 0.0 without
        any."""
        ended = self.ended
        return sum(record.completion_s for record in ended) / len(ended) if ended else 0.0

    @property
    def makespan_s(self) -> float:
        """Return seconds from the first submission to the last end; 0.0 where no job ended."""
        ends = [record.ended_s for record in self.ended if record.ended_s is not None]
        return max(ends) - min(x.job.arrival_s for x in self.records) if ends else 0.0

    @property
    def reconfigurations(self) -> int:
        """Return the number of reconfigurations of all jobs."""
        return sum(record.reconfigurations for record in self.records)

    def completion_percentile_s(self, share: float) -> float:
        """Return the completion time that the share `share` of the ended jobs does not exceed."""
        times = sorted(record.completion_s for record in self.ended)
        return times[min(len(times) - 1, int(share * len(times)))] if times else 0.0


@dataclass
class _Live:
    """A job in the simulation.

    state: the job as the policy sees it, its remaining steps as of `counted_s`.
    ready_s: when it computes again after a reconfiguration.
    steps_per_s: speed under its allocation.
    """

    state: JobState
    counted_s: float
    ready_s: float
    steps_per_s: float
    history: list[tuple[float, Allocation | None]]

    def advance(self, now_s: float) -> None:
        """Count the steps up to `now_s`."""
        computed_s = max(0.0, now_s - max(self.counted_s, self.ready_s))
        self.counted_s = now_s
        if computed_s and self.steps_per_s:
            state = self.state
            self.state = JobState(  # several times as fast as `replace`, at every event
                state.job,
                state.allocation,
                state.remaining_steps - computed_s * self.steps_per_s,
                state.waiting_since_s,
                state.started_s,
                state.reconfigurations,
            )

    @property
    def end_s(self) -> float:
        """Return when the job has taken all steps, unless something changes."""
        if not self.steps_per_s:
            return inf
        from_s = max(self.counted_s, self.ready_s)
        return from_s + max(0.0, self.state.remaining_steps) / self.steps_per_s

    def give(self, allocation: Allocation | None, now_s: float, cost_s: float) -> None:
        """Let the job go on under another allocation, or stop it. Going on costs `cost_s` seconds,
        the first start nothing."""
        state = self.state
        self.history.append((now_s, allocation))
        if allocation is None:
            self.state = replace(state, allocation=None, waiting_since_s=now_s)
            self.steps_per_s = 0.0
            return
        is_first = state.started_s is None
        self.ready_s = now_s if is_first else now_s + cost_s
        self.state = replace(
            state,
            allocation=allocation,
            started_s=now_s if is_first else state.started_s,
            reconfigurations=state.reconfigurations + (not is_first),
        )
        speed = state.job.throughput(allocation.devices, allocation.plan)
        self.steps_per_s = speed / state.job.global_batch


def simulate_schedule(
    jobs: Sequence[SchedulableJob],
    policy: Policy,
    devices: int,
    reconfiguration_s: float,
    round_s: float = 300.0,
) -> SimulatedSchedule:
    """Simulate jobs on a cluster of `devices` devices, and return the schedule.

    policy: shares the devices, whenever a job arrives or ends and every `round_s` seconds.
    reconfiguration_s: seconds of a checkpoint and a resume.

    The simulation ends when no job is left, or when those that are left neither run nor start.
    """
    waiting = sorted(jobs, key=lambda job: job.arrival_s)
    live: dict[str, _Live] = {}
    records: dict[str, JobRecord] = {}
    now_s = decided_s = waiting[0].arrival_s if waiting else 0.0
    arrived = 0
    while arrived < len(waiting) or live:
        while arrived < len(waiting) and waiting[arrived].arrival_s <= now_s:
            job = waiting[arrived]
            live[job.name] = _Live(JobState(job, None, job.steps, now_s), now_s, now_s, 0.0, [])
            arrived += 1
        for one in live.values():
            one.advance(now_s)
        for name in [x for x, one in live.items() if one.state.remaining_steps <= _DONE_STEPS]:
            records[name] = _record(live.pop(name), now_s)
        _share(
            policy(now_s, [x.state for x in live.values()], devices),
            live,
            now_s,
            devices,
            reconfiguration_s,
        )
        decided_s = now_s
        next_arrival = waiting[arrived].arrival_s if arrived < len(waiting) else inf
        next_end = min((one.end_s for one in live.values()), default=inf)
        now_s = min(next_arrival, next_end)
        if now_s == inf:
            break
        now_s = min(now_s, decided_s + round_s)
    for name, one in live.items():
        records[name] = _record(one, None)
    return SimulatedSchedule(tuple(records[job.name] for job in waiting), devices)


def _share(
    given: dict[str, Allocation],
    live: dict[str, _Live],
    now_s: float,
    devices: int,
    cost_s: float,
) -> None:
    """Let the jobs go on as a policy has decided."""
    assert sum(x.devices for x in given.values()) <= devices, given
    for name, one in live.items():
        allocation, before = given.get(name), one.state.allocation
        if allocation is not before and allocation != before:
            one.give(allocation, now_s, cost_s)


def _record(one: _Live, ended_s: float | None) -> JobRecord:
    state = one.state
    return JobRecord(
        state.job, state.started_s, ended_s, state.reconfigurations, tuple(one.history)
    )
