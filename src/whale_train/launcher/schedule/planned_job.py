"""Plan a job under each of its plans on each number of devices, and keep its speed on them.

The speed is the planner's, corrected by the steps that the job has taken so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale_train.config import Request, in_steps
from whale_train.errors import ConfigError, Fault, PlanError
from whale_train.launcher.planning.plan_request import PlanningBase, planning_base
from whale_train.launcher.schedule.job_file import AS_REQUESTED, ScheduledRequest
from whale_train.strategies.cluster_scheduling.fitted_step_time import (
    FittedStepTime,
    StepParts,
    fit_step_time,
)
from whale_train.strategies.cluster_scheduling.schedulable_job import SchedulableJob
from whale_train.strategies.resolver.resolve import resolve_and_simulate
from whale_train.strategies.search.search import search
from whale_train.strategies.stages.analysis import ModelAnalysis

Choice = tuple[int, str]  # a number of devices, and the name of a plan


@dataclass(frozen=True, eq=False)
class StepTimes:
    """A job's speed, as a `Throughput`: each instance is a speed of its own.

    parts: the predicted step of each plan on each number of devices that it exists for.
    fitted: what the job's measured steps made of the prediction.
    measured_s: the measured seconds of a step, which stand for themselves.
    global_batch: samples of a step.
    """

    parts: dict[Choice, StepParts]
    fitted: FittedStepTime
    measured_s: dict[Choice, float]
    global_batch: int

    def __call__(self, devices: int, plan: str) -> float:
        """Return samples a second, or 0.0 where there is no such plan."""
        seconds = self.seconds(devices, plan)
        return 0.0 if seconds is None else self.global_batch / seconds

    def seconds(self, devices: int, plan: str) -> float | None:
        """Return the seconds of a step; None where there is no such plan."""
        choice = devices, plan
        if choice in self.measured_s:
            return self.measured_s[choice]
        return self.fitted.seconds(self.parts[choice]) if choice in self.parts else None

    def with_measured(self, choice: Choice, seconds: float) -> "StepTimes":
        """Return the step times after a plan was measured."""
        measured = self.measured_s | {choice: seconds}
        fitted = fit_step_time([(self.parts[x], s) for x, s in measured.items()])
        return replace(self, fitted=fitted, measured_s=measured)


@dataclass(frozen=True)
class PlannedJob:
    """A job that can be scheduled.

    job: the job as policies see it.
    request: the request under the requested plan, with its number of steps.
    commands: the overrides of the request under each plan.
    """

    job: SchedulableJob
    request: Request
    commands: dict[str, tuple[str, ...]]


def counts_of(devices: int) -> tuple[int, ...]:
    """Return the numbers of devices that plans are made for: all up to 8, then powers of two, and
    all devices."""
    powers = [2**i for i in range(4, devices.bit_length())]
    return (*range(1, min(devices, 8) + 1), *powers, *([devices] if devices > 8 else []))


def planned_job(number: int, asked: ScheduledRequest, counts: Sequence[int]) -> PlannedJob:
    """Return a job with its plans.

    number: the job's place in the file.
    counts: the numbers of devices that plans are made for, beside the one that is asked for.

    Raises ConfigError where the request is wrong under all plans, and where it has no plan on any
    number of devices.
    """
    first = asked.by_plan[AS_REQUESTED].model_copy(update={"mode": "plan"})
    key = f"jobs[{number}].command"
    try:
        base = planning_base(first)
        request = in_steps(asked.by_plan[AS_REQUESTED], base.num_samples)
    except ConfigError as error:
        raise ConfigError([replace(x, key=f"{key}: {x.key}") for x in error.faults]) from None
    parts: dict[Choice, StepParts] = {}
    refusals: list[Fault] = []
    analysis = ModelAnalysis(base.profile, base.training.precision)
    for name, one in asked.by_plan.items():
        for count in sorted({*counts, asked.entry.devices}):
            try:
                parts[count, name] = _parts(one, count, base, analysis)
            except PlanError as error:
                refusals += error.faults
    if not parts:
        raise ConfigError([replace(x, key=f"{key}: {x.key}") for x in dict.fromkeys(refusals)])
    times = StepTimes(parts, FittedStepTime(), {}, request.train.global_batch)
    entry = asked.entry
    job = SchedulableJob(
        entry.name,
        entry.devices,
        AS_REQUESTED,
        tuple(asked.by_plan),
        entry.arrival_s,
        request.train.steps,
        request.train.global_batch,
        times,
        entry.guaranteed,
    )
    return PlannedJob(job, request, asked.commands)


def _parts(
    request: Request, devices: int, base: PlanningBase, analysis: ModelAnalysis
) -> StepParts:
    """Return the predicted step of a request on the first `devices` devices. Raises PlanError where
    there is no such plan."""
    training = replace(base.training, accumulate=request.train.accumulate)
    cluster, strategy = base.cluster.first(devices), request.strategy_graph()
    if strategy.is_auto:
        can_offload = base.can_offload
        strategy = search(strategy, cluster, analysis, training, can_offload=can_offload).strategy
    plan, _ = resolve_and_simulate(strategy, cluster, analysis, training)
    predicted = plan.predicted
    return StepParts(
        predicted.compute_s,
        predicted.communication_s,
        predicted.optimizer_s,
        predicted.idle_s,
        plan.world_size,
    )
