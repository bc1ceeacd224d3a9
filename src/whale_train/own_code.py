"""Import the class or function that a config names by `_target_`, after checking its kind.

A config can name anything that can be imported, and gives the arguments of the call. `os.system` is
no model, and it must not be called to learn that. A class may be called if it is of the kind, and a
function if it is annotated to return an object of the kind.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace, UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from whale_train.errors import ConfigError, Fault, nearest
from whale_train.extras import how_to_install, is_required

PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"  # of a class or function in a module


@dataclass(frozen=True)
class TargetKind:
    """Kind of thing that `_target_` may name.

    name: the name of the kind in messages, as `torch.nn.Module`.
    includes: function that returns whether a class is of the kind.
    returned: function that returns whether a function may be annotated to return a class; None is
        `includes`.
    wanted: the remedy for what is not of the kind; '' for the usual one.
    """

    name: str
    includes: Callable[[type], bool]
    returned: Callable[[type], bool] | None = None
    wanted: str = ""

    @property
    def remedy(self) -> str:
        """Return the remedy for an object that is not of this kind."""
        short = ".".join(self.name.split(".")[-2:])
        usual = f"name a {self.name} class, or a function annotated to return one (-> {short})"
        return self.wanted or usual

    @property
    def fits(self) -> Callable[[type], bool]:
        """Return the function that tells whether a function may be annotated to return a class."""
        return self.returned or self.includes


@contextmanager
def importable(folder: str) -> Iterator[None]:
    """Put `folder` first on the module search path inside of the context."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)


def imported(key: str, target: str, kind: TargetKind) -> Callable[..., Any]:
    """Return the class or function at the path `target`, which is in a module or in a class of one.

    `key` is the key of the config that names it, for messages. Raises ConfigError where it cannot
    be imported, or is not of the `kind`.
    """
    path, _, name = target.rpartition(".")
    parts = path.split(".")
    if parts[0] == "__main__":
        rule = "is of the program that runs here, which ranks cannot import"
        remedy = "put it into a module, as my_models.py, and name it there"
        raise ConfigError([Fault(key, target, rule, remedy)])
    module: ModuleType | type | None = None
    for part in (".".join(parts[: end + 1]) for end in range(len(parts))):
        try:
            module = importlib.import_module(part)
        except Exception as error:
            inner = getattr(module, part.rpartition(".")[2], None)
            if isinstance(error, ModuleNotFoundError) and isinstance(inner, type):
                module = inner
                continue
            if isinstance(error, ModuleNotFoundError) and error.name == part:
                rule = f"cannot be imported: there is no module {part}"
                remedy = "run from the folder that holds it, or install it"
                remedy = how_to_install(part) if is_required(part) else remedy
            else:
                rule = f"cannot be imported: {part} raised {said(error)}"
                remedy = f"correct {part}"
            raise ConfigError([Fault(key, target, rule, remedy)]) from error
    if not hasattr(module, name):
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        near = [k for k, v in public.items() if isinstance(v, type) and kind.includes(v)]
        remedy = nearest(name, near) if near else f"define a {kind.name} in {path}"
        rule = f"cannot be imported: {path} has no {name}"
        raise ConfigError([Fault(key, target, rule, remedy)])
    made: Callable[..., Any] = getattr(module, name)
    refused = why_not(made, kind)
    if refused is not None:
        raise ConfigError([Fault(key, target, refused, kind.remedy)])
    return made


def said(error: BaseException) -> str:
    """Return an exception as one line: its type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def by_keyword(
    parameters: Mapping[str, inspect.Parameter],
) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that can be passed by keyword, and whether there is a `**kwargs`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def argument_faults(
    made: Callable[..., Any], given: Mapping[str, Any], section: str, name: str, hint: str = ""
) -> list[Fault]:
    """Return a fault for each argument in `given` that `made` does not take, and for each missing
    one.

    section: the key of the config that holds the arguments.
    name: the name of `made`, for messages.
    hint: text that is added to the remedy for unknown arguments.
    """
    try:
        parameters = inspect.signature(made).parameters
    except ValueError:  # written in C, without a signature
        return []
    named, open_ended = by_keyword(parameters)
    faults = []
    for key, value in given.items():
        if key not in named and not open_ended:
            rule = f"is not an argument of {name}"
            remedy = nearest(key, named) if named else "leave it out: it takes no arguments"
            faults.append(Fault(f"{section}.{key}", str(value), rule, remedy + hint))
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in given:
            rule = f"is not given, and {name} needs it"
            faults.append(Fault(f"{section}.{key}", "", rule, f"write {section}.{key}=VALUE"))
    return faults


def why_not(made: Callable[..., Any], kind: TargetKind) -> str | None:
    """Return the reason why `made` must not be called to make an object of `kind`, or None where it
    may be called."""
    while isinstance(made, partial):
        made = made.func
    if isinstance(made, type):
        return None if kind.includes(made) else f"is a class, and not a {kind.name}"
    if not inspect.isroutine(made):
        return f"is of type {type(made).__name__}, not a class"
    # A wrapper has the annotations of the wrapped function, whose module defines their names.
    function = inspect.unwrap(made)
    annotations = getattr(made, "__annotations__", {})
    if "return" not in annotations:
        return "is a function that does not say what it returns"
    owner = getattr(made, "__self__", None)  # a classmethod's
    try:
        returns_one = _names_only(kind, annotations["return"], function, owner)
    except Exception as error:  # an annotation may be any expression, as a string
        return f"is a function whose return annotation cannot be resolved ({said(error)})"
    if returns_one:
        return None
    shown = annotations["return"]  # a string where annotations are not evaluated
    shown = shown if isinstance(shown, str) else inspect.formatannotation(shown)
    return f"is a function that says it returns {shown}"


def _names_only(
    kind: TargetKind, annotation: object, function: Callable[..., Any], owner: object
) -> bool:
    """Return whether the return `annotation` of `function` admits objects of `kind` and nothing
    else.

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
        return _names_only(kind, parts[0], function, owner)
    if origin in (Union, UnionType):
        return all(_names_only(kind, part, function, owner) for part in parts)
    if isinstance(resolved, TypeVar):
        bounds = resolved.__constraints__ or (resolved.__bound__,)
        return all(_names_only(kind, bound, function, owner) for bound in bounds)
    made = origin or resolved  # of a generic class
    return isinstance(made, type) and kind.fits(made)


def called(key: str, value: Any) -> Any:
    """Return an argument of a config after calling every `_target_` in it, inner ones first.

    A `_target_` must name a class whose objects can be called, as those of transforms. Raises
    ConfigError, with the config's `key`.
    """
    if isinstance(value, Mapping):
        inner = {name: called(f"{key}.{name}", item) for name, item in value.items()}
        target = inner.pop("_target_", None)
        return inner if target is None else made_object(key, str(target), inner, _CALLABLE)
    if isinstance(value, list | tuple):
        return [called(f"{key}[{number}]", item) for number, item in enumerate(value)]
    return value


def _can_be_called(made: type) -> bool:
    """Return whether the objects of a class can be called."""
    return "__call__" in dir(made)


_CALLABLE = TargetKind(
    "class with a __call__",
    _can_be_called,
    lambda _: False,
    "name a class whose objects can be called, as those of transforms",
)


def made_object(key: str, target: str, arguments: Mapping[str, Any], kind: TargetKind) -> Any:
    """Return the result of calling the class or function at the path `target` with `arguments`.

    The working directory must be importable. Raises ConfigError, with the config's `key`, where the
    target cannot be imported, is not of the `kind`, does not take the arguments, or raises.
    """
    made = imported(f"{key}._target_", target, kind)
    faults = argument_faults(made, arguments, key, target.rpartition(".")[2])
    if faults:
        raise ConfigError(faults)
    try:
        return made(**arguments)
    except Exception as error:
        rule = f"cannot be made: it raised {said(error)}"
        raise ConfigError([Fault(f"{key}._target_", target, rule, "correct it")]) from error


def named_function(
    key: str, target: str, arguments: Mapping[str, Any], returns: TargetKind
) -> Callable[..., Any]:
    """Return the function at the path `target` with `arguments` bound, or a callable object of the
    class at that path.

    The function must be annotated to return something of the kind `returns`, and is not called
    here. Raises ConfigError, with the config's `key`.
    """
    wanted = f"name a function annotated to return a {returns.name}, or a class with a __call__"
    kind = TargetKind("class with a __call__", _can_be_called, returns.includes, wanted)
    made = imported(f"{key}._target_", target, kind)
    if isinstance(made, type):
        return made_object(key, target, arguments, kind)  # type: ignore[no-any-return]
    given = {f"{key}.{name}" for name in arguments}  # the caller passes the other arguments
    faults = argument_faults(made, arguments, key, target.rpartition(".")[2])
    if unknown := [fault for fault in faults if fault.key in given]:
        raise ConfigError(unknown)
    return partial(made, **arguments) if arguments else made
