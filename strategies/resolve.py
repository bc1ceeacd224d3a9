"""The resolver: strategy x hardware x model -> Plan.

One pure function over frozen data, in the order a reader would decide by hand: which devices,
which TaskGraphs, who takes how much of the head and of the batch, what that costs. It needs none
of the devices. Everything chosen without being asked for ends in the plan's decisions.
"""

from collections.abc import Sequence
from dataclasses import replace

from whale_train.errors import Fault, PlanError, nearest
from whale_train.strategies.cluster import Cluster
from whale_train.strategies.considered import Considered
from whale_train.strategies.findings import Findings
from whale_train.strategies.flat_plan import FlatPlan
from whale_train.strategies.flat_step import FlatStep
from whale_train.strategies.forms import is_nested
from whale_train.strategies.grammar import Node, Pipeline, Replicate, Strategy
from whale_train.strategies.graph import StrategyGraph, bind, shared_degree
from whale_train.strategies.offloading import kept_on_hosts
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import Decision, Plan
from whale_train.strategies.prediction import Simulated, simulated
from whale_train.strategies.samples import (
    refuse_learned_targets,
    refuse_shared_batch,
    with_samples,
)
from whale_train.strategies.sharing import Training, share
from whale_train.strategies.staged import consider_nested
from whale_train.strategies.staging import nested_form

_PRECISIONS = ("fp32", "bf16", "fp16")


def resolve(
    strategy: Strategy,
    cluster: Cluster,
    profile: ModelProfile,
    training: Training,
) -> Plan:
    """The plan for `strategy` on the devices of `cluster`. Raises PlanError with all faults."""
    findings = Findings(profile, training.precision)
    return resolve_and_simulate(strategy, cluster, findings, training)[0]


def resolve_and_simulate(
    strategy: Strategy,
    cluster: Cluster,
    findings: Findings,
    training: Training,
    stand_ins: Cluster | None = None,
) -> tuple[Plan, Simulated]:
    """The plan, and its step simulated: on `stand_ins`, a device for each of those the strategy
    uses, where there are any, for which the plan then has a prediction as well. Raises PlanError
    with all faults."""
    found = consider(strategy, cluster, findings, training, moving=True)
    plan = found.plan()
    if stand_ins is None:
        return plan, found.step
    step = found.on(stand_ins)
    return replace(plan, predicted_here=step.prediction()), step


def consider(
    strategy: Strategy,
    cluster: Cluster,
    findings: Findings,
    training: Training,
    *,
    moving: bool = False,
    cut: tuple[int, ...] = (),
) -> Considered:
    """Resolve `strategy` as far as its step on the devices of `cluster`; `moving` the ends of
    stages to where that is shortest. A pipeline is cut at `cut`, the places (indices into those of
    the order of operations) where stages begin and the last one ends, or else balanced. Raises
    PlanError with all faults."""
    faults: list[Fault] = []
    decisions: list[Decision] = []
    refuse_without_model(strategy, cluster, training, faults)
    if faults:
        raise PlanError(faults)
    cluster = _used_devices(strategy, cluster, faults, decisions)
    if is_nested(strategy):
        found = consider_nested(strategy, cluster, findings, training, moving=moving, cut=cut)
    else:
        found = _consider_flat(strategy, cluster, findings, training)

    def plan() -> Plan:
        inside = with_samples(found.plan(), findings, training)
        return replace(inside, decisions=(*decisions, *inside.decisions))

    return replace(found, plan=plan)


def _consider_flat(
    strategy: Strategy,
    cluster: Cluster,
    findings: Findings,
    training: Training,
) -> Considered:
    faults: list[Fault] = []
    profile = findings.profile
    if len(cluster.devices) > 1 or training.accumulate > 1:
        refuse_shared_batch(findings, training, training.accumulate, faults)
    graph = bind(strategy, profile, len(cluster.devices), cluster.name, faults)
    if graph is not None:
        _refuse_tied_batch_norm(graph, profile, faults)
        if training.accumulate > 1:
            _refuse_accumulation(profile, training, faults)
    if faults or graph is None:
        raise PlanError(faults)
    sharing = share(strategy, graph, cluster, profile, training, faults)
    if sharing is None:
        raise PlanError(faults)
    count, body = len(cluster.devices), graph.task_graphs[0]
    elements = sum(profile.parameter_by_path[path].elements for path in body.parameters)
    keeper = body.node if isinstance(body.node, Replicate) else None
    kept = kept_on_hosts(keeper, lambda: [elements / count] * count, cluster, training)

    def on(devices: Cluster) -> Simulated:
        priced = FlatStep(graph, devices, findings, training, sharing.samples, sharing.classes)
        return simulated(*priced.step(), devices, training.global_batch)

    step = on(cluster)

    def plan() -> Plan:
        decided = FlatPlan(graph, cluster, profile, training, sharing, kept)
        return decided.written(step.prediction())

    return Considered(step, plan, on, len(step.spans.tasks))


def refuse_without_model(
    strategy: Strategy, cluster: Cluster, training: Training, faults: list[Fault]
) -> None:
    """Everything that no model could make right, so that it can be said before one is built."""
    cluster = _used_devices(strategy, cluster, faults, [])
    devices = len(cluster.devices)
    refuse_precision(training.precision, cluster, faults)
    if training.optimizer == "lamb":
        _refuse_partitions(strategy.graph, faults)
    if is_nested(strategy):
        if training.accumulate > 1:
            rule = "cuts the batch of a strategy whose micro-batches are its pipeline's"
            remedy = "use 1, and micro_batches in the strategy's pipeline"
            faults.append(Fault("train.accumulate", str(training.accumulate), rule, remedy))
        nested_form(strategy, cluster, training, faults)
        return
    degree = shared_degree(strategy, devices, cluster.name, faults)
    if degree is not None:
        _refuse_degrees(strategy, degree, devices, faults)
    if training.global_batch < devices:
        rule = f"leaves some of the {devices} devices without a sample"
        remedy = f"use at least {devices}"
        faults.append(Fault("train.global_batch", str(training.global_batch), rule, remedy))
    elif training.global_batch < devices * training.accumulate:
        rule = (
            f"cuts a device's share into micro-batches of none (train.global_batch="
            f"{training.global_batch} on {devices} devices)"
        )
        remedy = f"use at most {training.global_batch // devices}"
        faults.append(Fault("train.accumulate", str(training.accumulate), rule, remedy))


def _used_devices(
    strategy: Strategy, cluster: Cluster, faults: list[Fault], decisions: list[Decision]
) -> Cluster:
    there, asked = len(cluster.devices), strategy.devices
    if asked is None:
        return cluster
    if isinstance(asked, int):
        if asked > there:
            rule, remedy = (
                f"is more than the {there} of hardware={cluster.name}",
                f"{there}, or auto",
            )
            faults.append(Fault("strategy.devices", str(asked), rule, f"use at most {remedy}"))
            return cluster
        used = asked
    else:
        before = len(faults)
        for kind, count in asked.items():
            key, of_kind = f"strategy.devices.{kind}", cluster.kinds.get(kind, 0)
            if not of_kind:
                rule, remedy = (
                    f"is no device of hardware={cluster.name}",
                    nearest(kind, cluster.kinds),
                )
                faults.append(Fault(key, str(count), rule, remedy))
            elif count > of_kind:
                rule = f"is more than the {of_kind} of hardware={cluster.name}"
                faults.append(Fault(key, str(count), rule, f"use at most {of_kind}"))
        if len(faults) > before:
            return cluster
        used = sum(asked.values())
    if used < there:
        idle = f"{there - used} idle"
        reason = f"strategy={strategy.name} uses so many; {idle} of hardware={cluster.name}"
        decisions.append(Decision("strategy.devices", str(used), str(there), reason))
    return cluster.chosen(asked)


def refuse_precision(precision: str, cluster: Cluster, faults: list[Fault]) -> None:
    """Where a device does not compute it."""
    without = sorted({d.name for d in cluster.devices if precision not in d.flops})
    if without:
        rule = f"is not computed by {' and '.join(without)} of hardware={cluster.name}"
        shared = [p for p in _PRECISIONS if all(p in d.flops for d in cluster.devices)]
        remedy = f"use {' or '.join(shared)}" if shared else "use other devices"
        faults.append(Fault("train.precision", precision, rule, remedy))


def _refuse_partitions(nodes: Sequence[Node], faults: list[Fault]) -> None:
    """LAMB's trust ratio is of a whole parameter, and ZeRO's flat partitions end anywhere."""
    for node in nodes:
        if isinstance(node, Replicate) and node.zero:
            rule = "partitions parameters anywhere, and optimizer=lamb needs the norm of each"
            remedy = "use zero: 0, or optimizer=adamw"
            faults.append(Fault(f"{node.path}.zero", str(node.zero), rule, remedy))
        if isinstance(node, Pipeline):
            _refuse_partitions(node.stages if isinstance(node.stages, tuple) else (), faults)
        else:
            _refuse_partitions(node.of, faults)


def _refuse_accumulation(profile: ModelProfile, training: Training, faults: list[Fault]) -> None:
    """A mean over the step's targets needs their number before the first micro-batch."""
    key, value = "train.accumulate", str(training.accumulate)
    norms = profile.batch_norm_modules
    if norms and training.sync_batchnorm:
        rule = (
            f"cuts the batch, over all of which {norms[0]} takes its statistics "
            "(model.sync_batchnorm=true)"
        )
        remedy = "use 1, or model.sync_batchnorm=false for those of a micro-batch"
        faults.append(Fault(key, value, rule, remedy))
    if profile.graph is None:
        rule = (
            f"counts a step's targets by the model's graph, and {profile.name} cannot be exported"
        )
        faults.append(Fault(key, value, f"{rule} ({profile.export_error})", "use 1"))
        return
    refuse_learned_targets(profile, key, value, "use 1", faults)


def _refuse_degrees(strategy: Strategy, degree: int, devices: int, faults: list[Fault]) -> None:
    body, split = strategy.graph[0], len(strategy.graph) > 1
    assert isinstance(body, Replicate)
    if body.zero and devices == 1:
        rule = "partitions over the copies, and 1 device has only one"
        remedy = "use strategy=single, or more devices"
        faults.append(Fault(f"{body.path}.zero", str(body.zero), rule, remedy))
    if degree < devices and (body.zero or split):
        what = "a split" if split else "ZeRO"
        rule = f"of {devices} devices nests {what} in an outer replicate, not executed yet"
        remedy = f"use {devices}, or auto"
        faults.append(Fault(f"{body.path}.degree", str(degree), rule, remedy))


def _refuse_tied_batch_norm(
    graph: StrategyGraph, profile: ModelProfile, faults: list[Fault]
) -> None:
    if graph.cut and profile.batch_norm_modules and len(graph.cut.segments) > 2:
        rule = "is tied to an embedding, in a model with BatchNorm: not executed yet"
        faults.append(Fault(graph.task_graphs[1].node.path, "", rule, "use strategy=dp"))
