"""What `model._target_` may name: what says, before it is called, that it gives a module.

A config can name anything that can be imported, and what it names is called with arguments that the
config gives. `os.system` is no model; nothing is called to find that out.
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
    """Return why `made` is not to be called for a model; None for a class of modules, and for a
    function that is annotated to return one."""
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
    """Return whether `annotation`, of `function` in the class `owner` (None: in none), is of
    modules."""
    names = getattr(function, "__globals__", None)
    if names is None:
        names = vars(sys.modules.get(getattr(function, "__module__", "")) or SimpleNamespace())
    about = SimpleNamespace(__annotations__={"return": annotation})
    found = get_type_hints(about, globalns=names, localns={}, include_extras=True)["return"]
    if found is Self:
        found = owner
    origin, parts = get_origin(found), get_args(found)
    if origin is Annotated:
        return _is_module(parts[0], function, owner)
    if origin in (Union, UnionType):
        return all(_is_module(part, function, owner) for part in parts)
    if isinstance(found, TypeVar):
        bounds = found.__constraints__ or (found.__bound__,)
        return all(_is_module(bound, function, owner) for bound in bounds)
    made = origin or found  # of a generic class
    return isinstance(made, type) and issubclass(made, nn.Module)
