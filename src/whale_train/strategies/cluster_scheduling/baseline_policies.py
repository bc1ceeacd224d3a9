"""Share devices among jobs without shrinking any: the baselines of the evaluation.

Resources alone, the third baseline, is `ReplanPolicy` with `replans=False`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from whale_train.strategies.cluster_scheduling.replan_policy import ReplanOptions, ReplanPolicy
from whale_train.strategies.cluster_scheduling.schedulable_job import (
    Allocation,
    JobState,
    Policy,
    SchedulableJob,
)

Choice = Callable[[SchedulableJob, int], Allocation | None]


def as_requested(job: SchedulableJob, devices: int) -> Allocation | None:
    """Return the requested devices and plan, or None where the request has no plan or needs more
    than `devices`."""
    if job.devices > devices or job.requested_samples_per_s <= 0.0:
        return None
    return Allocation(job.devices, job.plan)


def best_plan(job: SchedulableJob, devices: int) -> Allocation | None:
    """Return the requested devices with the fastest plan on them, or None where there is none or
    more than `devices` are needed."""
    if job.devices > devices:
        return None
    speed, plan = max(((job.throughput(job.devices, x), x) for x in job.plans), key=lambda x: x[0])
    return Allocation(job.devices, plan) if speed > 0.0 else None


@dataclass(frozen=True)
class FirstComePolicy:
    """Start jobs in the order of submission, each on fixed resources, none before an earlier one.

    choice: what a job gets. A job for which it returns None on the whole cluster never runs.
    """

    choice: Choice

    def __call__(self, now_s: float, states: list[JobState], devices: int) -> dict[str, Allocation]:
        """Return the allocation of every job that is to run, by its name."""
        given = {x.job.name: x.allocation for x in states if x.allocation is not None}
        free = devices - sum(x.devices for x in given.values())
        for state in states:
            if state.allocation is not None:
                continue
            wanted = self.choice(state.job, devices)
            if wanted is None:
                continue
            if wanted.devices > free:
                break
            given[state.job.name] = wanted
            free -= wanted.devices
        return given


def policies(options: ReplanOptions) -> dict[str, Policy]:
    """Return every policy by its name in the config: Rubick's first, then the baselines."""
    return {
        "replan": ReplanPolicy(options),
        "resources": ReplanPolicy(
            ReplanOptions(
                options.reconfiguration_s,
                options.least_useful_share,
                options.starvation_s,
                replans=False,
            )
        ),
        "plans": FirstComePolicy(best_plan),
        "first_come": FirstComePolicy(as_requested),
    }
