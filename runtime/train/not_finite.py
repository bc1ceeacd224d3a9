"""Where in a step the first value came from that is not a number.

A step whose gradients are not finite is gone through once more, watched: every operation's result
is looked at, and the first that has a NaN or an infinity is named by its module. Minus infinity is
let pass: masks are made of it, before a softmax.
"""

import linecache
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whale_train.models.export.export import model_path
from whale_train.runtime.base.node_meta import MODULE
from whale_train.runtime.compile.compiler import uncompiled
from whale_train.runtime.engines.base import Engine

# What torch.fx calls the code that it writes of a graph, and a line of that.
_WRITTEN = "<eval_with_key>"
_LINE = re.compile(r"\s*(\w+) = ")
_IGNORED = -100  # of which torch's cross_entropy takes no account, unless told otherwise


class NotFinite(FloatingPointError):
    """What a step, from 1, came to is no number; `step` is it, where it is known."""

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


def without_targets(batches: Sequence[Mapping[str, Tensor]]) -> str:
    """Return which labels of a step, of whose samples every rank has some, are no target of a loss,
    as "labels are -100": all of a field are that number, or all of one that is called labels or
    targets are negative. '' where there are no such. A collective."""
    ends: dict[str, tuple[int, int]] = {}
    for batch in batches:
        for name, x in batch.items():
            if x.numel() and not x.is_floating_point() and not x.is_complex():
                low, high = ends.get(name, (int(x.min()), int(x.max())))
                ends[name] = min(low, int(x.min())), max(high, int(x.max()))
    found: list[dict[str, tuple[int, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, ends)
    for name in sorted({name for seen in found for name in seen}):
        lows, highs = zip(*(seen[name] for seen in found if name in seen), strict=True)
        low, high = min(lows), max(highs)
        is_label = "label" in name or "target" in name
        if (low == high == _IGNORED) or (is_label and high < 0):
            return f"{name} are {low if low == high else 'negative'}"
    return ""


def first_not_finite(engines: Sequence[Engine], step: Callable[[], object]) -> str:
    """Return what is known of the first value that is not finite in `step`, which all ranks take
    again together, '' where it has none now."""
    names = {
        id(module): model_path(name)
        for engine in engines
        for name, module in engine.module.named_modules()
    }
    with _module_stack() as stack:
        watch = _Watch(lambda: _place(stack, names))
        with watch, uncompiled():
            step()
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, watch.first)
    return next((f"{said} (rank {rank})" for rank, said in enumerate(found) if said), "")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the first operation that made a value that is not finite of values that are, and
    `where` it was."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first = ""
        self._where = where

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.first or not _computes(function) or any(map(_is_bad, tree_leaves((args, kwargs)))):
            return result
        if any(map(_is_bad, tree_leaves(result))):
            self.first = f"{function} in {self._where()}"
        return result


def _computes(operation: Any) -> bool:
    """Return whether an operation makes values: not one that gives memory nobody has written to, or
    another view of some, nor one that has them from other ranks, which name it themselves."""
    schema = operation._schema
    views = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
    return "empty" not in schema.name and not views and not schema.name.startswith("c10d")


def _is_bad(value: object) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        return False
    return bool((value.isnan() | value.isposinf()).any())


@contextmanager
def _module_stack() -> Iterator[list[nn.Module]]:
    """Keep the modules whose forward runs, the innermost last."""
    stack: list[nn.Module] = []
    hooks = (
        register_module_forward_pre_hook(lambda module, _: stack.append(module)),
        register_module_forward_hook(lambda *_: _left(stack), always_call=True),
    )
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


def _left(stack: list[nn.Module]) -> None:
    stack.pop()


def _place(stack: Sequence[nn.Module], names: Mapping[int, str]) -> str:
    """Return which module is at work: of a graph by the line of its code, else the innermost that
    has a name."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_WRITTEN):
            text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals)
            line = _LINE.match(text)
            nodes = frame.f_locals["self"].graph.nodes
            made = [node for node in nodes if line and node.name == line.group(1)]
            if made and MODULE in made[0].meta:
                return made[0].meta[MODULE] or "the model itself"
        frame = frame.f_back  # type: ignore[assignment]
    named = (names[id(module)] for module in reversed(stack) if id(module) in names)
    inner = next(named, None)
    return "the backward" if inner is None else inner or "the model itself"
