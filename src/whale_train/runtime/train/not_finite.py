"""Find the first value of a step that is not finite.

A step whose gradients are not finite runs once more under a watch that checks every operation's
result. The first result that has a NaN or an infinity is reported with its module. Minus infinity
is allowed: masks before a softmax consist of it.
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

# File name of the code that torch.fx generates for a graph, and a line of such code.
_WRITTEN = "<eval_with_key>"
_LINE = re.compile(r"\s*(\w+) = ")
_IGNORED = -100  # the default ignore_index of torch's cross_entropy


class NotFinite(FloatingPointError):
    """A loss or gradient of a step is not finite.

    `step` is the step, counted from 1, or None where it is not known.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


def without_targets(batches: Sequence[Mapping[str, Tensor]]) -> str:
    """Return the labels of a step that are no target of a loss, such as "labels are -100", or ''.

    All values of such a field are -100, or the field is called labels or targets and all its values
    are negative. `batches` are this rank's micro-batches of the step. A collective of all ranks.
    """
    ends: dict[str, tuple[int, int]] = {}
    for batch in batches:
        for name, x in batch.items():
            if x.numel() and not x.is_floating_point() and not x.is_complex():
                low, high = ends.get(name, (int(x.min()), int(x.max())))
                ends[name] = min(low, int(x.min())), max(high, int(x.max()))
    ends_of_ranks: list[dict[str, tuple[int, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(ends_of_ranks, ends)
    for name in sorted({name for seen in ends_of_ranks for name in seen}):
        lows, highs = zip(*(seen[name] for seen in ends_of_ranks if name in seen), strict=True)
        low, high = min(lows), max(highs)
        is_label = "label" in name or "target" in name
        if (low == high == _IGNORED) or (is_label and high < 0):
            return f"{name} are {low if low == high else 'negative'}"
    return ""


def first_not_finite(engines: Sequence[Engine], step: Callable[[], object]) -> str:
    """Return the operation, module and rank of the first value in `step` that is not finite.

    All ranks must call it together; `step` repeats the step. The result is '' if the repeated step
    has no such value.
    """
    names = {
        id(module): model_path(name)
        for engine in engines
        for name, module in engine.module.named_modules()
    }
    with _module_stack() as stack:
        watch = _Watch(lambda: _place(stack, names))
        with watch, uncompiled():
            step()
    sightings: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(sightings, watch.first)
    return next((f"{seen} (rank {rank})" for rank, seen in enumerate(sightings) if seen), "")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes the first operation to make a non-finite value of finite ones.

    `where` returns the place of an operation; `first` names the operation and its place.
    """

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
    """Return True if an operation computes values.

    Operations that return uninitialised memory or a view do not. Operations of c10d return values
    of other ranks, which report these values themselves.
    """
    schema = operation._schema
    views = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
    return "empty" not in schema.name and not views and not schema.name.startswith("c10d")


def _is_bad(value: object) -> bool:
    """Return True for a floating-point tensor with a NaN or plus infinity."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        return False
    return bool((value.isnan() | value.isposinf()).any())


@contextmanager
def _module_stack() -> Iterator[list[nn.Module]]:
    """Yield a list of the modules whose forward is running, the innermost last."""
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
    """Return the path of the module that is running.

    In a graph the running line of generated code determines the module; otherwise it is the
    innermost named module.
    """
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_WRITTEN):
            text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals)
            line = _LINE.match(text)
            nodes = frame.f_locals["self"].graph.nodes
            matches = [node for node in nodes if line and node.name == line.group(1)]
            if matches and MODULE in matches[0].meta:
                return matches[0].meta[MODULE] or "the model itself"
        frame = frame.f_back  # type: ignore[assignment]
    named = (names[id(module)] for module in reversed(stack) if id(module) in names)
    inner = next(named, None)
    return "the backward" if inner is None else inner or "the model itself"
