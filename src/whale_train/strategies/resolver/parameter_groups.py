"""Groups of parameters that the optimizer updates with options of their own."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from whale_train.errors import Fault, closest, listed
from whale_train.strategies.graph.operation_graph import Parameter
from whale_train.strategies.plan.plan import Decision, PlannedParameterGroup
from whale_train.strategies.plan.training import GroupRule, Training


def parameter_groups(
    training: Training, parameters: Iterable[Parameter]
) -> tuple[PlannedParameterGroup, ...]:
    """Return the trained `parameters` by their options, or nothing where all have the same.

    A parameter follows the first rule that matches it. With `training.no_decay`, one that follows
    none has no weight decay if it is a norm's or a bias.
    """
    weight_decay = float(training.optimizer_options.get("weight_decay", 0.0))
    groups: dict[tuple[float, float], list[str]] = {}
    for parameter in parameters:
        rule = next((x for x in training.groups if _follows(parameter, x.match)), None)
        decay, scale = weight_decay, 1.0
        if rule is not None:
            decay = weight_decay if rule.weight_decay is None else rule.weight_decay
            scale = rule.lr_scale
        elif training.no_decay and is_norm_or_bias(parameter):
            decay = 0.0
        groups.setdefault((decay, scale), []).append(parameter.path)
    if groups.keys() <= {(weight_decay, 1.0)}:
        return ()
    return tuple(PlannedParameterGroup(*options, tuple(of)) for options, of in groups.items())


def is_norm_or_bias(parameter: Parameter) -> bool:
    """Return True for a parameter of fewer than two dimensions, as those of norms and most biases
    are, and for one named `bias`, as those of stacked experts are."""
    return len(parameter.shape) < 2 or parameter.path.rpartition(".")[2] == "bias"


def explain_parameter_groups(
    training: Training, parameters: Sequence[Parameter]
) -> tuple[Decision, ...]:
    """Return a note for the plan about the parameters that `training.no_decay` spares."""
    if not training.no_decay or not training.optimizer_options.get("weight_decay"):
        return ()
    free = [x for x in parameters if not any(_follows(x, rule.match) for rule in training.groups)]
    spared = [parameter.path for parameter in free if is_norm_or_bias(parameter)]
    if not spared:
        return ()
    reason = f"norms and biases have no weight decay: {listed(spared)}"
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
                said = "matches no trained parameter of the model"
                faults.append(Fault(f"optimizer.groups[{number}].match", pattern, said, remedy))


def _follows(parameter: Parameter, patterns: Iterable[str]) -> bool:
    """Return True where a pattern is that of one of the parameter's names, or of a module that
    holds the parameter."""
    names = [part for path in (parameter.path, *parameter.aliases) for part in _names(path)]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _names(path: str) -> list[str]:
    """Return a path and those of all modules above, `a.b` and `a` of `a.b`."""
    parts = path.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
