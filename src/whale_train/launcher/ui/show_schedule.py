"""Show a schedule: what each job gains from one more device, and what became of the jobs."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from whale_train.quantities import in_seconds
from whale_train.strategies.cluster_scheduling.schedulable_job import SchedulableJob
from whale_train.strategies.cluster_scheduling.sensitivity_curve import (
    SensitivityCurve,
    devices_as_requested,
)
from whale_train.strategies.cluster_scheduling.simulate_schedule import SimulatedSchedule

_MOST_ROWS = 40


def gains_table(jobs: Sequence[tuple[SchedulableJob, SensitivityCurve]]) -> Table:
    """Return a table of what every job would gain from one more device than it requests.

    jobs: each job with its curve.
    """
    heads = ("job", "requests", "as fast on", "samples/s", "best plan there", "one more device")
    table = Table(*heads, box=None, pad_edge=False, header_style="dim")
    for job, curve in jobs:
        held = min(job.devices, len(curve.points) - 1)
        here, gain = curve.points[held], curve.gain(held)
        asked = job.requested_samples_per_s
        table.add_row(
            job.name,
            f"{job.devices}, {f'{asked:.4g} samples/s' if asked else 'no plan'}",
            f"{devices_as_requested(job, curve)}{'' if job.is_guaranteed else ' (best effort)'}",
            f"{here.samples_per_s:.4g}",
            here.plan or "none",
            _gained(held, here.samples_per_s, curve.rate(held + 1), gain.devices, gain.per_device),
        )
    return table


def _gained(held: int, here: float, with_one: float, devices: int, per_device: float) -> str:
    """Return the gain from one more device in words, or where the next gain is."""
    if not devices:
        return "nothing, nor do more"
    if with_one > here:
        more = (with_one - here) / here if here else float("inf")
        return f"+{more:.1%}" if here else f"runs: {with_one:.4g} samples/s"
    share = f"+{per_device * devices / here:.1%}" if here else "runs"
    return f"nothing; {share} on {held + devices}"


def outcome_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """Return a table of the jobs at the end of a schedule that ran.

    rows: the jobs as `schedule.json` has them.
    """
    heads = ("job", "status", "submitted", "began", "ended", "re-planned", "ran on")
    table = Table(*heads, box=None, pad_edge=False, header_style="dim")
    for row in rows:
        history = row["history"]
        assert isinstance(history, list)
        ran = " -> ".join(f"{x['devices']} {x['plan']}" for x in history)
        times = (_at(row[key]) for key in ("arrival_s", "started_s", "ended_s"))
        again = str(row["reconfigurations"])
        table.add_row(str(row["name"]), str(row["status"]), *times, again, ran)
    return table


def _at(seconds: object) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def policies_table(schedules: Mapping[str, SimulatedSchedule]) -> Table:
    """Return a table that compares simulated schedules, by the name of their policy."""
    heads = ("policy", "jobs ended", "mean completion", "99th percentile", "makespan", "re-planned")
    table = Table(*heads, box=None, pad_edge=False, header_style="dim")
    for name, schedule in schedules.items():
        times = (
            schedule.average_completion_s,
            schedule.completion_percentile_s(0.99),
            schedule.makespan_s,
        )
        table.add_row(
            name,
            f"{len(schedule.ended)} of {len(schedule.records)}",
            *(in_seconds(x) if schedule.ended else "none ends" for x in times),
            f"{schedule.reconfigurations} times",
        )
    return table
