"""Find every refusal of the product in its source: each `Fault(...)` and `LaunchError(...)`.

A fault whose rule or remedy is a parameter of the function around it is that of the function's
calls, as `self.fault(...)` in the reader of strategies.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scripts.reference.assignments import Value
from scripts.reference.source_tree import Function, Module, Sources
from scripts.reference.text_templates import Reader, Scope

_KINDS = ("Fault", "LaunchError")
_DEEPEST = 3  # functions whose calls are looked for, one around the other
HOLE = re.compile(r"<[^<>]*>")
GROUPS = ("train", "data", "model", "strategy", "hardware", "launcher", "checkpoint", "other")
_GROUPS_OF_FOLDERS = {
    "data": "data",
    "tokenising": "data",
    "models": "model",
    "strategies/hardware": "hardware",
    "strategies": "strategy",
    "checkpoints": "checkpoint",
    "launcher/ranks": "launcher",
    "launcher/planning/devices": "hardware",
}


@dataclass(frozen=True, order=True)
class Refusal:
    """A message that the product can print, with `<name>` for what differs from time to time.

    group: the section of the config that it is about, one of `GROUPS`.
    subject: the key, with its value where one is shown.
    rule: what is wrong.
    remedy: what to do; '' where the message does not say it.
    """

    group: str
    subject: str
    rule: str
    remedy: str

    @property
    def message(self) -> str:
        """Return the message as it is printed."""
        said = " ".join(x for x in (self.subject, self.rule) if x)
        return f"{said}; {self.remedy}" if self.remedy else said

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of its messages, whatever stands in the placeholders."""
        parts = (re.escape(part) for part in HOLE.split(self.message))
        return re.compile(".*?".join(parts), flags=re.S)


def refusals(package: Path) -> list[Refusal]:
    """Return the refusals in the source below `package`, sorted, each once."""
    sources = Sources.of(package)
    reader = Reader(sources)
    made: set[Refusal] = set()
    for kind in _KINDS:
        for module, call in sources.calls.get(kind, []):
            scope = Scope(module, module.owners[id(call)])
            for values in _values(reader, call.args, call, scope, 0):
                refusal = _refusal(kind, values, module)
                if refusal is not None:
                    made.add(refusal)
    return sorted(made, key=lambda x: (GROUPS.index(x.group), x.subject, x.rule, x.remedy))


def _values(
    reader: Reader, arguments: list[ast.expr], at: ast.Call, scope: Scope, depth: int
) -> Iterator[tuple[Value, ...]]:
    """Yield what the arguments of a call can be; where they come from parameters of the function
    around it, in all calls of the function."""
    function = scope.function
    uses = _parameters_said(reader, arguments, scope)
    if not uses or function is None or depth >= _DEEPEST:
        for text in reader.together(arguments, scope):
            assert isinstance(text.value, tuple)
            yield text.value
        return
    calls = [
        (module, call)
        for module, call in reader.sources.calls.get(function.name, [])
        if _is_of(reader.sources, module, call, scope.module, function)
    ]
    bindings = [
        bound
        for module, call in calls
        for bound in _bindings(
            reader, call, Scope(module, module.owners[id(call)]), function, depth
        )
    ]
    for bound in bindings or [{}]:
        inside = Scope(scope.module, function, bound, scope.depth)
        for text in reader.together(arguments, inside):
            assert isinstance(text.value, tuple)
            yield text.value


def _bindings(
    reader: Reader, call: ast.Call, around: Scope, function: Function, depth: int
) -> Iterator[dict[str, Value]]:
    """Yield the values that a call, in the function `around` it, gives to another's parameters."""
    parameters = [x.arg for x in function.args.args]
    defaults = dict(zip(reversed(parameters), reversed(function.args.defaults), strict=False))
    names = [name for name in parameters if name not in ("self", "cls")]
    starred = [place for place, x in enumerate(call.args) if isinstance(x, ast.Starred)]
    last = starred[0] if starred else len(call.args)
    given = dict(zip(names, call.args[: last + 1], strict=False))
    given |= {x.arg: x.value for x in call.keywords if x.arg is not None}
    given = {**{name: x for name, x in defaults.items() if name not in given}, **given}
    order = sorted(given, key=names.index)  # a starred argument stands for its place and the next
    expressions = [given[name] for name in order if not starred or names.index(name) <= last]
    for values in _values(reader, expressions, call, around, depth + 1):
        yield dict(zip(names if starred else order, values, strict=False))


def _parameters_said(reader: Reader, arguments: list[ast.expr], scope: Scope) -> bool:
    """Return whether a rule, a remedy or a text is what a parameter of the function says."""
    if scope.function is None:
        return False
    names = {x.arg for x in scope.function.args.args} - {"self", "cls"}
    said = {f"<{name}>" for name in names & {"rule", "remedy", "said", "why", "refusal", "error"}}
    last = arguments[2:] if len(arguments) > 2 else arguments
    return any(
        any(hole in str(text.value) for hole in said) for text in reader.together(last, scope)
    )


def _is_of(
    sources: Sources, module: Module, call: ast.Call, home: Module, function: Function
) -> bool:
    """Return whether a call is of a function, and not of another one with its name."""
    if isinstance(call.func, ast.Name):
        target = sources.function(module, call.func.id)
        return target is not None and target[1] is function
    return module is home


def _refusal(kind: str, values: tuple[Value, ...], module: Module) -> Refusal | None:
    """Return the refusal of a call's arguments; None where they say nothing by themselves."""
    texts = [" ".join(x.split()) if isinstance(x, str) else "<value>" for x in values]
    if kind == "LaunchError":
        rule, _, remedy = texts[0].partition("; ") if texts else ("", "", "")
        return None if not HOLE.sub("", rule).strip(" .,:;") else Refusal("other", "", rule, remedy)
    if len(texts) != 4 or not HOLE.sub("", texts[2]).strip(" .,:;"):
        return None
    key, value, rule, remedy = texts
    if any(text.count("(") != text.count(")") for text in (rule, remedy)):
        return None  # the beginning of a text, whose end another branch adds
    return Refusal(_group(key, module), f"{key}={value}" if value else key, rule, remedy)


def _group(key: str, module: Module) -> str:
    """Return the section of a key, or where it is not known that of the module's folder."""
    first = re.split(r"[.\[=]", key)[0]
    if first in GROUPS:
        return first
    if first == "<path>":  # of a node
        return "strategy"
    if not first.startswith("<"):
        return "other"
    folders = (x for x in _GROUPS_OF_FOLDERS if module.path.startswith(f"{x}/"))
    return next((_GROUPS_OF_FOLDERS[folder] for folder in folders), "other")
