"""Read `metrics` of the config: metrics of evaluations, each tried before anything starts.

A metric is an object with `update(predicted, target)`, `compute()` and `reset()`, as torchmetrics'
classes have them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from whale_train.errors import ConfigError, Fault
from whale_train.own_code import PATH, TargetKind, called, made_object, said
from whale_train.validation import as_yaml, validated

KEY = "metrics"
_METHODS = ("update", "compute", "reset")
METRIC = TargetKind(
    "torchmetrics.Metric",
    lambda made: all(callable(getattr(made, name, None)) for name in _METHODS),
)


class MetricOptions(BaseModel):
    """Options of a metric.

    target: path of the metric's class, or of a function that returns a metric.
    arguments: keyword arguments of the class or function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Annotated[str, Field(pattern=PATH)]
    arguments: dict[str, Any] = Field(default_factory=dict)


def read_metrics(value: object, faults: list[Fault]) -> dict[str, MetricOptions]:
    """Return the metrics of the mapping `value` by name, after adding all faults of `value` to
    `faults`."""
    metrics: dict[str, MetricOptions] = {}
    if value is None:
        return metrics
    remedy = "use 'metrics={f1: {_target_: torchmetrics.classification.MulticlassF1Score, "
    remedy += "num_classes: 10}}'"
    if not isinstance(value, Mapping):
        faults.append(Fault(KEY, as_yaml(value), "is not a mapping", remedy))
        return metrics
    for name, entry in value.items():
        key = f"{KEY}.{name}"
        if not isinstance(entry, Mapping) or not isinstance(entry.get("_target_"), str):
            faults.append(Fault(key, as_yaml(entry), "names no class", remedy))
        elif name in ("loss", "accuracy") or not str(name).isidentifier():
            rule = "is a result of every evaluation" if str(name).isidentifier() else "is no name"
            faults.append(Fault(key, "", rule, "use another name, such as f1"))
        else:
            arguments = {str(x): item for x, item in entry.items() if x != "_target_"}
            given = {"target": entry["_target_"], "arguments": arguments}
            options = validated(MetricOptions, given, key, wrong := list[Fault]())
            faults += [replace(x, key=x.key.replace(".target", "._target_")) for x in wrong]
            if not wrong:
                metrics[str(name)] = options
    return metrics


def make_metric(name: str, options: MetricOptions) -> Any:
    """Return the metric of `options`, named `name` in the config. Raises ConfigError where it
    cannot be imported or made, or is not a metric."""
    arguments = called(f"{KEY}.{name}", options.arguments)
    return made_object(f"{KEY}.{name}", options.target, arguments, METRIC)


def numbers_of(name: str, computed: Any) -> dict[str, float]:
    """Return the results of a metric as numbers by name.

    computed: a number, which is named `name`; a tensor, whose elements are named `name_0`, `name_1`
        and so on; or a mapping of such (a collection of metrics), named `name_KEY`.

    Raises TypeError or ValueError for anything else.
    """
    import torch

    if isinstance(computed, Mapping):
        parts = (numbers_of(f"{name}_{key}", value) for key, value in computed.items())
        return {key: number for part in parts for key, number in part.items()}
    numbers = torch.as_tensor(computed, dtype=torch.float64)
    if not numbers.dim():
        return {name: float(numbers)}
    return {f"{name}_{place}": x for place, x in enumerate(numbers.flatten().tolist())}


def try_metrics(metrics: Mapping[str, MetricOptions]) -> tuple[list[str], list[Fault]]:
    """Return the names of all results of `metrics`, and a fault for each metric that does not take
    predicted classes. Each metric is made and updated with one prediction."""
    if not metrics:
        return [], []
    import torch

    names: list[str] = []
    faults: list[Fault] = []
    for name, options in metrics.items():
        try:
            metric = make_metric(name, options)
        except ConfigError as error:
            faults += error.faults
            continue
        try:
            metric.update(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
            names += numbers_of(name, metric.compute())
        except Exception as error:
            rule = f"is not computed from predicted classes: it raised {said(error)}"
            remedy = "use one that takes classes for predictions, as accuracy, F1 or Cohen's kappa"
            faults.append(Fault(f"{KEY}.{name}._target_", options.target, rule, remedy))
    return names, faults
