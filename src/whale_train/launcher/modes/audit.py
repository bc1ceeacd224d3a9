"""Run `mode=audit`: prove which samples a run has trained on, and how often."""

from pathlib import Path

from rich.console import Console

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.job_end import JobEnd
from whale_train.launcher.modes.run_history import history_of
from whale_train.launcher.modes.sample_audit import audited, holding, taken_in
from whale_train.launcher.ranks.run_dir import remove_unused
from whale_train.launcher.ui.show_audit import audit_view, step_view


def audit_job(request: Request, run_dir: Path, console: Console) -> JobEnd:
    """Show the audit of the run that the request names, and the samples of the step `audit.step`.

    Nothing is written. Raises ConfigError for a directory without a run, and for a step that the
    run does not have or whose record is lost.
    """
    assert request.run is not None
    audit = audited(history_of(Path(request.run)))
    step = request.audit.step
    if step is not None and step > audit.steps:
        rule = f"is a step that the run does not have: its last is {audit.steps:,}"
        raise ConfigError([Fault("audit.step", str(step), rule, "name one up to that")])
    console.print(audit_view(audit, request.run))
    if step is not None:
        holder = holding(audit.history, step)
        if holder is None:
            rule = "is of a run that is not to be had"
            raise ConfigError([Fault("audit.step", str(step), rule, "name a later one")])
        console.print(step_view(holder, step, taken_in(holder, step)))
    remove_unused(run_dir)
    if audit.wrong:
        said = "not every sample was taken once an epoch: " + "; ".join(audit.wrong)
        return JobEnd("failed", run_dir, said=said)
    return JobEnd("done", run_dir)
