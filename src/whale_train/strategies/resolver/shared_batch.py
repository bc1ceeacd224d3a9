"""The loss of a batch from the losses of its parts, and whether the batch may be divided.

Replicas and micro-batches compute the losses of their own samples. The loss of the batch is the
mean of these, weighted by samples, or their sum. `independence/` derives which from the graph.
Where it cannot, or without a graph, the launcher compares numbers before the first step
(`models/batch_parts/compare_parts.py`).
"""

from dataclasses import replace

from whale_train.errors import Fault
from whale_train.strategies.graph.operation_graph import ModelProfile, Operation, OperationGraph
from whale_train.strategies.independence.judge import LossReduction, classify_loss
from whale_train.strategies.independence.learned_targets import learned_means
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.stages.analysis import ModelAnalysis

VOUCHED = "model.samples_are_independent"
EXCHANGED = "copies exchange its sums over the batch"
DRAWS = "draws random numbers of its own"
COMPARED = "compared before the first step"  # of models without a known loss


def refuse_shared_batch(
    findings: ModelAnalysis,
    training: Training,
    micro_batches: int,
    faults: list[Fault],
    workers: int | None = None,
) -> None:
    """Add the faults of a model whose batch must not be divided, for a plan that divides it.

    The faults are samples that meet, a buffer that each of several micro-batches would write, and a
    `model.loss_over` that contradicts the graph. None is added if the request vouches that samples
    are independent. `micro_batches` is the number of micro-batches of one replica, and `workers`
    that of logical workers, where they are the parts (None: they are not).
    """
    profile, judgement = findings.profile, findings.samples
    if training.samples_are_independent:
        return
    if judgement.kind == "meets" and not (judgement.sums and micro_batches == 1):
        where = f"{_said(judgement.operation)} " if judgement.operation is not None else ""
        rule = f"lets the samples of a batch meet: {where}{judgement.because}, so that copies and "
        rule += "micro-batches of their own samples would train something else"
        remedy = "use strategy=single, strategy=split, or a pipeline of one micro-batch"
        if profile.graph is None:  # split and pipeline need one
            remedy = "use strategy=single"
        if judgement.sums:
            rule = (
                f"lets the samples of a batch meet: {where}{judgement.because}, and micro-batches "
            )
            rule += "of one copy are not there at the same time"
            remedy = "use one micro-batch: copies of the model exchange what is made of all samples"
            if workers is not None:
                rule = rule.replace("micro-batches of one copy", "logical workers of one device")
                remedy = "use strategy=dp, whose copies exchange what is made of all samples"
        remedy = profile.unequal_remedy or remedy
        faults.append(Fault("model", profile.name, rule, remedy))
    elif micro_batches > 1 and judgement.counts is not None:
        rule = (
            f"changes in every call: {_said(judgement.counts)} writes into a buffer, once in each "
        )
        parts = "micro-batches" if workers is None else "logical workers"
        rule += f"of {micro_batches} {parts} instead of once a step"
        remedy = "use one micro-batch, or strategy=dp without train.accumulate"
        if workers is not None:
            remedy = "use strategy=dp"
        faults.append(Fault("model", profile.name, rule, remedy))
    asked = training.loss_over
    if asked is not None and judgement.kind in ("mean", "sum") and asked != judgement.kind:
        rule = (
            f"is not what the loss of {profile.name} is: "
            f"by its graph, it is a {judgement.kind} over "
        )
        rule += "the samples"
        faults.append(Fault("model.loss_over", asked, rule, f"use {judgement.kind}, or null"))


def refuse_written_parameters(
    profile: ModelProfile, zero: int, faults: list[Fault], parameter: str = ""
) -> None:
    """Add a fault for a parameter that the forward changes, if ZeRO holds a copy of it and would
    undo the change.

    `parameter` is the path of a parameter that a run has shown to change. With '', the parameters
    that the model's graph writes count.
    """
    where = parameter
    for operation in profile.graph or ():
        for name in operation.writes:
            assert profile.graph is not None
            of = profile.graph[name]
            if of.target == "parameter" and not operation.target.startswith("aten.detach_"):
                where = where or f"{of.path} ({_said(operation)})"
    if zero and where:
        rule = f"changes the parameter {where} in its forward, and ZeRO {zero} would undo it: "
        rule += "it keeps values of its own"
        faults.append(Fault("model", profile.name, rule, "use strategy=dp or strategy=single"))


def refuse_unlike_copies(
    profile: ModelProfile, zero: int, norm: str, unlike: str, faults: list[Fault]
) -> None:
    """Add a fault if the samples of some parts of a batch reached a module and others did not.

    norm: path of a batch norm that some parts did not reach: replicas would wait for each other's
        statistics; '' for none.
    unlike: path of a module or parameter that some parts did not reach: ZeRO 2 and 3 depend on the
        order in which all of them run; '' for none.
    """
    some = "for the samples of some copies alone"
    if norm:
        rule = f"runs the batch norm {norm} {some}, and its statistics are of the whole batch"
        remedy = "use strategy=single, or model.sync_batchnorm=false"
        faults.append(Fault("model", profile.name, rule, remedy))
    elif unlike and zero > 1:
        rule = f"runs {unlike} {some}, and ZeRO {zero} goes by the order in which all of them run"
        faults.append(Fault("model", profile.name, rule, "use strategy=dp or strategy=zero1"))


def with_samples(plan: Plan, findings: ModelAnalysis, training: Training) -> Plan:
    """Return `plan` with the reduction of its loss over the samples (mean or sum). Add the
    decisions on how samples depend on each other, if the plan divides the batch."""
    judgement = findings.samples
    loss_over = (
        judgement.kind if judgement.kind in ("mean", "sum") else training.loss_over or "mean"
    )
    loss_over = "mean" if judgement.sums else loss_over
    if findings.profile.own_draws:
        reason = (
            f"its forward draws from {findings.profile.own_draws}: every rank draws alike, and "
        )
        reason += "a run that goes on from a checkpoint draws from the beginning"
        plan = replace(plan, decisions=(*plan.decisions, Decision("model", DRAWS, "", reason)))
    if not plan.shares_batch:
        return replace(plan, loss_over=loss_over)
    decisions = plan.decisions
    if judgement.sums and not training.samples_are_independent:
        assert judgement.operation is not None
        reason = f"samples meet in sums over the batch alone: {_said(judgement.operation)} "
        decisions = (*decisions, Decision("model", EXCHANGED, "", f"{reason}{judgement.because}"))
        return replace(plan, loss_over=loss_over, decisions=decisions)
    if judgement.kind == "sum":
        reason = "the model's graph adds its samples' losses up: parts are added, not averaged"
        decisions = (*decisions, Decision("model.loss_over", "sum", "mean", reason))
    if training.samples_are_independent and judgement.kind in ("meets", "unknown"):
        reason = "the request vouches that samples do not meet, which nobody has checked"
        decisions = (*decisions, Decision(VOUCHED, "true", "", f"{reason}{_why(judgement)}"))
    elif judgement.kind == "unknown":
        reason = "nobody knows whether its batch may be trained in parts"
        decisions = (*decisions, Decision("model", COMPARED, "", f"{reason}{_why(judgement)}"))
    return replace(plan, loss_over=loss_over, decisions=decisions)


def _why(judgement: LossReduction) -> str:
    """Return the reason of a judgement, as the end of a message: " (...)", or '' where there is
    none."""
    if judgement.operation is not None:
        because = judgement.because or "has no rule that says what it does with samples"
        return f" ({_said(judgement.operation)} {because})"
    return f" (there is no graph to see it in: {judgement.because})" if judgement.because else ""


def _said(operation: Operation) -> str:
    """Return an operation as messages name it: its kind, its module and its name."""
    kind = operation.target.removeprefix("aten.").partition(".")[0]
    kind = kind.removeprefix("<built-in function ").rstrip(">")
    return f"{kind} in {operation.module or 'its own forward'} ({operation.name})"


def refuse_learned_targets(
    profile: ModelProfile, key: str, value: str, remedy: str, faults: list[Fault]
) -> None:
    """Add faults for means over classes whose targets are computed from parameters, in a plan that
    runs a step in several pieces. Targets that are probabilities are allowed. `key` and `value` are
    the setting that divides the step, `remedy` the way out."""
    for name in learned_means(profile):
        rule = f"counts targets before it runs, and those of {name} are computed from parameters"
        faults.append(Fault(key, value, rule, remedy))


def where_samples_meet(graph: OperationGraph) -> Operation | None:
    """Return the operation in which the samples of a batch meet on the way to the loss; None where
    no such operation is proven."""
    judgement = classify_loss(graph)
    return judgement.operation if judgement.kind == "meets" else None
