"""Validate values with pydantic, and translate its errors into faults."""

import math
import re
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from whale_train.errors import Fault, nearest
from whale_train.other_trainers import known_elsewhere
from whale_train.own_code import PATH

DURATION = r"^[0-9]+(\.[0-9]+)?(s|min|h)$"
HOST = r"^[^-\s]\S*$"
FOLDER = r"^\w[\w.-]*$"
IDENTIFIER = r"^[A-Za-z]\w*$"


def as_yaml(value: object) -> str:
    """Return a value as YAML on one line, as a user would write it."""
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").strip()


def no_truth_value(value: object) -> object:
    """Return `value` unchanged. Raises a pydantic error for a bool, which pydantic would take for
    an integer."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "a truth value")
    return value


def validated(
    kind: Any, value: Any, section: str, faults: list[Fault], without: Collection[str] = ()
) -> Any:
    """Return `value` read as `kind`, or None after adding its faults.

    kind: a type that pydantic knows.
    value: plain values. The text `???` in a mapping stands for a value that must be given.
    section: the key of the value in the config, for messages.
    faults: the list to which all faults of the value are added.
    without: keys without effect, which remedies for unknown keys do not name.
    """
    if isinstance(value, dict):
        missing = [key for key, item in value.items() if item == "???"]
        for key in missing:
            remedy = f"write {section}.{key}=VALUE"
            faults.append(Fault(f"{section}.{key}", "", "must be given", remedy))
        value = {key: item for key, item in value.items() if item != "???"}
    else:
        missing = []
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        faults_by_key: dict[str, list[Fault]] = {}
        problems, inner = error.errors(), list[Any]()
        for problem in problems:
            if str(problem["loc"][-1:] and problem["loc"][-1]) in missing:
                continue
            if problem["type"] == "too_short" and _has_inside(problem["loc"], problems):
                continue  # pydantic counts the valid items alone
            absent = problem["type"] == "missing"
            problem["loc"] = _within(value, problem["loc"], _tagged(kind), absent)
            inner.append(problem)
        for problem in inner:
            is_list = isinstance(problem["input"], list | tuple | dict)
            # The members of a union report the same value. The problems inside of it say more.
            if not is_list or not _has_inside(problem["loc"], inner):
                fault = _fault(problem, section, kind, without)
                faults_by_key.setdefault(fault.key, []).append(fault)
        faults += [_either(same) for same in faults_by_key.values()]
        return None


def _has_inside(location: tuple[Any, ...], problems: Sequence[Any]) -> bool:
    """Return whether one of pydantic's `problems` lies inside the value at `location`."""
    around = len(location)
    return any(len(x["loc"]) > around and x["loc"][:around] == location for x in problems)


def _within(
    value: Any, location: tuple[Any, ...], tags: Container[Any], absent: bool
) -> tuple[Any, ...]:
    """Return the parts of one of pydantic's paths that index into `value`.

    The other parts name members of a union. `tags` are the tags of a tagged union; a tag at the
    beginning of the path stays. The last part of the path of an `absent` value indexes nothing, and
    stays too.
    """
    indices = list(location[:1]) if location[:1] and location[0] in tags else []
    rest = location[len(indices) :]
    for place, part in enumerate(rest):
        if (isinstance(value, dict) and part in value) or (
            isinstance(value, list | tuple) and part in range(len(value))
        ):
            value = value[part]
        elif not (absent and place == len(rest) - 1):
            continue
        indices.append(part)
    return tuple(indices)


def _either(faults: list[Fault]) -> Fault:
    """Return one fault for all faults of a value that could be of several types. Its remedy joins
    all remedies."""
    first, *others = (x for x in faults if len(faults) == 1 or x.remedy != _QUOTED)
    said = re.compile(r"^use (one of: |one, such as )?")
    remedies = [said.sub("", other.remedy) for other in others]
    return replace(first, remedy=", or ".join(dict.fromkeys([first.remedy, *remedies])))


def _fault(problem: Any, section: str, read_as: Any, without: Collection[str]) -> Fault:
    """Return one of pydantic's errors as a fault. The tag of a union is dropped from the path."""
    location = list(problem["loc"])
    tagged = _tagged(read_as)
    tag = str(location.pop(0)) if location and location[0] in tagged else ""
    model = tagged.get(tag, read_as)
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    key = f"{section}{key}"
    kind, context, given = problem["type"], problem.get("ctx", {}), problem["input"]
    shown = as_yaml(given)
    if kind == "extra_forbidden":
        name = str(location[-1])
        inside = _read_as(model, location[:-1])
        remedy = _known_keys(name, key.rpartition(".")[0], inside, without)
        return Fault(key, shown, "is not a key here", remedy)
    if kind == "missing":
        return Fault(key, "", "must be given", f"write {key}=VALUE")
    if kind == "literal_error":
        choices = [
            part.strip("' ") for part in context["expected"].replace(" or ", ", ").split(",")
        ]
        kinds = get_args(_read_as(model, location, as_union=True))
        if NoneType in kinds and len(kinds) == 2:  # these choices, or nothing
            choices.append("null")
        return Fault(key, shown, "is unknown", nearest(shown, choices))
    if kind == "union_tag_invalid":
        choices = [part.strip("' ") for part in context["expected_tags"].split(",")]
        tag = str(context["tag"])
        return Fault(f"{section}.kind", tag, "is unknown", nearest(tag, choices))
    if kind == "union_tag_not_found":
        return Fault(f"{section}.kind", "", "must be given", f"use {section}=text or the like")
    for bound, (rule, remedy) in _BOUNDS.items():
        if bound in context:
            limit = f"{context[bound]:g}"
            return Fault(key, shown, f"{rule} {limit}", remedy.format(limit))
    if kind == "int_from_float" and math.isfinite(given):
        remedy = f"use {math.floor(given)} or {math.ceil(given)}"
        return Fault(key, shown, "is not a whole number", remedy)
    if kind.startswith(("tuple", "too_")):
        of_union = get_args(_read_as(model, location, as_union=True))
        wanted = next(filter(_is_list, of_union), _read_as(model, location))
        return Fault(key, shown, *_list_wanted(wanted, given))
    if kind == "model_type":
        of_union = get_args(_read_as(model, location, as_union=True))
        wanted = next(filter(_is_model, of_union), _read_as(model, location))
        fields = wanted.model_fields.items() if _is_model(wanted) else ()
        names = sorted({field.alias or key for key, field in fields} - {*without})
        return Fault(key, shown, "is not a mapping", f"write one, with keys of: {', '.join(names)}")
    if kind.startswith("dict"):
        return Fault(key, shown, "is not a mapping", f"write {key}.NAME=VALUE")
    if kind.startswith("string") and isinstance(given, list | dict):
        return Fault(key, shown, "is not one text", "give one alone")
    if kind == "string_too_short":
        return Fault(key, "''", "is empty", "give a text")
    if kind == "string_pattern_mismatch":
        return Fault(key, shown, *_FORMS[context["pattern"]])
    rule, remedy = next(
        (rule_and_remedy for start, rule_and_remedy in _TYPES.items() if kind.startswith(start)),
        (f"is not valid ({problem['msg'].lower()})", "see conf/ for an example"),
    )
    return Fault(key, shown, rule, remedy)


_BOUNDS = {
    "ge": ("is below", "use {} or more"),
    "gt": ("is not above", "use more than {}"),
    "le": ("is above", "use {} or less"),
    "lt": ("is not below", "use less than {}"),
}
# The rule and the remedy of a text that a pattern of pydantic does not match, by the pattern.
_FORMS = {
    DURATION: ("is not a time", "use one, such as 30min"),
    HOST: ("is not the name of a host", "use one, such as user@host"),
    FOLDER: ("is not the name of a folder", "use letters, digits, -, _ and ."),
    IDENTIFIER: ("is not a name", "use letters, digits and _, a letter first"),
    PATH: ("is not the path of a class or function", "name one, as my_module.Mine"),
}
_QUOTED = "put it in quotes"
_TYPES = {
    "int": ("is not a whole number", "use one, such as 8"),
    "float": ("is not a number", "use one, such as 0.001"),
    "finite": ("is not finite", "use a number such as 0.001"),
    "bool": ("is not true or false", "use true or false"),
    "string": ("is not text", _QUOTED),
}


def _is_list(kind: object) -> bool:
    return get_origin(kind) in (list, tuple)


def _is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _list_wanted(read_as: Any, given: object) -> tuple[str, str]:
    """Return the rule and the remedy for a value that is not a list of the type `read_as`."""
    if get_args(read_as)[1:] == (Ellipsis,):
        rule = "is an empty list" if given == [] else "is not a list"
        return rule, "write one, such as [first, second]"
    return "is not a list of two numbers", "use one, such as [0.9, 0.999]"


def _read_as(kind: Any, location: Sequence[str | int], as_union: bool = False) -> Any:
    """Return the type that is read at `location` inside a value of `kind`, or None where it is not
    known. Of a union it is the first member, or the union itself with `as_union`."""
    for part in (*location, None):
        if part is None and as_union:
            return kind
        while get_origin(kind) in (Annotated, UnionType, Union):
            inner = [x for x in get_args(kind) if x is not NoneType]
            lists = filter(_is_list, inner if isinstance(part, int) else ())
            kind = next(lists, inner[0])
        if part is None:
            return kind
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            by_name = {field.alias or key: field for key, field in kind.model_fields.items()}
            kind = by_name[part].annotation if part in by_name else None
        else:
            kind = next(iter(get_args(kind)), None) if isinstance(part, int) else None
    return None


def _tagged(read_as: Any) -> dict[str, type[BaseModel]]:
    """Return the models of a tagged union by tag, or an empty dict for any other type."""
    union = get_args(read_as)[0] if get_origin(read_as) is Annotated else None
    return {kind.model_fields["kind"].default: kind for kind in get_args(union)}


def _known_keys(name: str, section: str, read_as: Any, without: Collection[str]) -> str:
    """Return the remedy for a key that a section does not have. The remedy does not name keys
    `without` effect."""
    if not (isinstance(read_as, type) and issubclass(read_as, BaseModel)):
        return f"remove {section}.{name}"
    instead = known_elsewhere(f"{section}.{name}")
    if instead is not None:
        return instead.remedy
    fields = read_as.model_fields.items()
    return nearest(name, {field.alias or key for key, field in fields} - {"kind", *without})
