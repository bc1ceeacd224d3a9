"""Check by trial that an autograd Function's backward is the derivative of its forward.

That holds for many Functions, whose purpose is to save memory or time. torch.export keeps only the
forward of such a Function, which has the same gradients. Straight-through estimators, clipped
gradients and reversed gradients are not derivatives of their forward.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function

# Values near 0, of usual size, and where functions saturate.
_SCALES = (0.01, 1.0, 100.0)
_RELATIVE_ERROR = 1e-5  # constants in such code are often written in eight digits
_MOST_ELEMENTS = 2**20  # elements of all arguments of a call; larger arguments are narrowed
_NARROWED = 16  # the largest extent that is not narrowed


def is_derived(function: type[Function], run: Callable[[], Any]) -> bool:
    """Return whether the backward of `function` gives the gradients of its forward.

    Both are compared on random values, shaped as in the calls of `function` that `run` makes. A
    Function that fails on random values counts as not derived.
    """
    takes_context = function.setup_context is Function.setup_context
    calls: list[tuple[Any, ...]] = []
    forward = function.forward

    def recording(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[1:] if takes_context else args)
        return forward(*args, **kwargs)

    try:
        with patch.object(function, "forward", staticmethod(recording)):
            run()
        distinct = {_described(args): args for args in calls}
        return bool(distinct) and all(
            _agrees(function, args, scale) for args in distinct.values() for scale in _SCALES
        )
    except Exception:  # a Function may raise anything on values that are not the model's
        return False


def _described(args: Sequence[Any]) -> str:
    return repr([(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in args])


def _agrees(function: type[Function], args: Sequence[Any], scale: float) -> bool:
    """Return whether the backward of `function` and autograd give equal gradients.

    The arguments are random, with the shapes of `args` and standard deviation `scale`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        leaves = _drawn(args, scale)
        first = [x.clone() if isinstance(x, Tensor) else x for x in leaves]  # it may write to them
        second = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        state = torch.get_rng_state()
        apply: Callable[..., Any] = function.apply
        own = _tensors(apply(*first))
        torch.set_rng_state(state)
        with torch.enable_grad():
            plain = _tensors(_forward(function, second))
        trained = [i for i, x in enumerate(own) if x.requires_grad]
        seeds = [torch.randn_like(own[i]) for i in trained]
        wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        own_gradients = _gradients([own[i] for i in trained], seeds, wanted)
        derived = _gradients([plain[i] for i in trained], seeds, wanted)
    return all(map(_close, own_gradients, derived))


def _drawn(args: Sequence[Any], scale: float) -> list[Any]:
    """Return random arguments in place of `args`.

    Floats are fp64 with standard deviation `scale`, integers are 0 or 1, and other values than
    tensors stay. Where tensors have more than `_MOST_ELEMENTS` elements together, their large
    extents are narrowed.
    """
    total = sum(x.numel() for x in args if isinstance(x, Tensor))
    narrow = _narrower(args) if total > _MOST_ELEMENTS else {}

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = [narrow.get(extent, extent) for extent in value.shape]
        if not value.is_floating_point():
            return torch.randint(0, 2, shape).to(value.dtype)
        floats = torch.randn(shape, dtype=torch.float64) * scale
        return floats.requires_grad_(value.requires_grad)

    return [drawn(value) for value in args]


def _narrower(args: Sequence[Any]) -> dict[int, int]:
    """Return a small extent for each large extent in `args`. Different extents stay different."""
    extents = sorted({e for x in args if isinstance(x, Tensor) for e in x.shape if e > _NARROWED})
    return {extent: _NARROWED + i for i, extent in enumerate(extents)}


def _forward(function: type[Function], args: Sequence[Any]) -> Any:
    """Return the result of the forward of `function` alone, which autograd differentiates."""
    if function.setup_context is Function.setup_context:
        return function.forward(_Context(len(args)), *args)
    return function.forward(*args)


class _Context:
    """Stand-in for the context that autograd passes to a forward. Nothing reads from it here."""

    def __init__(self, num_args: int) -> None:
        self.needs_input_grad = (True,) * num_args

    def _ignored(self, *args: Any) -> None: ...

    save_for_backward = save_for_forward = mark_dirty = _ignored
    mark_non_differentiable = set_materialize_grads = _ignored


def _tensors(output: Any) -> list[Tensor]:
    outputs = output if isinstance(output, tuple) else (output,)
    return [x for x in outputs if isinstance(x, Tensor)]


def _gradients(outputs: list[Tensor], seeds: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """Return the gradients of `outputs` for the tensors `wanted`, with `seeds` as the outputs'
    gradients."""
    reached = [(x, seed) for x, seed in zip(outputs, seeds, strict=True) if x.requires_grad]
    if not reached:
        return [torch.zeros_like(x) for x in wanted]
    values, given = zip(*reached, strict=True)
    return list(torch.autograd.grad(values, wanted, given, materialize_grads=True))


def _close(own: Tensor, derived: Tensor) -> bool:
    """Return whether two gradients are equal up to `_RELATIVE_ERROR` of the largest element."""
    largest = float(derived.nan_to_num().abs().max()) if derived.numel() else 0.0
    return torch.allclose(own, derived, rtol=0.0, atol=_RELATIVE_ERROR * largest, equal_nan=True)
