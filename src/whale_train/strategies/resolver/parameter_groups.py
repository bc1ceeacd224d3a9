"""Parameter groups: parameters that the optimizer updates with options of their own."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from whale_train.errors import Fault, closest, listed
from whale_train.strategies.graph.operation_graph import Parameter
from whale_train.strategies.plan.plan import Decision, PlannedParameterGroup
from whale_train.strategies.plan.training import GroupRule, Training


def parameter_groups(
    training: Training, parameters: Iterable[Parameter]
) -> tuple[PlannedParameterGroup, ...]:
    """Return the trained `parameters` grouped by their options, or () where all have the same.

    A parameter follows the first rule that matches it. With `training.no_decay`, a parameter that
    no rule matches has no weight decay, and under LARS no trust ratio, if it is a bias or belongs
    to a norm.
    """
    usual = (_weight_decay(training, 0), 1.0, 0, True)
    groups: dict[tuple[float | None, float, int, bool], list[str]] = {}
    for parameter in parameters:
        rule = group_rule(training.groups, parameter)
        decay, scale, optimizer, trust = usual
        if rule is not None:
            decay, scale, optimizer = rule.weight_decay, rule.lr_scale, rule.optimizer
            trust = rule.trust_ratio
            decay = _weight_decay(training, optimizer) if decay is None else decay
        elif training.no_decay and is_norm_or_bias(parameter):
            decay, trust = 0.0, training.optimizer != "lars"
        groups.setdefault((decay, scale, optimizer, trust), []).append(parameter.path)
    if groups.keys() <= {usual}:
        return ()
    return tuple(
        PlannedParameterGroup(decay, scale, tuple(of), optimizer, trust)
        for (decay, scale, optimizer, trust), of in groups.items()
    )


def _weight_decay(training: Training, optimizer: int) -> float | None:
    """Return the default weight decay of the parameters of `optimizer`."""
    if training.optimizers:
        return training.optimizers[optimizer].weight_decay
    return float(training.optimizer_options.get("weight_decay", 0.0))


def group_rule(rules: Iterable[GroupRule], parameter: Parameter) -> GroupRule | None:
    """Return the first of `rules` that matches the parameter, or None."""
    return next((rule for rule in rules if _follows(parameter, rule.match)), None)


def is_norm_or_bias(parameter: Parameter) -> bool:
    """Return True for a parameter of fewer than two dimensions, as in norms and most biases, and
    for one named `bias`, as in stacked experts."""
    return len(parameter.shape) < 2 or parameter.path.rpartition(".")[2] == "bias"


def explain_parameter_groups(
    training: Training, parameters: Sequence[Parameter]
) -> tuple[Decision, ...]:
    """Return a note for the plan on the parameters that `training.no_decay` exempts; () if there
    are none."""
    trusts = training.optimizer == "lars"
    if not training.no_decay or not (trusts or _weight_decay(training, 0)):
        return ()
    free = [x for x in parameters if group_rule(training.groups, x) is None]
    spared = [parameter.path for parameter in free if is_norm_or_bias(parameter)]
    if not spared:
        return ()
    without = "no weight decay and no trust ratio" if trusts else "no weight decay"
    reason = f"norms and biases have {without}: {listed(spared)}"
    return (Decision("optimizer.no_decay", "norms_and_biases", "null", reason),)


def refuse_unmatched(
    rules: Sequence[GroupRule], parameters: Sequence[Parameter], faults: list[Fault]
) -> None:
    """Add a fault for every pattern that matches no trained parameter."""
    for number, rule in enumerate(rules):
        for pattern in rule.match:
            if not any(_follows(parameter, [pattern]) for parameter in parameters):
                near = closest(pattern, {name for x in parameters for name in _names(x.path)})
                example = near or parameters[0].path
                remedy = f"use a parameter's path or a module's, such as {example}, or *.bias"
                fault_rule = "matches no trained parameter of the model"
                faults.append(
                    Fault(f"optimizer.groups[{number}].match", pattern, fault_rule, remedy)
                )


def _follows(parameter: Parameter, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches one of the parameter's names, or a module that holds the
    parameter."""
    names = [part for path in (parameter.path, *parameter.aliases) for part in _names(path)]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _names(path: str) -> list[str]:
    """Return a path and the paths of all modules around it: `a` and `a.b` for `a.b`."""
    parts = path.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
