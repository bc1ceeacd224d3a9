"""Bound the size of a config's resolved interpolations, before any is resolved.

OmegaConf resolves an interpolation again at each place that names it, so that a chain such as
`a: ${b}${b}`, `b: ${c}${c}` doubles in size with every link.
"""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from whale_train.bounds import MOST_VALUES
from whale_train.errors import Fault, shortened

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_PARTS = re.compile(r"[^.\[\]]+")
_CHARACTERS = 100  # this many characters of a text count as one more value


def interpolation_faults(config: DictConfig) -> list[Fault]:
    """Return a fault where a key's interpolations resolve to more than MOST_VALUES values. Only the
    first such key gets a fault, since the other ones name it or are named by it."""
    plain = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    weights = _Weights(plain)
    faults: list[Fault] = []
    for path, text in list(_interpolations(plain, ())):
        values = weights.of(text, path)
        if values > MOST_VALUES:
            rule = f"stands for {values:,} values, and at most {MOST_VALUES:,} are read"
            remedy = "write less, or what it stands for"
            faults.append(Fault(".".join(path), shortened(text), rule, remedy))
    return faults[:1]  # other keys name the first, or are named by it


def _interpolations(value: Any, path: tuple[str, ...]) -> Any:
    """Yield the path and the text of every text with an interpolation below `value`.

    path: the path of `value`.
    """
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _interpolations(item, (*path, str(key)))
    elif isinstance(value, str) and "${" in value:
        yield path, value


class _Weights:
    """The number of values that each part of a config resolves to, computed once for each part. A
    reference of a part to itself counts as 0."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.known: dict[tuple[str, ...], int] = {}

    def of(self, value: Any, path: tuple[str, ...]) -> int:
        """Return the number of values that `value`, at `path`, resolves to."""
        if path not in self.known:
            self.known[path] = 0
            self.known[path] = self._counted(value, path)
        return self.known[path]

    def _counted(self, value: Any, path: tuple[str, ...]) -> int:
        """Count the values that `value`, at `path`, resolves to."""
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return 1 + sum(self.of(item, (*path, str(key))) for key, item in items)
        total = 1
        if isinstance(value, str):
            total += len(value) // _CHARACTERS
            while named := _INNERMOST.findall(value):
                total += sum(self._named(text, path) for text in named)
                value = _INNERMOST.sub("", value)
        return total

    def _named(self, text: str, path: tuple[str, ...]) -> int:
        """Return the number of values that the interpolation `text` resolves to. A call of a
        resolver counts as the sum of its arguments, at least 1."""
        _, _, arguments = text.partition(":")
        if ":" in text:
            return sum(self._named(argument, path) for argument in arguments.split(",")) or 1
        words = text.strip().strip("'\"")
        dots = len(words) - len(words.lstrip("."))
        parts = (*(path[:-dots] if dots else ()), *_PARTS.findall(words))
        node = self.plain
        for part in parts:
            if isinstance(node, dict):
                node = next((item for key, item in node.items() if str(key) == part), None)
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                node = None
        return 0 if node is None or not parts else self.of(node, parts)
