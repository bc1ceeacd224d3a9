"""Open a study, new or stored, and record the outcomes of its trials.

A trial has four attributes: `status`, the status of its job; `reason`, the reason for any status
but `done`; `run_dir`; and `process`, the process that runs the trial. A trial whose process has
ended without recording an outcome is lost. It is marked as failed, and its values are tried again.
"""

import os
import re
import socket
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale_train.errors import ConfigError, Fault
from whale_train.launcher.study.objectives import Goals
from whale_train.launcher.study.samplers import GRID, make_pruner, make_sampler
from whale_train.launcher.study.search_space import SweptKey
from whale_train.launcher.study.settings import JOURNAL, SECTION, StudyRequest, shown_url
from whale_train.own_code import said

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial, TrialState

_NAME = "whale-train"  # the name of a study for which none is given
_ASKED = "whale-train"  # the attribute of a study with its overrides and objectives
LOST = ("interrupted", "lost")  # statuses of trials that are tried again


def open_study(
    asked: StudyRequest, space: Mapping[str, SweptKey], fixed: Sequence[str], goals: Goals
) -> "Study":
    """Return the study: a new one, or a stored one with its trials.

    asked: the request for the study.
    space: the parameters by key.
    fixed: the overrides that all trials share.
    goals: the objectives.

    Raises ConfigError where the storage cannot be opened, and where a stored study has other
    parameters, overrides or objectives.
    """
    import optuna
    from optuna.storages import journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    settings, grid = asked.settings, _grid(asked, space)
    key, url = f"{SECTION}.storage", settings.storage
    try:
        storage: Any = url
        if url is not None and url.startswith(JOURNAL):
            file = journal.JournalFileBackend(url.removeprefix(JOURNAL))
            storage = optuna.storages.JournalStorage(file)
        study = optuna.create_study(
            storage=storage,
            study_name=settings.study_name or _NAME,
            directions=goals.directions,
            pruner=make_pruner(*asked.pruner),
            load_if_exists=True,
        )
        trials = study.get_trials(deepcopy=False)
    except Exception as error:  # databases and their drivers raise errors of any kind
        remedy = "name a file in a folder that exists, or a database that answers"
        rule = f"cannot be opened ({said(error)[:200]})"
        raise ConfigError([Fault(key, shown_url(str(url)), rule, remedy)]) from error
    study.sampler = make_sampler(*asked.sampler, grid, len(trials))
    _refuse_unlike(study, trials, space, fixed, goals)
    return study


def ask(study: "Study", space: Mapping[str, SweptKey]) -> "Trial":
    """Return a new trial of this process, with a value for every parameter.

    space: the parameters by key.
    """
    trial = study.ask({key: parameter.distribution() for key, parameter in space.items()})
    trial.set_user_attr("process", _process(os.getpid()))
    return trial


def tell(
    study: "Study", number: int, state: "TrialState", values: Sequence[float] | None = None
) -> None:
    """Record the end of a trial in the study.

    number: the number of the trial.
    state: the final state.
    values: the value of each objective; None without a result.
    """
    try:
        study.tell(number, values, state)
    except (RuntimeError, KeyError):
        # After the last point, a grid's sampler stops `Study.optimize`, which is not in use here.
        # The trial has then been recorded.
        recorded = study.get_trials(deepcopy=False)[number].state.is_finished()
        if not (recorded and type(study.sampler).__name__ == "GridSampler"):
            raise


def retry_lost(study: "Study") -> list[int]:
    """Mark lost trials as failed, and queue their values again.

    Returns the numbers of running trials whose process is on another host or unknown. These are
    left alone.
    """
    import optuna

    elsewhere = []
    running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    for trial in running:
        runs = _is_running(trial.user_attrs.get("process"))
        if runs is None:
            elsewhere.append(trial.number)
        elif not runs:
            set_attribute = study._storage.set_trial_user_attr
            set_attribute(trial._trial_id, "status", "lost")
            set_attribute(trial._trial_id, "reason", "its process has ended without a word")
            retry(study, trial)
            tell(study, trial.number, optuna.trial.TrialState.FAIL)
    return elsewhere


def retry(study: "Study", trial: "FrozenTrial") -> None:
    """Queue the values of a trial, so that a later trial of the study gets them."""
    import optuna

    study.add_trial(
        optuna.create_trial(
            state=optuna.trial.TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            # A grid's sampler identifies a point by these attributes.
            system_attrs={
                **{k: v for k, v in trial.system_attrs.items() if k in ("grid_id", "search_space")},
                "fixed_params": trial.params,
            },
        )
    )


def num_wanted(asked: StudyRequest, space: Mapping[str, SweptKey]) -> int:
    """Return the number of trials of the whole study: `n_trials`, or the number of points of the
    grid if that is smaller."""
    wanted = asked.settings.n_trials
    if asked.sampler.name != GRID:
        return wanted
    return min(wanted, prod(len(values) for values in _grid(asked, space).values()))


def num_missing(study: "Study", wanted: int) -> int:
    """Return the number of trials that the study lacks to have `wanted` trials.

    Lost, interrupted and waiting trials do not count.
    """
    return wanted - sum(
        trial.state.name != "WAITING" and trial.user_attrs.get("status") not in LOST
        for trial in study.get_trials(deepcopy=False)
    )


def _grid(asked: StudyRequest, space: Mapping[str, SweptKey]) -> dict[str, Sequence[Any]]:
    """Return all values of every parameter for the grid sampler; an empty mapping for any other."""
    if asked.sampler.name != GRID:
        return {}
    return {key: parameter.values() or () for key, parameter in space.items()}


def _refuse_unlike(
    study: "Study",
    trials: Sequence["FrozenTrial"],
    space: Mapping[str, SweptKey],
    fixed: Sequence[str],
    goals: Goals,
) -> None:
    """Raise ConfigError where a stored study has other overrides, objectives, parameters or kinds
    of values. Record the overrides and objectives of a new study."""
    from optuna.distributions import check_distribution_compatibility

    began = study.user_attrs.get(_ASKED)
    now = {"overrides": list(fixed), "objective": [*goals.names]}
    name, remedy = study.study_name, f"use another {SECTION}.study_name, or what it was begun with"
    faults = []
    if began is None and trials:
        rule = "was begun by another program, whose trials are of something else"
        faults.append(Fault(f"{SECTION}.study_name", name, rule, remedy))
    elif began is None:
        study.set_user_attr(_ASKED, now)
    else:
        directions = tuple(direction.name.lower() for direction in study.directions)
        if began["objective"] != now["objective"] or directions != goals.directions:
            ways = (f"{d} {n}" for d, n in zip(directions, began["objective"], strict=True))
            rule = f"was begun to {' and '.join(ways)}"
            faults.append(Fault(f"{SECTION}.study_name", name, rule, remedy))
        if sorted(began["overrides"]) != sorted(now["overrides"]):
            rule = f"was begun with {' '.join(began['overrides']) or 'no overrides'}"
            faults.append(Fault(f"{SECTION}.study_name", name, rule, remedy))
    last = {key: distribution for t in trials for key, distribution in t.distributions.items()}
    for key, parameter in space.items():
        try:
            if key in last:
                check_distribution_compatibility(last[key], parameter.distribution())
        except ValueError:
            rule = f"had other kinds of values in the study {name}"
            faults.append(Fault(key, "", rule, remedy))
    if last and set(last) != set(space) and not faults:
        rule = f"was begun with values of {', '.join(sorted(last))}"
        faults.append(Fault(f"{SECTION}.study_name", name, rule, remedy))
    if faults:
        raise ConfigError(faults)


def _process(pid: int) -> str:
    """Return text that identifies a process of this host: the host, the process id, the start time
    and the id of the boot. A later process with the same id has another start time."""
    began = ""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        began = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text(encoding="utf-8").strip() if boot.exists() else ""
    return f"{socket.gethostname()} {pid} {began} {booted}"


def _is_running(process: str | None) -> bool | None:
    """Return whether a process runs; None where it is on another host or unknown.

    process: the text of `_process`; None where it was not recorded.
    """
    match = re.fullmatch(r"(\S+) (\d+) .*", process or "")
    if match is None or match[1] != socket.gethostname():
        return None
    try:
        os.kill(int(match[2]), 0)
        return _process(int(match[2])) == process
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:  # another user's
        return True
