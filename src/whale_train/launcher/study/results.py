"""Present the results of a study: the best trials, the rows of the table, and the results file."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from whale_train.launcher.ranks.run_dir import write_text
from whale_train.launcher.ui.study_table import TrialRow

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

_STATUSES = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
RESULTS = "optimization_results.yaml"


def best_of(study: "Study") -> list["FrozenTrial"]:
    """Return the best trial, or the trials on the Pareto front of several objectives; an empty list
    where no trial has a result."""
    if not any(t.state.name == "COMPLETE" for t in study.get_trials(deepcopy=False)):
        return []
    return [study.best_trial] if len(study.directions) == 1 else study.best_trials


def rows_of(trials: Sequence["FrozenTrial"], best: Sequence["FrozenTrial"]) -> list[TrialRow]:
    """Return the rows of the table, without waiting trials."""
    bests = {trial.number for trial in best}
    rows = []
    for trial in trials:
        status = trial.user_attrs.get("status") or _STATUSES.get(trial.state.name)
        if status is None:
            continue
        steps = trial.last_step if status == "pruned" else None
        folder = trial.user_attrs.get("run_dir")
        rows.append(
            TrialRow(
                number=trial.number,
                values=trial.params,
                status=status if steps is None else f"{status} at step {steps}",
                results=tuple(trial.values or ()) if status == "done" else (),
                reason=str(trial.user_attrs.get("reason", "")),
                run_dir=None if folder is None else Path(folder),
                is_best=trial.number in bests,
            )
        )
    return rows


def write_results(study: "Study", best: Sequence["FrozenTrial"], folder: Path) -> Path:
    """Write the best trials into a file in `folder`, in the format of hydra-optuna-sweeper, and
    return the file's path."""
    results: dict[str, Any] = {"name": "optuna"}
    if len(study.directions) == 1:
        results |= {"best_params": dict(best[0].params), "best_value": best[0].value}
    else:
        solutions = [{"params": dict(t.params), "values": list(t.values)} for t in best]
        results["solutions"] = solutions
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RESULTS, yaml.safe_dump(results, sort_keys=False))
    return folder / RESULTS


def pasted(overrides: Sequence[str], number: int) -> str:
    """Return one line with the command that repeats a trial outside the study."""
    return f"trial {number} by itself: {shlex.join(['whale-train', *overrides])}"
