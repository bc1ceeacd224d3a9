"""Run `mode=schedule`: several jobs on one inventory, simulated, or started here or elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault, RequestError
from whale_train.launcher.compose.command_line import parsed_flags, parsed_overrides
from whale_train.launcher.job_end import JobEnd
from whale_train.launcher.planning.devices.devices_here import HostPlacement
from whale_train.launcher.planning.devices.placing import place_of, this_host_of
from whale_train.launcher.ranks.on_ray.bundles import threads_of_a_rank
from whale_train.launcher.ranks.run_dir import write_environment, write_json
from whale_train.launcher.ranks.run_files import make_run_dir
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.schedule.job_file import read_jobs
from whale_train.launcher.schedule.job_process import HostStarter
from whale_train.launcher.schedule.job_starter import JobStarter
from whale_train.launcher.schedule.planned_job import PlannedJob, planned_job
from whale_train.launcher.schedule.ray_jobs import ray_starter
from whale_train.launcher.schedule.running_jobs import LiveJob, RunningJobs
from whale_train.launcher.schedule.slurm_jobs import slurm_starter, threads_on_slurm
from whale_train.launcher.schedule.submissions import read_trace
from whale_train.launcher.slurm.submit import FOLDER
from whale_train.launcher.ui.show_schedule import gains_table, outcome_table, policies_table
from whale_train.launcher.ui.terminal import Portable
from whale_train.machine.limits import cores
from whale_train.strategies.cluster_scheduling.baseline_policies import policies
from whale_train.strategies.cluster_scheduling.job_trace import draw_trace
from whale_train.strategies.cluster_scheduling.replan_policy import ReplanOptions
from whale_train.strategies.cluster_scheduling.schedulable_job import (
    JobState,
    Policy,
    SchedulableJob,
)
from whale_train.strategies.cluster_scheduling.sensitivity_curve import (
    SensitivityCurve,
    curve_of,
    devices_as_requested,
)
from whale_train.strategies.cluster_scheduling.simulate_schedule import (
    JobRecord,
    SimulatedSchedule,
    simulate_schedule,
)

SCHEDULE = "schedule.json"
JOBS = "jobs"  # the folder of the jobs' run directories
_SIMULATED_S = 78.0  # a checkpoint and a resume of Rubick's jobs, on average (arXiv 2408.08586)


def schedule_jobs(
    request: Request,
    run_dir: Path,
    console: Console,
    arguments: Sequence[str],
    signals: StopSignals,
) -> JobEnd:
    """Show what each job would gain from more devices; then simulate the jobs, or run them.

    arguments: command-line arguments of the request.

    Raises ConfigError with all faults of the jobs.
    """
    assert request.jobs is not None
    options = request.schedule
    place = _place(request)
    devices = len(place.cluster.devices)
    hardware = _of_all_jobs(arguments)
    starter: JobStarter
    if request.launcher.kind == "slurm":
        if place.cluster.on_cpu:
            hardware += threads_on_slurm(request.launcher, place.cluster.nodes[0])
        starter = slurm_starter(request, hardware, run_dir / FOLDER)
    elif request.launcher.kind == "ray":
        hardware.append(f"launcher.threads={threads_of_a_rank(request)}")
        starter = ray_starter(request, hardware, signals)
    else:
        if place.device == "cpu" and not options.simulate:  # jobs share the cores
            hardware.append(f"launcher.threads={max(1, cores() // devices)}")
        starter = HostStarter(None if place.device == "cuda" else tuple(hardware))
    asked = read_jobs(request.jobs, devices, hardware, options.plans)
    counts = starter.counts(devices)
    planned: list[PlannedJob] = []
    faults: list[Fault] = []
    for number, job in enumerate(asked):
        if not starter.may_hold(job.entry.devices):
            rule = "is neither part of a node nor whole nodes"
            remedy = f"use {', '.join(map(str, counts))}"
            at = f"jobs[{number}].devices"
            faults.append(Fault(at, str(job.entry.devices), rule, remedy))
    if faults:
        raise ConfigError(faults)
    with console.status("planning the jobs"):
        for number, job in enumerate(asked):
            try:
                planned.append(planned_job(number, job, counts))
            except RequestError as error:
                faults += error.faults
    if faults:
        raise ConfigError(faults)
    jobs = [one.job for one in planned]
    curves = [curve_of(job.throughput, job.plans, devices) for job in jobs]
    submitted = _submitted(request, jobs, devices, counts)
    if not options.simulate:
        _refuse_never_run(request, jobs, devices, counts)
    run_dir = make_run_dir(request, run_dir)
    write_environment(run_dir)
    console.print(Portable(gains_table(list(zip(jobs, curves, strict=True)))))
    if options.simulate:
        return _simulate(request, submitted, devices, run_dir, console)
    folder = run_dir / JOBS
    folder.mkdir()
    live = [LiveJob(one, folder / one.job.name) for one in planned]
    decisions: list[dict[str, Any]] = []

    def policy(reconfiguration_s: float) -> Policy:
        return policies(_options(request, reconfiguration_s))[options.policy]

    def changed(line: str) -> None:
        decisions.append({"at_s": round(running.now_s, 3), "what": line})
        console.print(Portable(Text(f"{running.now_s:7.1f} s  {line}")), soft_wrap=True)
        write_json(run_dir / SCHEDULE, _record(request, running, decisions))

    running = RunningJobs(
        *(live, devices, starter, policy, options.reconfiguration_s, options.round_s, changed)
    )
    try:
        running.run(signals)
    finally:
        record = _record(request, running, decisions)
        write_json(run_dir / SCHEDULE, record)
        console.print(Portable(outcome_table(record["jobs"])))
        console.print(Text(f"the schedule: {run_dir / SCHEDULE}"), soft_wrap=True)
    failed = [job for job in live if job.status != "done"]
    if not failed:
        return JobEnd("done", run_dir)
    said = [f"{job.name} {job.status}:\n{job.said}" for job in failed]
    return JobEnd("failed", run_dir, said="\n".join(said))


def _place(request: Request) -> HostPlacement:
    """Return the devices that are shared. Raises ConfigError where there are none here, unless the
    jobs are simulated or run elsewhere."""
    faults: list[Fault] = []
    is_elsewhere = request.schedule.simulate or request.launcher.kind in ("slurm", "ray")
    mode = "plan" if is_elsewhere else "train"
    asked = request.model_copy(update={"mode": mode})
    place = place_of(asked, this_host_of(asked), faults)
    if faults or place is None:
        raise ConfigError(faults)
    return place


def _of_all_jobs(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the schedule that every job has too: its hardware, and where its own
    config files are."""
    flags = parsed_flags(arguments)
    folder = [] if flags.config_dir is None else [f"--config-dir={flags.config_dir}"]
    overrides = parsed_overrides(flags.overrides)
    keys = [override.key_or_group for override in overrides]
    is_shared = [x.partition(".")[0] == "hardware" or x == "hydra.searchpath" for x in keys]
    return [*folder, *compress((str(x.input_line) for x in overrides), is_shared)]


def _refuse_never_run(
    request: Request, jobs: Sequence[SchedulableJob], devices: int, counts: Sequence[int]
) -> None:
    """Raise ConfigError for jobs to which the policy gives no devices even where they are alone:
    the schedule would wait for them without end."""
    options = request.schedule
    policy = policies(_options(request, 0.0))[options.policy]
    faults = []
    for number, job in enumerate(jobs):
        alone = JobState(job, None, job.steps, 0.0, None, 0)
        if not policy(0.0, [alone], devices):
            rule = f"is a number for which schedule.policy={options.policy} has no plan"
            others = {n: replace(alone, job=replace(job, devices=n)) for n in counts}
            able = [n for n, other in others.items() if policy(0.0, [other], devices)]
            remedy = ", or ".join(["use schedule.policy=replan", *map(str, able)])
            faults.append(Fault(f"jobs[{number}].devices", str(job.devices), rule, remedy))
    if faults:
        raise ConfigError(faults)


def _options(request: Request, reconfiguration_s: float) -> ReplanOptions:
    options = request.schedule
    return ReplanOptions(reconfiguration_s, options.least_useful_share, options.starvation_s)


def _submitted(
    request: Request, jobs: Sequence[SchedulableJob], devices: int, counts: Sequence[int]
) -> list[SchedulableJob]:
    """Return the jobs that are submitted: those of the trace, or the file's own. Raises
    ConfigError."""
    options = request.schedule
    if options.trace is not None:
        return read_trace(options.trace, jobs, counts)
    if options.trace_jobs is not None:
        return draw_trace(jobs, options.trace_jobs, devices, request.seed)
    return list(jobs)


def _simulate(
    request: Request,
    jobs: Sequence[SchedulableJob],
    devices: int,
    run_dir: Path,
    console: Console,
) -> JobEnd:
    """Simulate the jobs under the policy asked for, and under all others beside it."""
    options = request.schedule
    given_s = options.reconfiguration_s
    cost_s = _SIMULATED_S if given_s is None else given_s
    by_name = policies(_options(request, cost_s))
    schedules: dict[str, SimulatedSchedule] = {}
    for name in sorted(by_name, key=lambda x: x != options.policy):
        with console.status(f"simulating {name}"):
            policy = by_name[name]
            schedules[name] = simulate_schedule(jobs, policy, devices, cost_s, options.round_s)
    console.print(Portable(policies_table(schedules)))
    record = {
        "policy": options.policy,
        "devices": devices,
        "reconfiguration_s": cost_s,
        "policies": {name: _summary(schedule) for name, schedule in schedules.items()},
        "jobs": [_simulated(x) for x in schedules[options.policy].records],
    }
    write_json(run_dir / SCHEDULE, record)
    console.print(Text(f"the schedule: {run_dir / SCHEDULE}"), soft_wrap=True)
    return JobEnd("done", run_dir)


def _summary(schedule: SimulatedSchedule) -> dict[str, float]:
    return {
        "ended": len(schedule.ended),
        "average_completion_s": schedule.average_completion_s,
        "makespan_s": schedule.makespan_s,
        "reconfigurations": schedule.reconfigurations,
    }


def _simulated(record: JobRecord) -> dict[str, Any]:
    history = [
        {"at_s": at, "devices": x.devices if x else 0, "plan": x.plan if x else None}
        for at, x in record.history
    ]
    return {
        "name": record.job.name,
        "guaranteed": record.job.is_guaranteed,
        "requested": {"devices": record.job.devices, "plan": record.job.plan},
        "arrival_s": record.job.arrival_s,
        "started_s": record.started_s,
        "ended_s": record.ended_s,
        "reconfigurations": record.reconfigurations,
        "history": history,
    }


def _record(
    request: Request, running: RunningJobs, decisions: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the content of `schedule.json` of jobs that run."""
    return {
        "policy": request.schedule.policy,
        "devices": running.devices,
        "reconfiguration_s": running.expected_reconfiguration_s,
        "reconfigurations_s": [round(x, 3) for x in running.measured_s],
        "decisions": list(decisions),
        "jobs": [_live(job, running.devices) for job in running.jobs],
    }


def _live(live: LiveJob, devices: int) -> dict[str, Any]:
    job = live.planned.job
    curve = curve_of(job.throughput, job.plans, devices)
    return {
        "name": job.name,
        "guaranteed": job.is_guaranteed,
        "requested_devices": job.devices,
        "minimum_devices": devices_as_requested(job, curve) if job.is_guaranteed else 0,
        "status": live.status,
        "arrival_s": job.arrival_s,
        "started_s": live.started_s,
        "first_step_s": live.first_step_s,
        "ended_s": live.ended_s,
        "reconfigurations": live.reconfigurations,
        "history": live.history,
        "curve": _curve(curve),
    }


def _curve(curve: SensitivityCurve) -> list[dict[str, Any]]:
    return [
        {"devices": x.devices, "plan": x.plan, "samples_per_s": x.samples_per_s}
        for x in dict.fromkeys(curve.points)
    ]
