"""Bound the size of files and requests that others have written.

YAML aliases (`*anchor`) repeat parts of a file, so that a few lines can stand for more values than
any memory holds, or for a value inside itself. The values are counted before any of them is
constructed. The error names the bound that is exceeded.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from whale_train.errors import ConfigError, Fault

MOST_BYTES = 4_000_000  # the largest file of YAML
MOST_VALUES = 50_000  # the most keys, items and mappings that YAML stands for
MOST_LEVELS = 40  # the most mappings and lists inside each other
MOST_DIGITS = 300  # the longest whole number: a float has no more digits before its point

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_DIGITS = re.compile(r"\d(?:_?\d)*")


def levels_of(text: str) -> int:
    """Return the deepest nesting of brackets in an override or in JSON. Brackets in quotes are
    text."""
    depth = most = 0
    for character in _QUOTED.sub("", text):
        if character in "{[(":
            depth += 1
            most = max(most, depth)
        elif character in "}])":
            depth -= 1
    return most


def digits_of(text: str) -> int:
    """Return the number of digits of the longest whole number in an override. Digits in quotes are
    text."""
    runs = _DIGITS.findall(_QUOTED.sub("", text))
    return max((len(run.replace("_", "")) for run in runs), default=0)


def too_large(text: str) -> tuple[str, str] | None:
    """Return the rule and the remedy of a bound that an override exceeds, or None where it is
    within all bounds."""
    levels = levels_of(text)
    if levels > MOST_LEVELS:
        rule = f"has {levels} levels of brackets, and at most {MOST_LEVELS} are read"
        return rule, "write it with fewer inside each other"
    digits = digits_of(text)
    if digits > MOST_DIGITS:
        rule = f"has a number of {digits} digits, and at most {MOST_DIGITS} are read"
        return rule, "use a smaller number"
    return None


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file in UTF-8.

    Raises ConfigError where the path is no file, or the file is larger than `most_bytes` or not
    text.
    """
    try:
        if path.exists() and not path.is_file():
            raise _refusal(path, "is no file", "name a file")
        size = path.stat().st_size
        if size > most_bytes:
            rule = f"has {size:,} bytes, and at most {most_bytes:,} are read"
            raise _refusal(path, rule, "use a smaller file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: for a path with NUL, too
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise _refusal(path, f"cannot be read ({reason})", "correct or remove it") from None


def check_yaml(path: Path) -> str:
    """Return the text of a YAML file that is within the bounds.

    Raises ConfigError where the file cannot be read or exceeds a bound, and yaml.YAMLError where it
    is not YAML.
    """
    text = read_file(path)
    try:
        values = _count(text)
    except _Passed as passed:
        raise _refusal(path, *passed.args) from None
    if values > MOST_VALUES:
        shown = f"{values:,}" if values < 10**12 else f"more than {10**12:,}"
        rule = f"stands for {shown} values, and at most {MOST_VALUES:,} are read"
        raise _refusal(path, rule, "write less, or say once what is alike (as count: 8)")
    return text


def load_yaml(path: Path) -> Any:
    """Return the parsed content of a YAML file. Raises ConfigError where the file is not YAML or
    exceeds a bound."""
    try:
        return yaml.safe_load(check_yaml(path))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise _refusal(path, f"is not YAML ({said})", "correct or remove it") from None


def load_json(path: Path, most_bytes: int) -> Any:
    """Return the parsed content of a JSON file. Raises ConfigError where the file is not JSON, has
    more than `most_bytes` bytes or is nested too deeply."""
    text = read_file(path, most_bytes)
    if levels_of(text) > MOST_LEVELS:
        rule = f"has more than {MOST_LEVELS} levels of lists and mappings"
        raise _refusal(path, rule, "write it with fewer inside each other")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        said = "too many levels" if isinstance(error, RecursionError) else str(error)
        raise _refusal(path, f"is not JSON ({said})", "correct or remove it") from None


class _Passed(Exception):
    """A bound is exceeded. The arguments of the exception are the rule and the remedy."""


def _count(text: str) -> int:
    """Return the number of values that a YAML text expands to. An alias counts as all values of its
    anchor.

    Raises _Passed where the text has too many levels, a number with too many digits, or a value
    inside itself.
    """
    known: dict[str, tuple[int, int] | None] = {}  # values and levels of an anchor; None: open
    opened: list[list[Any]] = [["", 0, 0]]  # anchor, values and levels of each open collection

    def add(values: int, levels: int) -> None:
        if len(opened) - 1 + levels > MOST_LEVELS:
            rule = f"has more than {MOST_LEVELS} levels of lists and mappings"
            raise _Passed(rule, "write it with fewer inside each other")
        opened[-1][1] += values
        opened[-1][2] = max(opened[-1][2], levels)

    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        kind = type(event)
        if kind is yaml.AliasEvent:
            expanded = known.get(event.anchor, (0, 0))
            if expanded is None:
                rule = f"has a value that is inside itself (line {event.start_mark.line + 1})"
                raise _Passed(rule, "write what it stands for")
            add(*expanded)
        elif kind is yaml.ScalarEvent:
            if digits_of(event.value) > MOST_DIGITS and not event.style:
                rule = f"has a number of {digits_of(event.value)} digits, and at most "
                raise _Passed(f"{rule}{MOST_DIGITS} are read", "use a smaller number")
            known[event.anchor or ""] = (1, 0)
            add(1, 0)
        elif issubclass(kind, yaml.CollectionStartEvent):
            add(0, 1)
            known[event.anchor or ""] = None
            opened.append([event.anchor or "", 1, 0])
        elif issubclass(kind, yaml.CollectionEndEvent):
            anchor, values, levels = opened.pop()
            known[anchor] = (values, levels + 1)
            add(values, levels + 1)
    return int(opened[0][1])


def _refusal(path: Path, rule: str, remedy: str) -> ConfigError:
    """Return a ConfigError with one fault, whose key is the path of the file."""
    return ConfigError([Fault(str(path), "", rule, remedy)])
