"""Choose the objectives of a study, and read their values from the run directory of a trial."""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isnan
from pathlib import Path
from typing import Any

from whale_train.errors import Fault, nearest
from whale_train.launcher.ranks.run_dir import METRICS
from whale_train.launcher.study.samplers import NO_PRUNER
from whale_train.launcher.study.settings import SECTION, Direction, StudyRequest
from whale_train.strategies.plan.plan import Plan, Prediction

# Names of summary.json, and of every line of metrics.jsonl.
_OF_SUMMARY = (
    *("final_loss", "samples_per_s", "step_time_s_median", "trained_s", "peak_memory_bytes"),
    *("predicted_step_time_s", "skipped_steps"),
)
OF_STEPS = (
    *("loss", "grad_norm", "step_time_s", "samples_per_s", "tokens_per_s", "model_flops_s"),
    *("model_flops_utilisation", "peak_memory_bytes"),
)
_HELD_BACK = "evaluation"  # the name of the set of held-back samples
_PEAK = "peak_memory_bytes"
_OF_PLANS = frozenset((_PEAK, "world_size", *(f"predicted.{x.name}" for x in fields(Prediction))))
_FIELDS = frozenset(field.name for field in fields(Plan))
_RATES = ("per_s", "flops_s", "accuracy", "utilisation", "world_size")
_COSTS = ("loss", "_s", "_median", "_bytes", "grad_norm", "skipped_steps")


@dataclass(frozen=True)
class Goals:
    """The objectives of a study.

    names: the names of the objectives.
    directions: `minimize` or `maximize` for each objective.
    series: the metric in `metrics.jsonl` by which trials are pruned; None without a pruner.
    """

    names: tuple[str, ...]
    directions: tuple[Direction, ...]
    series: str | None = None


def goals_of(
    asked: StudyRequest, config: Mapping[str, Any], space: Collection[str], faults: list[Fault]
) -> Goals | None:
    """Return the goals of a study, or None after adding faults.

    asked: the request for the study.
    config: the config that trials share, as plain data.
    space: the keys whose values the study chooses.
    """
    before, settings = len(faults), asked.settings
    plans, data = config.get("mode") == "plan", _section(config, "data")
    has_every = _section(config, "train").get("evaluate_every") is not None
    evaluates = has_every or "train.evaluate_every" in space
    sets = [*_section(data, "evaluation")]
    if not sets or data.get("evaluation_fraction") != 0:
        sets.insert(0, _HELD_BACK)
    measured = ("loss", "accuracy", *_section(config, "metrics"))
    evaluated = [f"{name}_{metric}" for name in sets for metric in measured]
    default = evaluated[0] if evaluates else "final_loss"
    names = settings.objective or ("predicted.step_time_s" if plans else default,)
    key = f"{SECTION}.objective"
    known = _OF_PLANS if plans else {*_OF_SUMMARY, *OF_STEPS, *evaluated}
    for name in names:
        if name not in known and not (plans and _is_of_plan(name)):
            source = "a plan" if plans else "a run"
            faults.append(Fault(key, name, f"is no number of {source}", nearest(name, known)))
        elif name in evaluated and not evaluates:
            rule = "is measured by evaluations, and there is none"
            faults.append(Fault(key, name, rule, "set train.evaluate_every"))
    if len(set(names)) < len(names):
        faults.append(Fault(key, ", ".join(names), "names one twice", "name each once"))
    directions = settings.direction
    if not directions and len(faults) == before:
        directions = tuple(_direction(name, name in evaluated, faults) for name in names)
    elif directions and len(directions) != len(names):
        shown, rule = ", ".join(directions), f"is not one direction for each of {len(names)}"
        faults.append(Fault(f"{SECTION}.direction", shown, rule, f"name {len(names)}, or null"))
    series = _series(asked.pruner.name, names, plans, faults)
    return Goals(names, directions, series) if len(faults) == before else None


def objective_value(name: str, run_dir: Path, plans: bool) -> float | str:
    """Return the value of an objective for a finished trial, or a sentence on why the trial has
    none.

    name: the name of the objective.
    run_dir: the run directory of the trial.
    plans: whether the trial was planned and not trained.

    The largest element of a list is its value, so that peak memory is the heaviest rank's. If both
    `summary.json` and `metrics.jsonl` have the name, the summary's value is returned.
    """
    if plans:
        path = "ranks.memory_bytes.total" if name == _PEAK else name
        number = _at(_json(run_dir / "plan.json"), path.split("."))
    else:
        number = _at(_json(run_dir / "summary.json"), name.split("."))
        number = _last(run_dir / METRICS, name) if number is None else number
    if number is None or isnan(number):
        files = "plan.json" if plans else "summary.json and metrics.jsonl"
        return f"{name} is no number in {files}"
    return number


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of the config; an empty mapping for a value that is no section, which a
    later reader refuses."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _is_of_plan(name: str) -> bool:
    """Return whether a plan may have a number of a name that is not in _OF_PLANS. Any name below a
    field of the plan, except `predicted`, may be a number."""
    section, _, below = name.partition(".")
    return bool(below) and section != "predicted" and section in _FIELDS


def _direction(name: str, is_evaluated: bool, faults: list[Fault]) -> Direction:
    """Return the direction of an objective.

    A result of evaluations is minimised if it is a loss, else maximised, as by `checkpoint.best`.
    Other names are looked up by their endings; an unknown ending adds a fault.
    """
    if name.endswith(_RATES) or (is_evaluated and not name.endswith("_loss")):
        return "maximize"
    if not name.endswith(_COSTS) and ".memory_bytes." not in name:
        rule = "may be better either way"
        remedy = f"add {SECTION}.direction=minimize, or maximize"
        faults.append(Fault(f"{SECTION}.objective", name, rule, remedy))
    return "minimize"


def _series(pruner: str, names: tuple[str, ...], plans: bool, faults: list[Fault]) -> str | None:
    """Return the metric in `metrics.jsonl` by which trials are pruned; None without a pruner. Adds
    a fault for a pruner that cannot work with the objectives.

    pruner: the name of the pruner.
    names: the names of the objectives.
    plans: whether trials are planned and not trained.
    """
    if pruner == NO_PRUNER:
        return None
    key, remedy = f"{SECTION}.pruner", f"use hydra/sweeper/pruner={NO_PRUNER}"
    if plans:
        faults.append(Fault(key, pruner, "ends running jobs, and mode=plan runs none", remedy))
    elif len(names) > 1:
        rule = "compares one value, and hydra.sweeper.objective names several"
        faults.append(Fault(key, pruner, rule, remedy))
    elif names[0] in _OF_SUMMARY and names[0] not in ("final_loss", *OF_STEPS):
        rule = f"compares values of running jobs, and {names[0]} is known at their end"
        faults.append(Fault(key, pruner, rule, remedy))
    return "loss" if names[0] == "final_loss" else names[0]


def _json(path: Path) -> Any:
    """Return the content of a JSON file; None where the file cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _at(value: Any, path: list[str]) -> float | None:
    """Return the number at a path of keys in nested mappings; None without one. A list on the path
    gives the largest number of its elements."""
    if isinstance(value, list):
        numbers = [number for item in value if (number := _at(item, path)) is not None]
        return max(numbers, default=None)
    if not path:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number else None
    return _at(value.get(path[0]), path[1:]) if isinstance(value, dict) else None


def _last(path: Path, name: str) -> float | None:
    """Return the last number of the key `name` in a file of JSON lines; NaN for null, and None
    without one."""
    number = None
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                if name in record:
                    number = float("nan") if record[name] is None else _at(record, [name])
    return number
