"""Try the optimizers that a request names by class, and refuse requests that they cannot serve.

Torch is imported only for a request that names such an optimizer (docs/adr/070).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault, listed
from whale_train.optimizer_options import OfClass
from whale_train.strategies.graph.operation_graph import Parameter
from whale_train.strategies.plan.optimizer_classes import OptimizerClass
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.plan.training import GroupRule, Training
from whale_train.strategies.resolver.parameter_groups import group_rule

KEY = "optimizer._target_"


def with_optimizers(
    request: Request, training: Training, parameters: Sequence[Parameter], faults: list[Fault]
) -> Training:
    """Return `training` with the properties of the optimizers that the request names by class.

    Each class is tried on small parameters. Without such a class, `training` is returned unchanged.

    parameters: the trained parameters.
    faults: receives a fault for each class that cannot be tried or cannot update the parameters it
        is to update, for state that a checkpoint cannot hold, and for weight decay without effect.
    """
    if not request.optimizer.is_custom:
        return training
    tried: list[OptimizerClass] = []
    rules = []
    for key, target, arguments, rule in _named(request, training):
        place = _place_of(tried, key, target, arguments, faults)
        if place is not None and rule is not None:
            rules.append(replace(rule, optimizer=place))
    if len(rules) < len(training.groups) or not tried:
        return training
    completed = replace(training, groups=tuple(rules), optimizers=tuple(tried))
    of_each: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        rule = group_rule(rules, parameter)
        of_each.setdefault(0 if rule is None else rule.optimizer, []).append(parameter)
    for number, of in of_each.items():
        _refuse_dims(tried[number], of, faults)
    _refuse_weight_decay(request, rules, tried, faults)
    if request.checkpoint.every is not None or request.train.resume is not None:
        for optimizer in tried:
            if optimizer.unsaved:
                rule_said = f"{optimizer.unsaved}, which a checkpoint cannot hold"
                remedy = "use another optimizer, or checkpoint.every=null"
                faults.append(Fault(optimizer.key, optimizer.target, rule_said, remedy))
    widths = {
        parameter.path: tried[number].state_bytes(parameter.shape) / max(1, parameter.elements)
        for number, of in of_each.items()
        for parameter in of
    }
    total = sum(widths[x.path] * x.elements for x in parameters)
    mean = total / max(1, sum(x.elements for x in parameters))
    return replace(completed, widths=widths, mean_width=mean)


_Named = tuple[str, str, dict[str, Any], GroupRule | None]


def _named(request: Request, training: Training) -> list[_Named]:
    """Return the key, class, arguments and rule of each named optimizer: first the request's own,
    without a rule, then one for each group."""
    options = request.optimizer
    assert options.target is not None
    own = options.arguments()
    named: list[_Named] = [(KEY, options.target, own, None)]
    for number, (group, rule) in enumerate(zip(options.groups, training.groups, strict=True)):
        if group.target is None:
            named.append((KEY, options.target, own, rule))
            continue
        arguments = {"lr": options.lr * group.lr_scale, **group.given}
        key = f"optimizer.groups[{number}]._target_"
        named.append((key, group.target, arguments, rule))
    return named


def _place_of(
    tried: list[OptimizerClass],
    key: str,
    target: str,
    arguments: dict[str, Any],
    faults: list[Fault],
) -> int | None:
    """Return the index of an optimizer in `tried`, or None after adding to `faults`.

    An optimizer that is not in `tried` yet is tried and appended.
    """
    for number, optimizer in enumerate(tried):
        if (optimizer.target, optimizer.arguments) == (target, arguments):
            return number
    from whale_train.optimizers.trial import try_optimizer  # which imports torch

    try:
        tried.append(try_optimizer(key, target, arguments))
    except ConfigError as error:
        faults += [fault for fault in error.faults if fault not in faults]
        return None
    return len(tried) - 1


def _refuse_dims(
    optimizer: OptimizerClass, parameters: Sequence[Parameter], faults: list[Fault]
) -> None:
    """Add a fault where the optimizer refuses a number of dimensions that some parameter has.

    parameters: the parameters that the optimizer is to update.
    """
    refused = [x for x in parameters if str(len(x.shape)) in optimizer.refused]
    if not refused:
        return
    dims = len(refused[0].shape)
    rule = f"refuses {listed(x.path for x in refused)}: of {dims} dimensions, a parameter that was "
    rule += f"tried raised {optimizer.refused[str(dims)]}"
    remedy = "give them an optimizer of their own, as "
    remedy += "optimizer.groups=[{match: ['*norm*', '*.bias'], _target_: torch.optim.AdamW}]"
    faults.append(Fault(optimizer.key, optimizer.target, rule, remedy))


def _refuse_weight_decay(
    request: Request,
    rules: Sequence[GroupRule],
    tried: Sequence[OptimizerClass],
    faults: list[Fault],
) -> None:
    """Add a fault for each option on weight decay that an optimizer without weight decay has.

    rules: the rules of the optimizer's groups, in the order of the request's groups.
    tried: the optimizers, which the rules name by index.
    """
    options = request.optimizer
    if options.no_decay is not None and tried[0].weight_decay is None:
        rule = f"has no effect on {tried[0].target}, which has no weight_decay"
        faults.append(Fault("optimizer.no_decay", options.no_decay, rule, "use null"))
    for number, (rule_of_group, group) in enumerate(zip(rules, options.groups, strict=True)):
        optimizer = tried[rule_of_group.optimizer]
        if group.weight_decay is not None and optimizer.weight_decay is None:
            rule = f"has no effect on {optimizer.target}, which has no weight_decay"
            key = f"optimizer.groups[{number}].weight_decay"
            faults.append(Fault(key, f"{group.weight_decay:g}", rule, "leave it out"))


def refuse_parts(plan: Plan, faults: list[Fault]) -> None:
    """Add a fault for each optimizer that draws random numbers, in a plan with replicas, since each
    replica would draw other numbers."""
    copied = any(len(task_graph.replicas) > 1 for task_graph in plan.task_graphs)
    for optimizer in plan.optimizers if copied else ():
        if optimizer.draws:
            rule = "draws random numbers in its updates, and copies would draw others each"
            faults.append(Fault(optimizer.key, optimizer.target, rule, "use strategy=single"))


def explain_optimizers(training: Training) -> tuple[Decision, ...]:
    """Return a note for the plan on each optimizer that is named by class: its state, and whether
    it can update parts of a parameter."""
    notes = []
    for optimizer in training.optimizers:
        states = _states_said(optimizer)
        shown = optimizer.unlike_in_parts or "elements are updated alone"
        where = "where each parameter is whole" if optimizer.unlike_in_parts else "anywhere"
        reason = f"tried on small parameters: {shown}, so that it runs {where}"
        notes.append(Decision(optimizer.key, optimizer.target, "", f"{reason}; it keeps {states}"))
    return tuple(notes)


def _states_said(optimizer: OptimizerClass) -> str:
    """Return the entries that an optimizer keeps of matrices, as text for the plan."""
    dims = str(min(2, max(map(int, optimizer.states), default=0)))
    names = ", ".join(x.name for x in optimizer.states.get(dims, ()) if x.shape) or "no state"
    if dims not in optimizer.large:
        return names
    sizes = optimizer.large[dims]
    elements = 2**24 * sizes.multiple_of
    width = optimizer.state_bytes((elements, 1, 1, 1, 1)[: int(dims)]) / elements
    of_which = f" that are multiples of {sizes.multiple_of}" if sizes.multiple_of > 1 else ""
    said = f"{names}, in {width:.3g} bytes an element of parameters of {sizes.at_least:,} elements "
    return f"{said}and more{of_which}"


def schedule_decisions(request: Request, faults: list[Fault]) -> tuple[Decision, ...]:
    """Return a note for the plan where the class of the schedule does not read `optimizer.lr`.

    faults: receives the faults of a schedule that is named by class.
    """
    schedule = request.optimizer.schedule
    if not isinstance(schedule, OfClass):
        return ()
    from whale_train.optimizers.schedules import try_schedule  # which imports torch

    try:
        reads_rate = try_schedule(request.optimizer, request.train.steps)
    except ConfigError as error:
        faults += error.faults
        return ()
    if reads_rate:
        return ()
    reason = f"{schedule.class_name} has rates of its own, and the groups' lr_scale acts on them"
    return (Decision("optimizer.lr", "not read", f"{request.optimizer.lr:g}", reason),)
