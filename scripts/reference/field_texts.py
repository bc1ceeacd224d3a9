"""Read what classes of options say of their fields: the docstrings' lines, and the types.

A docstring of a class of options has a line for each field, as `name: text.`, or for several as
`one, two: text.`; lines that are indented further go on with it. Types become words: those that a
user who writes YAML knows.
"""

import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from whale_train.own_code import PATH
from whale_train.validation import DURATION

_LINE = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (.*)$")
_PATTERNS = {PATH: "a path such as `package.module.Class`", DURATION: "a time, as `30min`"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def texts_of(kind: type) -> dict[str, str]:
    """Return the text of each field that the docstrings of a class and of its bases describe."""
    texts: dict[str, str] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("whale_train"):
            for name, text in _lines(base.__doc__ or ""):
                texts.setdefault(name, text)
    return texts


def _lines(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of a docstring."""
    names: list[str] = []
    text: list[str] = []
    for line in [*docstring.splitlines(), ""]:
        start = _LINE.match(line.removeprefix("    "))
        if names and not start and line.startswith("        "):
            text.append(line.strip())
            continue
        yield from ((name, " ".join(text)) for name in names)
        names, text = (start[1].split(", "), [start[2]]) if start else ([], [])


def values_of(field: FieldInfo) -> str:
    """Return in words which values a field takes."""
    return _words(field.annotation, _bounds(field.metadata))


def inner_model(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """Return the class of options that a field holds, and how a key of it continues the field's:
    `.KEY`, `[].KEY` of a list, `.NAME.KEY` of a mapping. None where it holds none."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, "."
    if origin is Annotated:
        return inner_model(inner[0])
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        return _continued(inner[0], "[]")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _continued(inner[1], ".NAME")
    models = (inner_model(part) for part in inner) if origin in (Union, UnionType) else ()
    return next((model for model in models if model is not None), None)


def _continued(annotation: Any, between: str) -> tuple[type[BaseModel], str] | None:
    model = inner_model(annotation)
    return None if model is None else (model[0], between + model[1])


def _words(annotation: Any, bounds: str) -> str:
    """Return a type in words, with the bounds of its numbers."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        given = (x for item in inner[1:] for x in getattr(item, "metadata", [item]))
        return _words(inner[0], bounds or _bounds(list(given)))
    if origin is Literal:
        return ", ".join(f"`{_as_yaml(value)}`" for value in inner)
    if origin in (Union, UnionType):
        parts = [x for x in inner if x is not type(None)]
        null = ["`null`"] if len(parts) < len(inner) else []
        return " or ".join([*dict.fromkeys(_words(x, bounds) for x in parts), *null])
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"a list ({_words(inner[0], bounds)} each)"
        return f"a list of {len(inner)} ({_words(inner[0], bounds)} each)"
    if (isinstance(origin, type) and issubclass(origin, Mapping)) or annotation is dict:
        return "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    return _PATTERNS.get(bounds) or {
        bool: "`true`, `false`",
        int: f"a whole number{bounds}",
        float: f"a number{bounds}",
        str: "text",
    }.get(annotation, "any value")


def _bounds(metadata: list[Any]) -> str:
    """Return the bounds among a field's metadata, as ` of at least 1`, or the pattern of a text."""
    bounds = []
    for item in metadata:
        if getattr(item, "pattern", None) in _PATTERNS:
            return str(item.pattern)
        for name, word in _BOUNDS.items():
            if getattr(item, name, None) is not None:
                bounds.append(f"{word} {_number(getattr(item, name))}")
    return f" {' and '.join(bounds)}".replace(" at least", " of at least", 1) if bounds else ""


def _number(value: float) -> str:
    powers: dict[float, str] = {2**32: "2^32", 2**63: "2^63"}
    return powers.get(value, f"{value:,}" if isinstance(value, int) else f"{value:g}")


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
