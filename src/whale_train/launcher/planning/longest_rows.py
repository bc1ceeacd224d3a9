"""Refuse plans that cannot run batches of different lengths."""

from whale_train.config import Request
from whale_train.data.sources.custom import CustomOptions
from whale_train.data.sources.webdataset import WebdatasetOptions
from whale_train.errors import Fault
from whale_train.strategies.plan.plan import Plan


def refuse_longest(request: Request, plan: Plan, faults: list[Fault]) -> None:
    """Add a fault for a field that is cut to the longest row of each batch (`data.pad`), where the
    plan runs the model's graph or counts targets with it. A graph has the lengths that it was
    exported with."""
    data = request.data
    pads = data.pad if isinstance(data, CustomOptions | WebdatasetOptions) else None
    cut = [name for name, pad in (pads or {}).items() if pad.longest]
    if not cut:
        return
    key = f"data.pad.{cut[0]}.longest"
    if plan.rewrite is not None:
        rule = "gives batches of several lengths, and this strategy runs a graph of one length"
        remedy = "use false, or a strategy of one replicate, with or without ZeRO"
        faults.append(Fault(key, "true", rule, remedy))
    elif request.train.accumulate > 1 or plan.logical_workers is not None:
        why, remedy = f"train.accumulate={request.train.accumulate}", "train.accumulate=1"
        if plan.logical_workers is not None:
            why, remedy = f"strategy.logical_workers={plan.logical_workers.count}", "strategy=dp"
        rule = "gives batches of several lengths, and the targets of a step's micro-batches are "
        rule += f"counted by a graph of one length ({why})"
        faults.append(Fault(key, "true", rule, f"use false, or {remedy}"))
