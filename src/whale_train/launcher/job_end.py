"""Describe how a job ends: its status, and the last lines that are said of it.

What is said of a job that is done is printed here. What is said of any other is in its `JobEnd`, so
that a command can print it and a program can raise it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from whale_train.checkpoints.checkpoint_files import MODEL
from whale_train.errors import RequestError
from whale_train.launcher.modes.verification import Verification
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.ranks.host_process import HostOutcome, HostProcess, describe_failure
from whale_train.launcher.ranks.run_dir import METRICS, remove_unused
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.report.report_files import REPORT, write_view
from whale_train.launcher.slurm.submit import Submission
from whale_train.launcher.ui.progress import (
    compiled_line,
    pasted_line,
    skipped_note,
    summary_line,
    unlike_predicted,
    waits_note,
)
from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import in_bytes
from whale_train.strategies.hardware.calibration import is_measured
from whale_train.strategies.plan.plan import Plan

Status = Literal["done", "failed", "refused", "interrupted"]
EXIT_STATUS: dict[Status, int] = {"done": 0, "failed": 1, "refused": 2, "interrupted": 130}


@dataclass(frozen=True)
class JobEnd:
    """The end of a job.

    status: `done`, `failed`, `refused` or `interrupted`.
    run_dir: the run directory.
    summary: the measurements of a job that is done; empty for any other.
    is_told: whether ranks that others started have been told of the end.
    submission: how to submit a job that goes to a queue; None for any other job.
    reason: why the job was refused or failed; '' where it is not known here.
    is_pruned: whether the job was interrupted by its follower, and not by a user.
    said: why the job is not done, as text without a trailing newline; '' where there is nothing to
        say, or it has been said.
    refusal: the error by which a further attempt of a failed job was refused; None where there was
        none.
    verification: the comparison that `mode=verify` made; None for any other mode, and where it came
        to none.
    """

    status: Status
    run_dir: Path
    summary: dict[str, Any] = field(default_factory=dict)
    is_told: bool = False
    submission: Submission | None = None
    reason: str = ""
    is_pruned: bool = False
    said: str = ""
    refusal: RequestError | None = None
    verification: Verification | None = None


def run_alone(run_dir: Path, program: Sequence[str], signals: StopSignals) -> JobEnd | None:
    """Run a program that needs no ranks on a run directory, to its end.

    Returns None where it succeeded, and otherwise the end of the job.
    """
    host = HostProcess.start(run_dir, tuple(program))
    try:
        outcome = host.wait(signals.poll)
    finally:
        host.stop()
    if outcome.status == "interrupted":
        return interrupted(run_dir)
    if outcome.failure is not None:
        return JobEnd("failed", run_dir, said=describe_failure(outcome.failure, ""))
    return None


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of `summary.json`, which a run that is done has written."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary


def finish(
    outcome: HostOutcome, resolved: Resolved, run_dir: Path, console: Console, title: str = ""
) -> JobEnd:
    """Print how a run that is done ended, and return the end of the job.

    title: the names of model, strategy and hardware, for a line to paste into a message; '' prints
        no such line.
    """
    if outcome.status == "done":
        summary = summary_of(run_dir)
        for warning in summary.get("warnings", ()):
            console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
        if summary.get("ended_early"):
            line = f"ended after step {summary['steps']}: {summary['ended_early']}"
            console.print(Portable(Text(line)), soft_wrap=True)
        if (best := summary.get("best")) is not None:
            line = f"best: {best['metric']} {best['value']:.6g} after step {best['step']}"
            console.print(Portable(Text(line)), soft_wrap=True)
        if summary["stopped_after"] is not None:
            said = f"interrupted after step {summary['stopped_after']}, which is saved; "
            said += f"go on with hydra.run.dir={run_dir} train.resume=auto"
            return JobEnd("interrupted", run_dir, said=said)
        unlike = unlike_predicted(summary, resolved.emulated)
        if unlike:
            console.print(
                f"warning: {unlike}; {_why(resolved, summary)}", style="yellow", soft_wrap=True
            )
        if skipped := skipped_note(summary, resolved.plan.precision):
            console.print(f"warning: {skipped}", style="yellow", soft_wrap=True)
        if title:
            pasted = pasted_line(summary, _first_loss(run_dir), title, resolved.plan.world_size)
            console.print(Portable(Text(pasted)), soft_wrap=True)
        console.print(Portable(summary_line(summary, run_dir, resolved.emulated)))
        if summary.get("compiled_s"):
            console.print(Portable(Text(compiled_line(summary["compiled_s"]))), soft_wrap=True)
        if summary.get("model_bytes") is not None:
            console.print(Portable(model_line(run_dir, summary["model_bytes"])), soft_wrap=True)
        return JobEnd("done", run_dir, summary)
    if outcome.status == "failed":
        assert outcome.failure is not None
        place = _place(resolved.plan, outcome.failure.rank)
        said = describe_failure(outcome.failure, place)
        return JobEnd("failed", run_dir, reason=_last_line(said), said=said)
    return interrupted(run_dir)


def report_run(end: JobEnd, console: Console) -> None:
    """Write the page of a run into its directory, and print its path where steps were taken to the
    run's end.

    A page that cannot be written, or a run that has no plan, does not change how the job ends.
    """
    page = end.run_dir / REPORT
    try:
        write_view(end.run_dir, None, page)
    except (OSError, RequestError) as error:
        if end.summary:
            said = f"warning: no {REPORT}: {error}"
            console.print(Text(said, style="yellow"), soft_wrap=True)
        return
    if end.summary:
        console.print(Portable(Text(f"the report: {page}")), soft_wrap=True)


def _first_loss(run_dir: Path) -> float | None:
    """Return the loss of the first step in `metrics.jsonl`; None where there is none."""
    try:
        with (run_dir / METRICS).open(encoding="utf-8") as lines:
            first: float | None = json.loads(next(lines))["loss"]
            return first
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def pruned(outcome: HostOutcome, run_dir: Path, console: Console) -> JobEnd | None:
    """Print that a job was ended by its follower, and return the end of the job.

    Returns None where it had ended by itself.
    """
    if outcome.status == "failed":
        return None
    if outcome.status == "done" and summary_of(run_dir)["stopped_after"] is None:
        return None
    console.print(Text(f"pruned; what was written is in {run_dir}"), soft_wrap=True)
    return JobEnd("interrupted", run_dir, is_pruned=True)


def never_met(outcome: HostOutcome, run_dir: Path) -> JobEnd:
    """Return the end of a job whose ranks, which others started, did not meet."""
    if outcome.failure is None:
        return interrupted(run_dir)
    return JobEnd("failed", run_dir, said=describe_failure(outcome.failure, ""))


def started_elsewhere(status: int, run_dir: Path) -> JobEnd:
    """Return the end of a job whose ranks ran elsewhere, by their exit status.

    The ranks have printed all there is to say. Measurements are read from the run directory, where
    the first host shares it.
    """
    named = {number: name for name, number in EXIT_STATUS.items()}
    summary = run_dir / "summary.json"
    measured = (
        json.loads(summary.read_text(encoding="utf-8")) if status == 0 and summary.exists() else {}
    )
    remove_unused(run_dir)  # which has only Hydra's own files where it is not shared
    return JobEnd(named.get(status, "failed"), run_dir, measured, is_told=True)


def model_line(run_dir: Path, size: int) -> Text:
    """Return the line that says where a run's trained weights are.

    run_dir: the run directory.
    size: bytes of the weights.
    """
    return Text(f"the trained model: {run_dir / MODEL} ({in_bytes(size)})")


def _why(resolved: Resolved, summary: Mapping[str, Any]) -> str:
    """Return the likely reason of a prediction far from the measurement, and a remedy.

    summary: the content of `summary.json`.
    """
    if waited := waits_note(summary):
        return waited
    precision = resolved.plan.precision
    if resolved.emulated or is_measured(resolved.cluster, precision):
        return "the machine may have been busy, or other programs while it was calibrated"
    kind, command = resolved.cluster.devices[0].name, "whale-train mode=calibrate"
    if resolved.cluster.on_cpu:  # the calibration depends on the threads of each process
        command += f" hardware=cpu hardware.devices={resolved.plan.world_size}"
    return f"{kind}'s {precision} is the catalogue's: {command} measures it"


def interrupted(run_dir: Path) -> JobEnd:
    """Return the end of a job that was interrupted."""
    return JobEnd("interrupted", run_dir, said=f"interrupted; what was written is in {run_dir}")


def _last_line(said: str) -> str:
    """Return the line of a failure's message that names the error: the last one of its traceback,
    before the line about the log."""
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-2] if len(lines) > 1 else lines[0]


def _place(plan: Plan, rank: int | None) -> str:
    """Return the place of a rank in the plan, in words: device, node and TaskGraphs. It is '' for
    None."""
    if rank is None:
        return ""
    held = plan.ranks[rank]
    parts = " and ".join(plan.task_graphs[i].name for i in held.task_graphs)
    return f"{held.device}, node {held.node}, TaskGraph {parts}"
