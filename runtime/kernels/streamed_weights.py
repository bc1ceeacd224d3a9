"""Weights that stay on the host, and are on the device while something reads them.

A graph fetches such a weight before the first operation that reads it, and lets go of it after the
last. Of what a backward reads again, autograd keeps which weight it was and no values: they are
fetched once more. Gradients leave for the host as they are made, and are added up there.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class _Again:
    """Values of `parameter` as autograd wanted to keep them: a view of what was fetched."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class StreamedWeights:
    """The `dtypes` of weights on the host, by weight: what they are of on `device`, which gets them
    when they are read. In a rehearsal, `forget` is told of what stands for the host's tensors."""

    def __init__(
        self,
        dtypes: Mapping[nn.Parameter, torch.dtype],
        device: torch.device,
        forget: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._dtypes, self._device, self._forget = dtypes, device, forget
        self._pins = device.type == "cuda"
        # In fewer bits, where they are of fewer on the device; and those that are of other values.
        self._narrow: dict[nn.Parameter, Tensor] = {}
        self._old: set[nn.Parameter] = set()
        # By storage, which is not another's address while something refers to it.
        self._there: dict[int, tuple[StorageWeakRef, nn.Parameter]] = {}
        for parameter, dtype in dtypes.items():
            if self._pins and parameter.dtype == dtype:
                parameter.data = parameter.data.pin_memory()

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._dtypes

    def fetch(self, parameter: nn.Parameter, given: Tensor) -> Tensor:
        """Return `parameter` on the device. Its gradient there becomes one on the host, that of
        `given`, which is the parameter as a graph is given it."""
        fetched: Tensor = _Fetch.apply(given, self, parameter)  # type: ignore[no-untyped-call]
        self._there = {key: x for key, x in self._there.items() if not _is_gone(x[0])}
        storage = fetched.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._there[storage._cdata] = (reference, parameter)
        return fetched

    def changed(self) -> None:
        """Have what is read next be the values that weights have now."""
        self._old.update(self._narrow)

    def keeping_none(self) -> AbstractContextManager[Any]:
        """Inside it, autograd keeps no values of what is fetched."""
        return torch.autograd.graph.saved_tensors_hooks(self._kept, self._read)

    def values(self, parameter: nn.Parameter) -> Tensor:
        """Return what is on the device of `parameter` while it is read, without its gradient."""
        found = self._on_host(parameter)
        if self._forget is not None:
            return torch.empty_like(found)
        return found.to(self._device, non_blocking=self._pins)

    def gradient(self, made: Tensor, like: Tensor) -> Tensor:
        """Return a gradient that was made on the device on the host, of the dtype of `like`."""
        # In two steps: the cast is the host's, and what is sent is as small as it was made.
        if self._forget is None:
            return made.to(like.device).to(like.dtype)
        found = torch.empty_like(like)
        self._forget(found)
        return found

    def _on_host(self, parameter: nn.Parameter) -> Tensor:
        dtype, values = self._dtypes[parameter], parameter.detach()
        if dtype == parameter.dtype:
            return values
        held = self._narrow.get(parameter)
        if held is None:
            held = torch.empty_like(values, dtype=dtype, pin_memory=self._pins)
            if self._forget is not None:
                self._forget(held)
            self._narrow[parameter] = held
            self._old.add(parameter)
        if parameter in self._old:
            held.copy_(values)
            self._old.remove(parameter)
        return held.detach()

    def _kept(self, value: Tensor) -> Tensor | _Again:
        _, parameter = self._there.get(value.untyped_storage()._cdata, (None, None))
        if parameter is None or value.dtype != self._dtypes[parameter]:
            return value
        return _Again(parameter, value.shape, value.stride(), int(value.storage_offset()))

    def _read(self, kept: Tensor | _Again) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return self.values(kept.parameter).as_strided(kept.size, kept.stride, kept.offset)


class Fetched(nn.Module):
    """What a graph calls to have `parameter` of the `weights`. What it is given is a view where
    DeepSpeed's hooks are around the module that it is in."""

    def __init__(self, weights: StreamedWeights, parameter: nn.Parameter) -> None:
        super().__init__()
        # Not registered: it is another module's.
        self._fetch = partial(weights.fetch, parameter)

    def forward(self, given: Tensor) -> Tensor:
        return self._fetch(given)


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weights: StreamedWeights, parameter: nn.Parameter
    ) -> Tensor:
        ctx.weights, ctx.parameter = weights, parameter
        return weights.values(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return ctx.weights.gradient(grad, ctx.parameter), None, None
