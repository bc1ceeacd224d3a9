"""Convert Python values to overrides in Hydra's grammar.

`train={"steps": 5}` becomes `train.steps=5`, and `strategy="zero3"` becomes `strategy=zero3`.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from whale_train.errors import ConfigError, Fault, shortened

# Texts that the grammar of overrides reads unquoted as the same text.
_WORD = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)


def overrides_of(asked: Sequence[str | Mapping[str, Any]], nested: Mapping[str, Any]) -> list[str]:
    """Return the overrides that are equivalent to a function's arguments, in the same order.

    asked: overrides as text, and mappings of keys to values.
    nested: further values by key, which come last.

    A mapping under a top-level key becomes one override for each of its keys; a deeper mapping
    becomes a value. Raises ConfigError for a value that overrides cannot express, and TypeError for
    an argument of another type.
    """
    overrides: list[str] = []
    faults: list[Fault] = []
    for item in (*asked, nested):
        if isinstance(item, str):
            overrides.append(item)
        elif isinstance(item, Mapping):
            overrides += [
                f"{key}={text}"
                for key, value in _keys_of(item)
                if (text := _text(key, value, faults)) is not None
            ]
        else:
            raise TypeError(f"{item!r} is no override, no mapping of them and no Request")
    if faults:
        raise ConfigError(faults)
    return overrides


def _keys_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each config key that `values` sets, with the plain value."""
    for key, value in values.items():
        plain = _plain(value)
        if isinstance(plain, Mapping) and "." not in key:
            yield from ((f"{key}.{inner}", item) for inner, item in plain.items())
        else:
            yield key, plain


def _plain(value: Any) -> Any:
    """Return a value with OmegaConf's containers converted to Python's."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value)
    return value


def _text(key: str, value: Any, faults: list[Fault]) -> str | None:
    """Return the text of a value in the grammar of overrides, or None after adding a fault.

    key: the path of the value, for messages.
    """
    value = _plain(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str | bytes) and hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item() if not getattr(value, "shape", ()) else value  # a NumPy scalar
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int():
            return str(int(value))
        case float():
            return repr(float(value)) if math.isfinite(value) else str(float(value))
        case str():
            if _WORD.fullmatch(value):
                return value
            return QuotedString(value, Quote.single).with_quotes()
        case list() | tuple():
            texts = [_text(f"{key}[{i}]", item, faults) for i, item in enumerate(value)]
            return "[" + ",".join(map(str, texts)) + "]"
        case Mapping():
            pairs = [(name, _text(f"{key}.{name}", x, faults)) for name, x in value.items()]
            return "{" + ",".join(f"{_name(str(name))}: {text}" for name, text in pairs) + "}"
    rule = f"is a {type(value).__name__}, and no plain value"
    remedy = "use text, a number, true, false, null, or lists and mappings of them"
    faults.append(Fault(key, shortened(repr(value)), rule, remedy))
    return None


def _name(key: str) -> str:
    """Return the key of a mapping in the grammar of overrides, escaped since keys are unquoted."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", key)
