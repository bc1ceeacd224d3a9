"""Plans of a model whose exported graph holds for some batch sizes only.

A plan that runs the graph must keep its parts of the batch within these sizes. Replicas of the
original module may leave them, but the graph then says nothing about their parts.
"""

from collections.abc import Iterator
from dataclasses import replace

from whale_train.errors import Fault, PlanError
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.stages.analysis import ModelAnalysis


def outside(plan: Plan, profile: ModelProfile) -> tuple[int, ...]:
    """Return the sizes of the batch and its parts under `plan` that lie outside the graph's range,
    ascending. The batch counts because one process would take all of it at once."""
    smallest, largest = profile.batch_sizes
    sizes = sorted({*_sizes(plan), plan.global_batch})
    return tuple(n for n in sizes if n < smallest or (largest and n > largest))


def within_sizes(plan: Plan, profile: ModelProfile) -> Plan:
    """Return `plan` with a decision that says for which batch sizes the model's graph holds. The
    plan is unchanged where the graph holds for all sizes, or does not exist. Raises PlanError for a
    plan that runs the graph on parts of other sizes."""
    smallest, largest = profile.batch_sizes
    if profile.graph is None or (smallest, largest) == (1, 0):
        return plan
    span = f"{smallest} to {largest} samples" if largest else f"{smallest} samples or more"
    runs_graph = plan.rewrite is not None or any(rank.micro_batches > 1 for rank in plan.ranks)
    wrong = outside(plan, profile)
    if wrong and runs_graph:
        rule = f"asks for the size of its batch: its graph is that of {span}, and this plan takes "
        parts = " and ".join(map(str, sorted(set(_sizes(plan)))))
        rule += f"a step's {plan.global_batch} samples in parts of {parts}"
        remedy = "use another train.global_batch, or other micro-batches"
        if plan.global_batch in wrong:
            remedy = f"use a train.global_batch of {span}"
        raise PlanError([Fault("model", profile.name, rule, remedy)])
    parts = " and ".join(map(str, sorted(set(_sizes(plan)))))
    reason = f"its forward asks for the size of its batch; this plan takes parts of {parts}"
    if wrong:
        reason += f" of {plan.global_batch} samples, of which the graph says nothing"
    decision = Decision("model", f"a graph of {span}", "", reason)
    return replace(plan, decisions=(*plan.decisions, decision))


def known_by_graph(findings: ModelAnalysis, plan: Plan) -> ModelAnalysis:
    """Return `findings`, without the graph if `plan` takes parts of sizes outside the graph's
    range."""
    profile = findings.profile
    if profile.graph is None or not outside(plan, profile):
        return findings
    why = "its graph is of batches of other sizes"
    return ModelAnalysis(replace(profile, graph=None, export_error=why), findings.precision)


def _sizes(plan: Plan) -> Iterator[int]:
    """Yield the sizes, in samples, of the parts in which replicas take their shares of the
    batch."""
    for task_graph in plan.task_graphs:
        for replica, share in zip(task_graph.replicas, task_graph.shares, strict=True):
            parts = max(plan.ranks[replica[0]].micro_batches, 1)
            yield from {share // parts, -(-share // parts)} - {0}
