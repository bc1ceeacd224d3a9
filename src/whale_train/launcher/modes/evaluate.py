"""Run `mode=evaluate` and `mode=predict`, under any plan: compute the metrics of a checkpoint's
model on named sets of samples, or the model's prediction for every sample.

The model, the data, the metrics and the precision come from the checkpoint's run, unless the
command line sets them. The strategy and the hardware come from the command line.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whale_train.config import Mode, Request
from whale_train.data.evaluation_sets import open_data
from whale_train.data.open import DataOptions
from whale_train.data.sources.arrays import ArraysOptions
from whale_train.data.sources.custom import CustomOptions
from whale_train.data.sources.hf_dataset import HfDatasetOptions
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.going_on import refuse_other_model
from whale_train.launcher.job_end import JobEnd, finish, never_met, summary_of
from whale_train.launcher.modes.saved_weights import SavedWeights, weights_at
from whale_train.launcher.ranks.external_ranks import JobProcess, RendezvousTimeout
from whale_train.launcher.ranks.rank_env import LaunchPlace
from whale_train.launcher.ranks.run_dir import write_json
from whale_train.launcher.ranks.run_files import make_run_dir, start_ranks
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.resume import say_passed_over
from whale_train.launcher.ui.show_resolved import show_resolved
from whale_train.launcher.ui.terminal import Portable
from whale_train.validation import validated

RESULTS = "evaluation.json"  # in the run directory: the metrics of each set, by name
WHOLE = "all"  # the name of a set of all samples
_MAY_LACK_LABELS = (ArraysOptions, HfDatasetOptions, CustomOptions)  # all other kinds have labels
_ALL = 2**62  # a number of samples above that of any data
# The fields behind each key that every model has. An override of such a key keeps the saved model.
_OF_ANY_MODEL = {
    "loss": ("loss", "own_loss"),
    **{key: (key,) for key in ("class_dim", "loss_over", "sync_batchnorm")},
}
_SECTIONS = ("model", "data", "optimizer", "metrics", "seed")


def weights_of(request: Request) -> SavedWeights:
    """Return the weights at the request's `checkpoint.path`. Raises ConfigError where no whole
    weights are found."""
    assert request.checkpoint.path is not None
    return weights_at(request.checkpoint.path)


def with_saved(request: Request, weights: SavedWeights, overrides: Sequence[str]) -> Request:
    """Return the request of an evaluation: the request of the run that saved `weights`, changed by
    the overrides of the command line.

    request: the request that the command line makes.
    weights: the weights to evaluate.
    overrides: the overrides of the command line. An override of a whole section, as `data=arrays`,
        takes the section from `request`. An override of a key in a section takes that key alone if
        the key is of the data or one that every model has, and else the whole section.

    Raises ConfigError for trackers or callbacks, and where there is nothing to evaluate.
    """
    saved = weights.request
    asked = {"trackers": request.trackers, "callbacks": request.callbacks.listed}
    rule = f"has no effect on mode={request.mode}, which takes no steps"
    faults = [Fault(key, "", rule, "leave it out") for key, value in asked.items() if value]
    if faults:
        raise ConfigError(faults)
    keys = [text.lstrip("+~").partition("=")[0] for text in overrides if "=" in text]
    own: dict[str, Any] = {}
    for section in _SECTIONS:
        if section in keys:
            continue
        own[section] = getattr(saved, section)
        inside = [key.partition(".")[2] for key in keys if key.startswith(f"{section}.")]
        if inside and section == "data":
            own[section] = _changed(saved.data, request.data, inside)
        elif section == "model" and {key.partition(".")[0] for key in inside} <= {*_OF_ANY_MODEL}:
            fields = {field for key in inside for field in _OF_ANY_MODEL[key.partition(".")[0]]}
            values = {field: getattr(request.model, field) for field in fields}
            own[section] = saved.model.model_copy(update=values)
        elif inside:
            own[section] = getattr(request, section)
    train: dict[str, Any] = {
        "evaluate_every": 1,
        **{"stop_after": None, "resume": None, "trace": False, "profile": None},
    }
    if "train.evaluation_samples" not in keys:
        train["evaluation_samples"] = _ALL
    if "train.precision" not in keys:
        train["precision"] = saved.train.precision
    own["train"] = request.train.model_copy(update=train)
    own["names"] = {**request.names, **{x: saved.names.get(x, "") for x in own if x in _SECTIONS}}
    checkpoint_options = {"every": None, "best": None, "final": False}
    own["checkpoint"] = request.checkpoint.model_copy(update=checkpoint_options)
    own["data"] = _with_sets(own.get("data", request.data), request.mode, keys)
    if request.mode == "predict":
        own["blank_labels"] = _blank_labels(own["data"], weights)
    return request.model_copy(update=own)


def _with_sets(data: DataOptions, mode: Mode, keys: Collection[str]) -> DataOptions:
    """Return `data` with the sets to evaluate.

    The sets are the ones that the command line or the checkpoint's run names. One set of all
    samples is used where the command line asks for other data without naming sets, and where
    `mode=predict` has no set. Raises ConfigError where there is nothing to evaluate.

    keys: the keys that the command line overrides.
    """
    asked = {key for key in keys if key.partition(".")[0] == "data"}
    named = {key for key in asked if key.startswith("data.evaluation")}
    is_other = bool(asked - named) and not named
    has_sets = bool(data.evaluation_fraction or getattr(data, "evaluation", None))
    can_name = "evaluation" in type(data).model_fields
    if can_name and (is_other or (mode == "predict" and not has_sets)):
        return data.model_copy(update={"evaluation": {WHOLE: {}}, "evaluation_fraction": 0.0})
    if not has_sets:
        rule = "names no samples to evaluate, and the checkpoint's run held none back"
        remedy = "write 'data.evaluation={test: {path: FILE}}' or the like"
        raise ConfigError([Fault("data.evaluation", "", rule, remedy)])
    return data


def _blank_labels(data: DataOptions, weights: SavedWeights) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and the shape of one sample's label in the training data of `weights`, for
    `data` without labels.

    Returns None where `data` has labels, or the training data had none. Raises ConfigError where
    `data` cannot be read, or lacks labels and the training data cannot be read.
    """
    if not isinstance(data, _MAY_LACK_LABELS):
        return None
    if any(field.name == "labels" for field in open_data(data).training.fields):
        return None
    if weights.data is not None:
        return weights.data.fields.get("labels")
    trained_on = open_data(weights.request.data).training.fields
    labels = next((field for field in trained_on if field.name == "labels"), None)
    return None if labels is None else (labels.dtype, labels.shape)


def _changed(saved: DataOptions, asked: DataOptions, keys: Sequence[str]) -> DataOptions:
    """Return the data options `saved`, with the values of `keys` taken from `asked`. Raises
    ConfigError where the result is not valid."""
    given = asked.model_dump(mode="json", by_alias=True)
    content = saved.model_dump(mode="json", by_alias=True)
    for key in {key.partition(".")[0] for key in keys}:
        content[key] = given.get(key)
    faults: list[Fault] = []
    changed: DataOptions | None = validated(type(saved), content, "data", faults)
    if faults or changed is None:
        raise ConfigError(faults)
    return changed


def evaluate_weights(
    request: Request,
    weights: SavedWeights,
    run_dir: Path,
    console: Console,
    place: LaunchPlace | None,
    signals: StopSignals,
) -> JobEnd:
    """Evaluate weights by the request that `with_saved` has made, and show the results.

    Raises ConfigError where the weights do not fit the request's model.
    """
    say_passed_over(weights.broken, console)
    run_dir = make_run_dir(request, run_dir)
    process = JobProcess(run_dir, place)
    try:
        with process.planned(request, signals.poll, console) as resolved:
            models = (weights.request.model, request.model)
            refuse_other_model(weights.folder, *models, is_final=weights.is_final)
        if weights.is_final:
            start_ranks(run_dir, resolved, request, weights=weights.folder)
        else:
            start_ranks(run_dir, resolved, request, weights.path)
        show_resolved(resolved, request, console)
        doing = "predicting with" if request.mode == "predict" else "evaluating"
        said = f"{doing} step {weights.step}, from {weights.path}"
        console.print(Text(said), soft_wrap=True)
        outcome = process.wait(signals.poll)
    except RendezvousTimeout as error:
        return never_met(error.outcome, run_dir)
    finally:
        process.stop()
    if outcome.status != "done":
        return finish(outcome, resolved, run_dir, console)
    summary = summary_of(run_dir)
    if results := summary["evaluation"]:
        write_json(run_dir / RESULTS, {"step": weights.step, "sets": results})
        console.print(Portable(results_table(results)))
        console.print(f"the results: {run_dir / RESULTS}", soft_wrap=True, markup=False)
    for name, predictions in summary.get("predictions", {}).items():
        said = f"{predictions['samples']:,} predictions of {name}: {predictions['file']}"
        console.print(said, soft_wrap=True, markup=False)
    sys.stdout.flush()
    return JobEnd("done", run_dir, summary)


def results_table(results: Mapping[str, Mapping[str, float | None]]) -> Table:
    """Return a table of metrics with one row for each set and one column for each metric.

    results: the value of each metric by name, by the name of the set.
    """
    table = Table(box=None, pad_edge=False)
    names = list(dict.fromkeys(name for of_set in results.values() for name in of_set))
    table.add_column("set")
    for name in names:
        table.add_column(name, justify="right")
    for name, of_set in results.items():
        cells = [of_set.get(x) for x in names]
        table.add_row(name, *("" if x is None else f"{x:.6g}" for x in cells))
    return table
