"""Import optimizers that a config names by their class, and make them for groups of parameters."""

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from whale_train.errors import ConfigError, Fault
from whale_train.own_code import TargetKind, argument_faults, by_keyword, importable, imported

OPTIMIZER = TargetKind("torch.optim.Optimizer", lambda made: issubclass(made, Optimizer))

Groups = list[dict[str, Any]]
MakePart = Callable[[Groups], Optimizer]


def load_optimizer(key: str, target: str, arguments: Mapping[str, Any]) -> MakePart:
    """Return a function that makes the optimizer `target` for groups of parameters.

    The current working directory is importable. Raises ConfigError, with `key` and the section of
    `key`, where the class cannot be imported, or does not take an argument or lacks one.
    """
    with importable(os.getcwd()), torch.device("cpu"):
        made = imported(key, target, OPTIMIZER)
    section, name = key.rpartition(".")[0], target.rpartition(".")[2]
    faults = []
    first = _first_parameter(made)
    if first is not None and first in arguments:
        rule, remedy = "is the parameters, which training gives it", "leave it out"
        faults.append(Fault(f"{section}.{first}", str(arguments[first]), rule, remedy))
    given = {**arguments, **({} if first is None else {first: None})}
    faults += argument_faults(made, given, section, name)
    if faults:
        raise ConfigError(faults)
    return partial(_made, made, dict(arguments))


def _first_parameter(made: Callable[..., Any]) -> str | None:
    """Return the name of the first parameter of `made`, or None where it cannot be passed by
    keyword."""
    try:
        parameters = inspect.signature(made).parameters
    except ValueError:  # written in C
        return None
    first = next(iter(parameters), None)
    return first if first in by_keyword(parameters)[0] else None


def _made(made: Callable[..., Any], arguments: dict[str, Any], groups: Groups) -> Optimizer:
    """Return the optimizer that `made` makes for `groups`. Raises TypeError where the result is not
    an Optimizer."""
    optimizer = made(groups, **arguments)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"it is of type {type(optimizer).__name__}, not a {OPTIMIZER.name}")
    return optimizer
