"""Write values of Python as the overrides of a command line, which Hydra reads.

`train={"steps": 5}` is the override `train.steps=5`, and `strategy="zero3"` is `strategy=zero3`.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from whale_train.errors import ConfigError, Fault, shortened

# Texts that the grammar of overrides reads as they are, and as text.
_WORD = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE)


def overrides_of(asked: Sequence[str | Mapping[str, Any]], nested: Mapping[str, Any]) -> list[str]:
    """Return the overrides that stand for the arguments of a function, in their order.

    asked: overrides as text, and mappings of keys to values.
    nested: values by key, after those.

    The values of a mapping under a key of the top level are set one by one; deeper mappings are
    values. Raises ConfigError for a value that no override can have, and TypeError for an argument
    of another type.
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
    """Yield the keys of the config that `values` set, and the value of each."""
    for key, value in values.items():
        plain = _plain(value)
        if isinstance(plain, Mapping) and "." not in key:
            yield from ((f"{key}.{inner}", item) for inner, item in plain.items())
        else:
            yield key, plain


def _plain(value: Any) -> Any:
    """Return a value without the types of OmegaConf."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value)
    return value


def _text(key: str, value: Any, faults: list[Fault]) -> str | None:
    """Return a value in the grammar of overrides, or None after adding a fault."""
    value = _plain(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str | bytes) and hasattr(value, "item") and hasattr(value, "dtype"):
        value = value.item() if not getattr(value, "shape", ()) else value  # a number of NumPy's
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
    """Return the key of a mapping in the grammar of overrides, where keys have no quotes."""
    return re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", key)
