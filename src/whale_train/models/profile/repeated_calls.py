"""Compare the operations and numbers of repeated calls of a forward.

A graph records one call. torch.export freezes the value of a counter that the forward keeps in
Python, a number that it draws with Python's `random`, or the length of a growing list. The graph
would use that value for ever.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RecordedCall = tuple[str, tuple[Any, ...]]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records operations, with their numbers and the shapes of tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        self.calls.append((str(func), tuple(_plain(tree_leaves((args, kwargs))))))
        return func(*args, **kwargs)


class _Constants(TorchFunctionMode):
    """Function mode that records the Python values from which the forward makes tensors.

    On the meta device nothing else shows these values.
    """

    def __init__(self, calls: list[RecordedCall]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and args:
            self._calls.append((func.__name__, (repr(args[0]),)))
        return func(*args, **kwargs)


def _plain(leaves: list[Any]) -> Iterator[Any]:
    """Yield the numbers, strings and dtypes of `leaves`, and the shapes of tensors.

    For a plain CPU tensor, the sum of its elements follows.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield tuple(leaf.shape)
            if type(leaf) is Tensor and leaf.device.type == "cpu" and leaf.numel():
                yield float(leaf.double().sum())  # a constant from outside of torch
        elif isinstance(leaf, int | float | bool | str | SymInt | torch.dtype):
            yield leaf


def record_calls(run: Callable[[], object]) -> list[RecordedCall] | None:
    """Return the operations of one call of `run`, without gradients, or None where it raises."""
    recorder = _Recorder()
    try:
        with torch.no_grad(), recorder, _Constants(recorder.calls):
            run()
    except Exception:  # a user's forward may raise anything where it cannot read values
        return None
    return recorder.calls


def first_difference(before: list[RecordedCall] | None, after: list[RecordedCall] | None) -> str:
    """Return a description of the first difference between two calls.

    It is '' where they do not differ, and where one of them was not recorded.
    """
    if before is None or after is None:
        return ""
    for (name, was), (other, numbers) in zip(before, after, strict=False):
        if name != other:
            return f"it calls {_short(name)} at first, and {_short(other)} when called again"
        if was != numbers:
            pairs = ((a, b) for a, b in zip(was, numbers, strict=False) if a != b)
            one, two = next(pairs, (was, numbers))
            return f"it gives {_short(name)} {one} at first, and {two} when called again"
    if len(before) != len(after):
        return f"it runs {len(before)} operations at first, and {len(after)} when called again"
    return ""


def _short(name: str) -> str:
    return name.removeprefix("aten.").partition(".")[0]
