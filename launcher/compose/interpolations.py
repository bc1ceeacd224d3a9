"""How much the interpolations of a config stand for, counted before any is resolved.

OmegaConf resolves each anew wherever it is named, so that `a: ${b}${b}`, `b: ${c}${c}` and so on
double at every step.
"""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from whale_train.bounds import MOST_VALUES
from whale_train.errors import Fault, shortened

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_PARTS = re.compile(r"[^.\[\]]+")
_CHARACTERS = 100  # of a text that count as a value


def interpolation_faults(config: DictConfig) -> list[Fault]:
    """Return a fault for every key whose interpolations stand for more values than are read."""
    plain = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    weights = _Weights(plain)
    faults: list[Fault] = []
    for path, text in list(_interpolations(plain, ())):
        values = weights.of(text, path)
        if values > MOST_VALUES:
            rule = f"stands for {values:,} values, and at most {MOST_VALUES:,} are read"
            remedy = "write less, or what it stands for"
            faults.append(Fault(".".join(path), shortened(text), rule, remedy))
    return faults[:1]  # the others name it, or are named by it


def _interpolations(value: Any, path: tuple[str, ...]) -> Any:
    """Yield (path, text) of every text with an interpolation."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _interpolations(item, (*path, str(key)))
    elif isinstance(value, str) and "${" in value:
        yield path, value


class _Weights:
    """The values that parts of a config stand for; of a part that names itself, nothing."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self.known: dict[tuple[str, ...], int] = {}

    def of(self, value: Any, path: tuple[str, ...]) -> int:
        """Return the values that `value`, which is at `path`, stands for."""
        if path not in self.known:
            self.known[path] = 0
            self.known[path] = self._counted(value, path)
        return self.known[path]

    def _counted(self, value: Any, path: tuple[str, ...]) -> int:
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
        """Return what a reference stands for, or the arguments of a resolver that are some."""
        _, _, arguments = text.partition(":")
        if ":" in text:
            return sum(self._named(argument, path) for argument in arguments.split(",")) or 1
        words = text.strip().strip("'\"")
        dots = len(words) - len(words.lstrip("."))
        parts = (*(path[:-dots] if dots else ()), *_PARTS.findall(words))
        there = self.plain
        for part in parts:
            if isinstance(there, dict):
                there = next((item for key, item in there.items() if str(key) == part), None)
            elif isinstance(there, list) and part.isdigit() and int(part) < len(there):
                there = there[int(part)]
            else:
                there = None
        return 0 if there is None or not parts else self.of(there, parts)
