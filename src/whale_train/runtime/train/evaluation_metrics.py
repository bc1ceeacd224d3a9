"""Compute the metrics of a request from the answers of an evaluation, on rank 0.

A metric is updated once, with the predicted class and the target of every target of the set, as if
one process had seen all samples. So its value does not depend on the plan.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from whale_train.errors import LaunchError
from whale_train.metrics_options import MetricOptions, make_metric, numbers_of
from whale_train.own_code import importable, said
from whale_train.runtime.base.answers import Int64s


def _keep_alone(metric: Any) -> None:
    """Keep a metric from summing the states of all ranks, as rank 0 has the answers of all ranks.

    torchmetrics sums them wherever a process group exists.
    """
    parts: list[Any] = list(metric.modules()) if isinstance(metric, nn.Module) else []
    for part in parts:
        if hasattr(part, "distributed_available_fn"):
            part.distributed_available_fn = lambda: False


class EvaluationMetrics:
    """The metrics of a request, by name."""

    def __init__(self, options: Mapping[str, MetricOptions]) -> None:
        """Make the metrics. Raises ConfigError for a metric that cannot be made."""
        with importable(os.getcwd()):
            self._metrics = {name: make_metric(name, option) for name, option in options.items()}
        for metric in self._metrics.values():
            _keep_alone(metric)

    def values(self, predicted: Int64s, target: Int64s, counts: Int64s) -> dict[str, float]:
        """Return the values of all metrics by their names, as `numbers_of` names them.

        predicted, target: class numbers of pairs, int64 `[pairs]`.
        counts: how often each pair was seen, int64 `[pairs]`.

        Raises LaunchError where a metric raises, or there are no targets.
        """
        if not counts.sum():
            said_of = ", ".join(self._metrics)
            raise LaunchError(f"metrics {said_of} need targets, and the evaluation has none")
        seen = [torch.from_numpy(x.repeat(counts)) for x in (predicted, target)]
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            try:
                metric.reset()
                metric.update(*seen)
                values |= numbers_of(name, metric.compute())
            except Exception as error:
                raise LaunchError(f"metrics.{name} raised {said(error)}") from error
        return values
