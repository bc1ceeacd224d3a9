"""Check the metrics of a run's evaluations, and that each watched metric is one of their
results."""

import os

from whale_train.config import Request
from whale_train.data.evaluation_sets import HELD_BACK, OpenedData
from whale_train.errors import Fault, nearest
from whale_train.metrics_options import try_metrics
from whale_train.own_code import importable


def refuse_unwatchable(request: Request, data: OpenedData, faults: list[Fault]) -> None:
    """Add the faults of the metrics that a run watches or computes.

    Faults are a metric in `train.stop_after` or `checkpoint.best` that no evaluation computes, a
    metric of the user's own that fails when tried, and metrics in a run without evaluations.
    """
    watched = {
        "train.stop_after.metric": request.train.stop_after,
        "checkpoint.best": request.checkpoint.best,
    }
    if request.metrics and request.train.evaluate_every is None:
        rule = "are of evaluations, and there are none (train.evaluate_every=null)"
        remedy = "use train.evaluate_every=100 or the like, or leave them out"
        faults.append(Fault("metrics", ", ".join(request.metrics), rule, remedy))
    with importable(os.getcwd()):
        computed, of_metrics = try_metrics(request.metrics)
    faults += of_metrics
    if of_metrics:  # the results of a metric that failed are not known
        computed += list(request.metrics)
    sets = [*([HELD_BACK] if data.training.num_evaluation_samples else []), *data.sets]
    results = ("loss", "accuracy", *computed)
    names = [f"{name}_{result}" for name in sets for result in results]
    for key, option in watched.items():
        if option is None:
            continue
        if request.train.evaluate_every is None:
            rule = "is a result of evaluations, and there are none (train.evaluate_every=null)"
            off = key.removesuffix(".metric")
            remedy = f"use train.evaluate_every=100 or the like, or {off}=null"
            faults.append(Fault(key, option.metric, rule, remedy))
        elif option.metric not in names:
            rule = "is no result of the evaluations"
            faults.append(Fault(key, option.metric, rule, nearest(option.metric, names)))
