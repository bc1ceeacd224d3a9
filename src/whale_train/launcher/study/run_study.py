"""Run a study: ask Optuna for values, run a job with them, and report the result, trial by trial.

This file owns the loop. Each trial's job is run like any job of a sweep (`launcher/job.py`).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write
from rich.console import Console
from rich.text import Text

from whale_train.errors import ConfigError, RequestError
from whale_train.launcher.compose.command_line import composed_job
from whale_train.launcher.compose.output_dirs import run_dir_faults
from whale_train.launcher.compose.studies import job_faults, read_study
from whale_train.launcher.compose.sweeps import params_of
from whale_train.launcher.job_end import EXIT_STATUS, JobEnd
from whale_train.launcher.queued import from_queue
from whale_train.launcher.ranks.stop_signals import stop_signals
from whale_train.launcher.study.follow import TrialFollower
from whale_train.launcher.study.kept_study import (
    ask,
    num_missing,
    num_wanted,
    open_study,
    retry,
    retry_lost,
    tell,
)
from whale_train.launcher.study.objectives import Goals, objective_value
from whale_train.launcher.study.results import best_of, pasted, rows_of, write_results
from whale_train.launcher.study.search_space import SweptKey
from whale_train.launcher.study.settings import SECTION, StudyRequest
from whale_train.launcher.ui.show_error import error_text, terminal_width
from whale_train.launcher.ui.study_table import study_table
from whale_train.launcher.ui.terminal import open_console

if TYPE_CHECKING:
    from optuna import Study, Trial


@dataclass
class _Sweep:
    """A study, with all that running a trial needs.

    context, task, config: Hydra's context, task function and config of the sweep.
    study: Optuna's study.
    asked: the request for the study.
    space: the parameters by key.
    fixed: the overrides that all trials share.
    goals: the objectives.
    console: prints the progress of the sweep.
    """

    context: HydraContext
    task: TaskFunction
    config: DictConfig
    study: "Study"
    asked: StudyRequest
    space: dict[str, SweptKey]
    fixed: list[str]
    goals: Goals
    console: Console


def run_study(
    context: HydraContext, task: TaskFunction, config: DictConfig, arguments: Sequence[str]
) -> int:
    """Run the study of a sweep, print its table, and return the exit status.

    context, config: Hydra's context and config of the sweep.
    task: runs a job; takes the job's config and a `follower`.
    arguments: the overrides of the command line.

    The exit status is 0 when a trial has a result or was pruned, 1 when too many or all trials
    failed, 2 when the study or every trial was refused, and 130 when the command was interrupted.
    """
    console = open_console(sys.stdout)
    ends: list[JobEnd] = []
    sweep = None
    with stop_signals():
        try:
            sweep = _begin(context, task, config, arguments, console)
            status = _run_trials(sweep, ends)
        except RequestError as error:
            sys.stdout.flush()
            sys.stderr.write(error_text(error, terminal_width(sys.stderr)) + "\n")
            return EXIT_STATUS["refused"]
        except KeyboardInterrupt:
            status = EXIT_STATUS["interrupted"]
    if sweep is not None:
        _show(sweep)
    if status is not None:
        return status
    done = any(end.status == "done" or end.is_pruned for end in ends)
    return 0 if done or not ends else max(EXIT_STATUS[end.status] for end in ends)


def _begin(
    context: HydraContext,
    task: TaskFunction,
    config: DictConfig,
    arguments: Sequence[str],
    console: Console,
) -> _Sweep:
    """Open the study of a sweep. Raises ConfigError where the study or its directory is refused."""
    parser = OverridesParser.create(config_loader=context.config_loader)
    parsed = [*params_of(config, parser), *parser.parse_overrides(list(arguments))]
    asked, space, fixed, goals = read_study(config, parsed)
    study = open_study(asked, space, fixed, goals)
    elsewhere = retry_lost(study)
    if elsewhere:
        numbers = ", ".join(map(str, elsewhere))
        _say(console, f"running elsewhere, and left alone: trial {numbers}")
    if num_missing(study, num_wanted(asked, space)) > 0:
        faults = run_dir_faults(config, len(study.get_trials(deepcopy=False)))
        if faults:
            raise ConfigError(faults)
    return _Sweep(context, task, config, study, asked, space, fixed, goals, console)


def _run_trials(sweep: _Sweep, ends: list[JobEnd]) -> int | None:
    """Run the missing trials, and add the ends of their jobs to `ends`.

    Returns the exit status of a sweep that ended before the last trial, else None. Raises
    KeyboardInterrupt where the sweep is interrupted.
    """
    settings = sweep.asked.settings
    wanted = num_wanted(sweep.asked, sweep.space)
    while (missing := num_missing(sweep.study, wanted)) > 0:
        with _trials(sweep, min(missing, settings.n_jobs)) as trials:
            batch = [_start(sweep, trial) for trial in trials]
            for trial, end in zip(trials, from_queue(batch, sweep.console), strict=True):
                ends.append(_finish(sweep, trial, end))
        if any(end.status == "interrupted" and not end.is_pruned for end in ends):
            return EXIT_STATUS["interrupted"]
        failed = sum(end.status == "failed" for end in ends)
        if failed > settings.max_failure_rate * wanted:
            key = f"{SECTION}.max_failure_rate={settings.max_failure_rate:g}"
            said = f"error: {failed} of {wanted} trials failed, more than {key} allows\n"
            sys.stderr.write(said)
            return EXIT_STATUS["failed"]
    return None


@contextmanager
def _trials(sweep: _Sweep, number: int) -> Iterator[list["Trial"]]:
    """Ask the study for `number` trials, and yield them.

    At the end of the context, trials without an outcome are marked as interrupted. The next command
    tries their values again.
    """
    trials: list[Trial] = []
    try:
        for _ in range(number):
            trials.append(ask(sweep.study, sweep.space))
        yield trials
    finally:
        for trial in trials:
            state = sweep.study.get_trials(deepcopy=False)[trial.number].state
            if not state.is_finished():
                _finish(sweep, trial, JobEnd("interrupted", Path()))


def _start(sweep: _Sweep, trial: "Trial") -> JobEnd:
    """Run the job of a trial and return its end, or the submission of the job to a queue."""
    values = [sweep.space[key].override(value) for key, value in trial.params.items()]
    total = num_wanted(sweep.asked, sweep.space)
    _say(sweep.console, f"trial {trial.number} ({total} in all): {' '.join(values)}")
    try:
        composed = composed_job(sweep.config, [*sweep.fixed, *values])
        faults = [*job_faults(sweep.asked, composed), *run_dir_faults(composed, trial.number)]
        if faults:
            raise ConfigError(faults)
    except ConfigError as error:
        sys.stdout.flush()
        sys.stderr.write(error_text(error, terminal_width(sys.stderr)) + "\n")
        return JobEnd("refused", Path(), reason=str(error))
    with read_write(composed.hydra.job), open_dict(composed.hydra.job):
        composed.hydra.job.id = composed.hydra.job.num = trial.number
    follower = TrialFollower(trial, sweep.goals.series)
    returned = run_job(
        task_function=lambda config: sweep.task(config, follower=follower),  # type: ignore[call-arg]
        config=composed,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=sweep.context,
    )
    end: JobEnd = returned.return_value
    return end


def _finish(sweep: _Sweep, trial: "Trial", end: JobEnd) -> JobEnd:
    """Record the end of a trial's job in the study, and return the end.

    The status becomes `failed` where a finished job has no value for an objective.
    """
    from optuna.trial import TrialState

    states = {"failed": TrialState.FAIL, "interrupted": TrialState.FAIL}
    values: list[float] | None = None
    if end.status == "done":
        is_plan = sweep.config.get("mode") == "plan"
        read = [objective_value(name, end.run_dir, is_plan) for name in sweep.goals.names]
        reasons = [value for value in read if isinstance(value, str)]
        if reasons:
            end = replace(end, status="failed", reason="; ".join(reasons))
            sys.stderr.write(f"error: trial {trial.number}: {end.reason}\n")
        else:
            values = [float(value) for value in read]
    status = "pruned" if end.is_pruned else end.status
    trial.set_user_attr("status", status)
    if end.reason:
        trial.set_user_attr("reason", end.reason)
    if end.run_dir != Path():
        trial.set_user_attr("run_dir", str(end.run_dir.absolute()))
    # Optuna gets a refused trial as a pruned one, so that samplers avoid its values.
    pruned = end.is_pruned or end.status == "refused"
    state = TrialState.PRUNED if pruned else states.get(end.status, TrialState.COMPLETE)
    tell(sweep.study, trial.number, state, values)
    if status == "interrupted":
        retry(sweep.study, sweep.study.get_trials(deepcopy=False)[trial.number])
    return end


def _show(sweep: _Sweep) -> None:
    """Print the study's table and the overrides of the best trials, and write the results file."""
    trials = sweep.study.get_trials(deepcopy=False)
    if not trials:
        return
    best = best_of(sweep.study)
    rows = rows_of(trials, best)
    console = sweep.console
    console.print(study_table(rows, list(sweep.space), sweep.goals.names, console.width))
    if best:
        path = write_results(sweep.study, best, Path(str(sweep.config.hydra.sweep.dir)))
        _say(console, f"the best, as a file: {path}")
        for trial in best[: 1 if len(sweep.goals.names) == 1 else None]:
            values = [sweep.space[key].override(value) for key, value in trial.params.items()]
            _say(console, pasted([*sweep.fixed, *values], trial.number))


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
