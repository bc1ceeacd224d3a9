"""Start, shrink, grow and re-plan real jobs, as a policy decides.

A job that is reconfigured saves a checkpoint, ends, and goes on from it under its other plan as
soon as the devices are free. Nothing else of its request changes, least of all its global batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.schedule.job_files import has_stepped_after, last_step, step_s_after
from whale_train.launcher.schedule.job_starter import JobAttempt, JobStarter
from whale_train.launcher.schedule.planned_job import PlannedJob, StepTimes
from whale_train.strategies.cluster_scheduling.schedulable_job import (
    Allocation,
    JobState,
    Policy,
)

Status = Literal[
    "to come", "waiting", "queued", "running", "done", "failed", "refused", "interrupted"
]
_LOOK_S = 0.1
_LISTED_S = 10.0  # assumed of a reconfiguration before one was measured
_KILLED_AFTER_S = 60.0  # beyond a job's own grace period


@dataclass
class LiveJob:
    """A job of the schedule, from its submission to its end.

    planned: the job with its plans.
    run_dir: its run directory.
    status: what it does.
    said: what was last known of its end; '' before it has ended.
    process: its process, if it has one.
    target: what the policy last gave it.
    waiting_since_s, started_s, first_step_s, ended_s: times from the start of the schedule; the
        third is when its first step was seen to be done.
    history: what it ran on, with the time at which each began and the step after which.
    stopped_at_s: when it was last told to stop, until it has taken a step again.
    queued_at_s: when it began to wait in the queue of the engine that runs it, while it does.
    queued_s: seconds in that queue since it was last told to stop.
    """

    planned: PlannedJob
    run_dir: Path
    status: Status = "to come"
    said: str = ""
    process: JobAttempt | None = None
    target: Allocation | None = None
    waiting_since_s: float = 0.0
    started_s: float | None = None
    first_step_s: float | None = None
    ended_s: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    stopped_at_s: float | None = None
    queued_at_s: float | None = None
    queued_s: float = 0.0

    @property
    def name(self) -> str:
        return self.planned.job.name

    @property
    def is_active(self) -> bool:
        """Return whether the job has been submitted and has not ended."""
        return self.status in ("waiting", "queued", "running")

    @property
    def reconfigurations(self) -> int:
        """Return the number of times that the job has gone on under another allocation."""
        return max(0, len(self.history) - 1)

    def leave_queue(self, now_s: float) -> None:
        """Take note that the job is not in its engine's queue at `now_s`."""
        if self.queued_at_s is not None:
            self.queued_s += now_s - max(self.queued_at_s, self.stopped_at_s or 0.0)
            self.queued_at_s = None

    def state(self) -> JobState:
        """Return the job as policies see it."""
        left = self.planned.job.steps - last_step(self.run_dir)
        return JobState(
            self.planned.job,
            self.target,
            max(0, left),
            self.waiting_since_s,
            self.started_s,
            self.reconfigurations,
        )


@dataclass
class RunningJobs:
    """The jobs of a schedule, wherever they run.

    jobs: the jobs, in the order of the file.
    devices: number of devices.
    starter: starts jobs where they run.
    policy: makes the policy of a reconfiguration time, in seconds.
    round_s: the longest time between two decisions, in seconds.
    changed: called with a line of text for each change, and after the state has changed.
    """

    jobs: list[LiveJob]
    devices: int
    starter: JobStarter
    policy: Callable[[float], Policy]
    reconfiguration_s: float | None
    round_s: float
    changed: Callable[[str], None]
    measured_s: list[float] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def now_s(self) -> float:
        """Return seconds since the start of the schedule."""
        return time.monotonic() - self._began

    @property
    def expected_reconfiguration_s(self) -> float:
        """Return the seconds that a reconfiguration is taken to cost."""
        if self.reconfiguration_s is not None:
            return self.reconfiguration_s
        return fmean(self.measured_s) if self.measured_s else _LISTED_S

    def run(self, signals: StopSignals) -> None:
        """Run the jobs to their ends. Raises KeyboardInterrupt once every job has saved and ended,
        where a signal has asked for that."""
        decided_s = -self.round_s
        try:
            while any(job.is_active or job.status == "to come" for job in self.jobs):
                signals.poll()
                is_due = self.now_s - decided_s >= self.round_s
                reasons = [*self._arrivals(), *self._ends()]
                self._note_queues()
                self._measure()
                if reasons or is_due:
                    self._decide(", ".join(reasons) or "a round")
                    decided_s = self.now_s
                self._start_ready()
                time.sleep(_LOOK_S)
        except BaseException:
            self._stop_all()
            raise

    def _arrivals(self) -> list[str]:
        """Submit the jobs whose time has come, and return what happened."""
        said = []
        for job in self.jobs:
            if job.status == "to come" and job.planned.job.arrival_s <= self.now_s:
                job.status, job.waiting_since_s = "waiting", self.now_s
                said.append(f"{job.name} arrives")
        return said

    def _ends(self) -> list[str]:
        """Take note of processes that have ended, and return which jobs have."""
        said = []
        for job in self.jobs:
            ended = None if job.process is None else job.process.ended()
            if ended is None or job.process is None:
                continue
            was_told, job.said = job.process.is_stopping, job.process.said()
            job.process = None
            job.leave_queue(self.now_s)
            if was_told and ended == "interrupted":
                if job.target is None:
                    job.status, job.waiting_since_s = "waiting", self.now_s
                continue  # goes on once there is room
            job.status, job.ended_s, job.target = ended, self.now_s, None
            said.append(f"{job.name} is {ended}")
        return said

    def _note_queues(self) -> None:
        """Take note of the jobs that have left the queue of their engine, or are in it again."""
        for job in self.jobs:
            if job.process is None:
                continue
            if job.process.is_queued and job.status != "queued":
                job.status, job.queued_at_s = "queued", self.now_s
                self.changed(f"{job.name} is queued for {_text(job.process.allocation)}")
            elif not job.process.is_queued and job.status != "running":
                self._runs(job, job.process)

    def _runs(self, job: LiveJob, process: JobAttempt) -> None:
        """Take note that an attempt of a job has its devices."""
        job.status = "running"
        job.leave_queue(self.now_s)
        if job.started_s is None:
            job.started_s = self.now_s
        allocation, step = process.allocation, process.began_step
        job.history.append(
            {
                "at_s": round(self.now_s, 3),
                "devices": allocation.devices,
                "plan": allocation.plan,
                "after_step": step,
            }
        )
        self.changed(f"{job.name} runs on {_text(allocation)} after step {step}")

    def _measure(self) -> None:
        """Take note of first steps, and of the time that jobs lost by going on elsewhere."""
        for job in self.jobs:
            if job.started_s is not None and job.first_step_s is None and last_step(job.run_dir):
                job.first_step_s = self.now_s
            if job.stopped_at_s is None or job.process is None or job.process.is_stopping:
                continue
            if has_stepped_after(job.run_dir, job.process.began_step):
                took_s = self.now_s - job.stopped_at_s - job.queued_s
                self.measured_s.append(took_s)
                job.stopped_at_s = None

    def _refit(self) -> None:
        """Correct the speed of each running job by the steps that it has taken."""
        for job in self.jobs:
            if job.process is None:
                continue
            seconds = step_s_after(job.run_dir, job.process.began_step)
            if seconds is None:
                continue
            times = job.planned.job.throughput
            assert isinstance(times, StepTimes)
            allocation = job.process.allocation
            times = times.with_measured((allocation.devices, allocation.plan), seconds)
            job.planned = replace(job.planned, job=replace(job.planned.job, throughput=times))

    def _decide(self, why: str) -> None:
        """Ask the policy, and tell the jobs to stop whose allocation it changes."""
        self._refit()
        active = sorted(
            (job for job in self.jobs if job.is_active), key=lambda job: job.planned.job.arrival_s
        )
        policy = self.policy(self.expected_reconfiguration_s)
        given = policy(self.now_s, [job.state() for job in active], self.devices)
        said = []
        for job in active:
            before, after = job.target, given.get(job.name)
            if before == after:
                continue
            job.target = after
            if after is None:
                job.waiting_since_s = self.now_s
            said.append(f"{job.name} {_text(before)} -> {_text(after)}")
            if job.process is not None and job.process.allocation != after:
                job.stopped_at_s, job.queued_s = self.now_s, 0.0
                job.process.stop()
        if said or why != "a round":
            self.changed(f"{why}: {'; '.join(said) or 'nothing changes'}")

    def _start_ready(self) -> None:
        """Start the jobs whose devices are free."""
        held = {slot for job in self.jobs if job.process is not None for slot in job.process.slots}
        free = [slot for slot in range(self.devices) if slot not in held]
        waiting = [job for job in self.jobs if job.target is not None and job.process is None]
        waiting.sort(key=lambda job: (not job.planned.job.is_guaranteed, job.planned.job.arrival_s))
        for job in waiting:
            assert job.target is not None
            if job.target.devices > len(free):
                continue
            slots, free = tuple(free[: job.target.devices]), free[job.target.devices :]
            self._start(job, job.target, slots)

    def _start(self, job: LiveJob, allocation: Allocation, slots: tuple[int, ...]) -> None:
        command = job.planned.commands[allocation.plan]
        arguments = [*command, *_going_on(job, command)]
        request = job.planned.request
        job.process = self.starter.start(request, arguments, allocation, slots, job.run_dir)
        job.status = "waiting"
        if not job.process.is_queued:
            self._runs(job, job.process)

    def _stop_all(self) -> None:
        """Have every job save and end, and wait for it. A second signal ends them at once."""
        live = [job for job in self.jobs if job.process is not None]
        grace_s = max((job.planned.request.checkpoint.grace_s for job in live), default=0.0)
        processes = [job.process for job in live if job.process is not None]
        try:
            for process in processes:
                process.stop()
            _wait_for(processes, grace_s + _KILLED_AFTER_S)
        finally:
            for process in processes:
                process.kill()
            _wait_for(processes, _KILLED_AFTER_S)
            for job, process in zip(live, processes, strict=True):
                job.said = process.said()
                job.status, job.process = "interrupted", None
                job.ended_s = self.now_s


def _wait_for(processes: Sequence[JobAttempt], most_s: float) -> None:
    """Wait until all processes have ended, at most `most_s` seconds."""
    deadline = time.monotonic() + most_s
    while any(process.ended() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _going_on(job: LiveJob, command: Sequence[str]) -> list[str]:
    """Return the overrides by which a job saves when it is told to end, and goes on from that."""
    saves = any(text.startswith("checkpoint.every=") for text in command)
    every = [] if saves else ["checkpoint.every=30min"]
    return [*every, f"hydra.run.dir={job.run_dir}", "train.resume=auto"]


def _text(allocation: Allocation | None) -> str:
    """Return an allocation in words."""
    if allocation is None:
        return "waiting"
    devices = "device" if allocation.devices == 1 else "devices"
    return f"{allocation.devices} {devices} ({allocation.plan})"
