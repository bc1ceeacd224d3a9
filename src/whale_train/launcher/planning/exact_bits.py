"""Refuse options under which the bits of a run are not known, or not the same on other devices."""

from whale_train.config import Request
from whale_train.errors import Fault
from whale_train.strategies.plan.plan import Plan


def refuse_hash_of_parts(request: Request, plan: Plan, faults: list[Fault]) -> None:
    """Add a fault for `train.parameters_sha256` where rank 0 does not hold all parameters whole,
    with the values that the optimizer updates."""
    if not request.train.parameters_sha256 or plan.world_size == 1:
        return
    rule = ""
    if any(x.shards or all(0 not in ranks for ranks in x.replicas) for x in plan.task_graphs):
        rule = "needs a rank with all parameters, and this strategy divides them among ranks"
    elif any(x.zero for x in plan.task_graphs):
        rule = "needs a rank with all updated values, and ZeRO divides them among ranks"
    if rule:
        remedy = "use false, or strategy=dp, elastic_dp or single"
        faults.append(Fault("train.parameters_sha256", "true", rule, remedy))


def refuse_unlike_bits(request: Request, plan: Plan, faults: list[Fault]) -> None:
    """Add a fault for `train.compile` under logical workers: the compiler chooses kernels by the
    threads and the processor that it sees."""
    if plan.logical_workers is not None and request.train.compile:
        rule = "chooses kernels for each process, and logical workers compute the same bits in all"
        faults.append(Fault("train.compile", "true", rule, "use false, or strategy=dp"))
