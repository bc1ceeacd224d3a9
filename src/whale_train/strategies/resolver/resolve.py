"""The resolver: strategy x hardware x model -> Plan.

One pure function over frozen data, in the order a reader would decide by hand: the devices, the
TaskGraphs, the shares of the head and of the batch, and their cost. It needs none of the devices.
Every choice that the request leaves open becomes a decision of the plan.
"""

from collections.abc import Sequence
from dataclasses import replace

from whale_train.errors import Fault, PlanError, listed, nearest
from whale_train.strategies.grammar.form import Form
from whale_train.strategies.grammar.nodes import Node, Pipeline, Replicate, Strategy, every_node
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.optimizer_classes import OptimizerClass
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.batch_sizes import known_by_graph, within_sizes
from whale_train.strategies.resolver.decide import decide
from whale_train.strategies.resolver.evaluated import EvaluatedStrategy
from whale_train.strategies.resolver.open_offload import alternatives, fastest
from whale_train.strategies.resolver.shared_batch import with_samples
from whale_train.strategies.simulate.prediction import Simulated
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.stages.logical_workers import refuse_workers
from whale_train.strategies.stages.placement import form_of

_PRECISIONS = ("fp32", "bf16", "fp16", "fp8")


def resolve(
    strategy: Strategy,
    cluster: Cluster,
    profile: ModelProfile,
    training: Training,
) -> Plan:
    """Return the plan for `strategy` on the devices of `cluster`. Raises PlanError with all
    faults."""
    findings = ModelAnalysis(profile, training.precision)
    return resolve_and_simulate(strategy, cluster, findings, training)[0]


def resolve_and_simulate(
    strategy: Strategy,
    cluster: Cluster,
    findings: ModelAnalysis,
    training: Training,
    stand_ins: Cluster | None = None,
) -> tuple[Plan, Simulated]:
    """Return the plan for `strategy` on the devices of `cluster`, and its simulated step.

    `stand_ins` has a device for each one that the strategy uses. If given, the step is simulated on
    it, and the plan also predicts this step (`predicted_here`). Raises PlanError with all faults.
    """
    considered = consider(strategy, cluster, findings, training, moving=True)
    plan = considered.plan()
    _refuse_split_parameters(plan)
    _refuse_levels(plan, training)
    if stand_ins is None:
        return plan, considered.step
    step = considered.on(stand_ins)
    return replace(plan, predicted_here=step.prediction()), step


def _with_cost_of_even_shares(
    plan: Plan,
    strategy: Strategy,
    cluster: Cluster,
    findings: ModelAnalysis,
    training: Training,
) -> Plan:
    """Return a plan whose decision for uneven shares says how long a step of even shares takes."""
    if not any(decision.key == "strategy.balance" for decision in plan.decisions):
        return plan
    try:
        even = consider(replace(strategy, balance="even"), cluster, findings, training)
    except PlanError:  # even shares do not fit a device's memory
        return plan
    seconds = even.step.prediction().step_time_s
    decisions = (
        replace(decision, rejected_step_s=seconds)
        if decision.key == "strategy.balance"
        else decision
        for decision in plan.decisions
    )
    return replace(plan, decisions=tuple(decisions))


def consider(
    strategy: Strategy,
    cluster: Cluster,
    findings: ModelAnalysis,
    training: Training,
    *,
    moving: bool = False,
    cut: tuple[int, ...] = (),
) -> EvaluatedStrategy:
    """Return `strategy` resolved as far as its step on the devices of `cluster`.

    strategy: the request's strategy.
    cluster: all available devices.
    findings: analysis cache of the model.
    training: batch, precision and optimizer.
    moving: True if the ends of stages are moved to where the simulated step is shortest.
    cut: places where the stages of a pipeline begin and the last one ends (indices into
        `Sequenced.places`); empty for a balanced cut.

    Raises PlanError with all faults.
    """
    if ways := alternatives(strategy):
        return fastest(
            strategy,
            ways,
            lambda decided: consider(decided, cluster, findings, training, moving=moving, cut=cut),
        )
    faults: list[Fault] = []
    decisions: list[Decision] = []
    refuse_without_model(strategy, cluster, training, faults)
    if faults:
        raise PlanError(faults)
    cluster = _used_devices(strategy, cluster, faults, decisions)
    considered = decide(strategy, cluster, findings, training, moving=moving, cut=cut)

    def plan() -> Plan:
        inside = within_sizes(considered.plan(), findings.profile)
        inside = with_samples(inside, known_by_graph(findings, inside), training)
        inside = _with_cost_of_even_shares(inside, strategy, cluster, findings, training)
        return replace(inside, decisions=(*decisions, *inside.decisions))

    return replace(considered, plan=plan)


def refuse_without_model(
    strategy: Strategy, cluster: Cluster, training: Training, faults: list[Fault]
) -> None:
    """Add to `faults` every fault that the strategy has with any model, so that they can be
    reported before a model is built.

    Where the strategy leaves open what it offloads, these are the faults of the first alternative,
    if every alternative has one.
    """
    if ways := alternatives(strategy):
        of_ways: list[list[Fault]] = [[] for _ in ways]
        for way, of_way in zip(ways, of_ways, strict=True):
            refuse_without_model(way.strategy, cluster, training, of_way)
        faults += of_ways[0] if all(of_ways) else ()
        return
    cluster = _used_devices(strategy, cluster, faults, [])
    refuse_precision(training.precision, cluster, faults)
    if training.needs_norms:
        _refuse_partitions(strategy.graph, training.optimizer, faults)
    _refuse_engines(strategy, training, faults)
    refuse_workers(strategy, cluster, training, faults)
    form = form_of(strategy, cluster, training, faults)
    if form is not None and not strategy.prefer_intra_node:
        _refuse_placement(form, cluster, faults)


def _used_devices(
    strategy: Strategy, cluster: Cluster, faults: list[Fault], decisions: list[Decision]
) -> Cluster:
    """Return the part of `cluster` that the strategy uses. Add a fault if the strategy asks for
    more devices than the cluster has, and a decision if it leaves some idle."""
    available, asked = len(cluster.devices), strategy.devices
    if asked is None:
        return cluster
    if isinstance(asked, int):
        if asked > available:
            rule, remedy = (
                f"is more than the {available} of hardware={cluster.name}",
                f"{available}, or auto",
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
    if used < available:
        idle = f"{available - used} idle"
        reason = f"strategy={strategy.name} uses so many; {idle} of hardware={cluster.name}"
        decisions.append(Decision("strategy.devices", str(used), str(available), reason))
    return cluster.chosen(asked)


def refuse_precision(precision: str, cluster: Cluster, faults: list[Fault]) -> None:
    """Add a fault for a precision that some device does not support."""
    without = sorted({d.name for d in cluster.devices if precision not in d.flops})
    if without:
        rule = f"is not computed by {' and '.join(without)} of hardware={cluster.name}"
        shared = [p for p in _PRECISIONS if all(p in d.flops for d in cluster.devices)]
        remedy = f"use {' or '.join(shared)}" if shared else "use other devices"
        faults.append(Fault("train.precision", precision, rule, remedy))


def _refuse_engines(strategy: Strategy, training: Training, faults: list[Fault]) -> None:
    """Add a fault for each optimizer class that needs whole parameters, if ZeRO would partition
    them, and a fault for the first optimizer class, if its state would be offloaded to the host."""
    nodes = [x for x in every_node(strategy.graph) if isinstance(x, Replicate)]
    partitioned = next((x for x in nodes if x.zero), None)
    for optimizer in training.optimizers:
        if partitioned is not None and optimizer.unlike_in_parts:
            rule = f"cannot be partitioned ({partitioned.path}.zero={partitioned.zero}): "
            remedy = "use zero: 0, as strategy=dp, or another optimizer"
            rule += optimizer.unlike_in_parts
            faults.append(Fault(optimizer.key, optimizer.target, rule, remedy))
    offloaded = next((x for x in nodes if x.offload_optimizer != "none"), None)
    if offloaded is not None and training.optimizers:
        optimizer = training.optimizers[0]
        rule = f"cannot be kept on the host ({offloaded.path}.offload.optimizer="
        rule += f"{offloaded.offload_optimizer}), where "
        rule += "DeepSpeed has Adam's and SGD's updates alone"
        remedy = "use optimizer=adamw, adam or sgd, or a strategy without offload"
        faults.append(Fault(optimizer.key, optimizer.target, rule, remedy))


def _refuse_split_parameters(plan: Plan) -> None:
    """Raise PlanError for each optimizer class that needs whole parameters, if the plan splits some
    of them."""
    split: dict[str, tuple[OptimizerClass, list[str]]] = {}
    for path in (path for task_graph in plan.task_graphs for path in task_graph.shards):
        optimizer = plan.optimizer_of(path)
        if optimizer is not None and optimizer.unlike_in_parts:
            split.setdefault(optimizer.key, (optimizer, []))[1].append(path)
    faults = []
    for optimizer, paths in split.values():
        rule = f"has only a part of {listed(paths)} on a rank, and {optimizer.unlike_in_parts}"
        remedy = "use a strategy without a split of them, as strategy=dp, or give them another "
        remedy += "optimizer in optimizer.groups"
        faults.append(Fault(optimizer.key, optimizer.target, rule, remedy))
    if faults:
        raise PlanError(faults)


def _refuse_placement(form: Form, cluster: Cluster, faults: list[Fault]) -> None:
    """Add a fault where it makes no difference whether the stages of a replica share a host, or the
    replicas of a stage."""
    several = form.copies > 1 and sum(stage.copies for stage in form.stages) > 1
    if several and len(cluster.nodes) > 1:
        return
    rule = f"has no effect on one host, hardware={cluster.name}"
    if not several:
        rule = "has no effect without several replicas of a pipeline"
    faults.append(Fault("strategy.prefer_intra_node", "false", rule, "use true"))


def _refuse_levels(plan: Plan, training: Training) -> None:
    """Raise PlanError where the request sums gradients inside hosts first, and the plan has no such
    sum."""
    if training.all_reduce != "hierarchical" or any(x.endswith(".inside") for x in plan.groups):
        return
    rule = (
        "has no sum to be of effect on: it needs replicas without ZeRO on several hosts, equally "
    )
    rule += "many on each, and more than one"
    raise PlanError([Fault("train.all_reduce", "hierarchical", rule, "use train.all_reduce=auto")])


def _refuse_partitions(nodes: Sequence[Node], optimizer: str, faults: list[Fault]) -> None:
    """Add a fault for every node with ZeRO in `nodes` and their children: the trust ratio of
    `optimizer` needs the norm of a whole parameter, and ZeRO's flat partitions end anywhere."""
    for node in nodes:
        if isinstance(node, Replicate) and node.zero:
            rule = f"partitions parameters anywhere, and optimizer={optimizer} needs the norm of "
            rule += "each"
            remedy = f"use zero: 0, or optimizer={'sgd' if optimizer == 'lars' else 'adamw'}"
            faults.append(Fault(f"{node.path}.zero", str(node.zero), rule, remedy))
        if isinstance(node, Pipeline):
            stages = node.stages if isinstance(node.stages, tuple) else ()
            _refuse_partitions(stages, optimizer, faults)
        else:
            _refuse_partitions(node.of, optimizer, faults)
