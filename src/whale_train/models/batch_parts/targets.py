"""Check, before anything is called, that what `model._target_` names says that it gives a module.

A config can name anything that can be imported, and what it names is called with arguments that the
config gives. `os.system` is no model; nothing is called to learn that.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import nn

REMEDY = "name a torch.nn.Module class, or a function annotated to return one (-> nn.Module)"


def no_module(made: Callable[..., Any]) -> str | None:
    """Return the reason why `made` must not be called for a model, or None where it may be.

    A class of modules may be called, and a function that is annotated to return a module.
    """
    while isinstance(made, partial):
        made = made.func
    if isinstance(made, type):
        return None if issubclass(made, nn.Module) else "is a class, and not a torch.nn.Module"
    if not inspect.isroutine(made):
        return f"is of type {type(made).__name__}, not a class"
    # A wrapper has the annotations of what it wraps, whose module knows their names.
    function = inspect.unwrap(made)
    annotations = getattr(made, "__annotations__", {})
    if "return" not in annotations:
        return "is a function that does not say what it returns"
    owner = getattr(made, "__self__", None)  # a classmethod's
    try:
        is_module = _is_module(annotations["return"], function, owner)
    except Exception as error:  # an annotation may be any expression, as a string
        said = f"{type(error).__name__}: {error}"
        return f"is a function whose return annotation cannot be resolved ({said})"
    if is_module:
        return None
    said = annotations["return"]  # a string where annotations are not evaluated
    said = said if isinstance(said, str) else inspect.formatannotation(said)
    return f"is a function that says it returns {said}"


def _is_module(annotation: object, function: Callable[..., Any], owner: object) -> bool:
    """Return whether the return `annotation` of `function` names modules and nothing else.

    `owner` is the class that `function` belongs to, and the meaning of `Self`; None for a function
    outside of classes.
    """
    names = getattr(function, "__globals__", None)
    if names is None:
        names = vars(sys.modules.get(getattr(function, "__module__", "")) or SimpleNamespace())
    about = SimpleNamespace(__annotations__={"return": annotation})
    resolved = get_type_hints(about, globalns=names, localns={}, include_extras=True)["return"]
    if resolved is Self:
        resolved = owner
    origin, parts = get_origin(resolved), get_args(resolved)
    if origin is Annotated:
        return _is_module(parts[0], function, owner)
    if origin in (Union, UnionType):
        return all(_is_module(part, function, owner) for part in parts)
    if isinstance(resolved, TypeVar):
        bounds = resolved.__constraints__ or (resolved.__bound__,)
        return all(_is_module(bound, function, owner) for bound in bounds)
    made = origin or resolved  # of a generic class
    return isinstance(made, type) and issubclass(made, nn.Module)
