"""Refuse plans that cannot store weights in 4 bits (`model.quantize`), and say what is stored."""

from whale_train.config import Request
from whale_train.errors import Fault
from whale_train.models.options import QUANTIZE as KEY
from whale_train.quantities import in_bytes
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Decision, Plan


def refuse_quantised(
    request: Request, plan: Plan, profile: ModelProfile, faults: list[Fault]
) -> None:
    """Add a fault where `model.quantize` finds no weights, where ranks run the model's graph or
    partition parameters, and where compiled code would hide the products."""
    value = request.model.quantize
    if value is None:
        return
    rule, remedy = "", "use strategy=dp, or null"
    if not profile.quantised:
        rule = f"stores the frozen weights of linear layers, and {profile.name} has none"
        remedy = "use null"
    elif plan.rewrite is not None:
        rule = "replaces layers of the model as it is, and this strategy runs the model's graph"
    elif any(task_graph.zero for task_graph in plan.task_graphs):
        rule = "stores frozen weights whole on every rank, and ZeRO partitions parameters"
    elif request.train.compile:
        rule, remedy = "replaces layers that train.compile=true compiles", "use train.compile=false"
    elif request.mode == "rehearse":
        rule, remedy = "turns values into codes, and mode=rehearse has no values", "use null"
    if rule:
        faults.append(Fault(KEY, value, rule, remedy))


def explain_quantised(profile: ModelProfile) -> tuple[Decision, ...]:
    """Return a note for the plan on the weights stored in 4 bits; nothing where there are none."""
    weights = profile.quantised
    if not weights:
        return ()
    stored = sum(x.elements * x.bytes_per_element for x in weights)
    in_fp32 = 4.0 * sum(x.elements for x in weights)
    reason = f"{in_bytes(stored)} instead of {in_bytes(in_fp32)} in fp32; the output head, "
    reason += "embeddings and what is no linear layer stay as they are"
    return (Decision(KEY, f"nf4: {len(weights)} frozen weights of linear layers", "", reason),)
