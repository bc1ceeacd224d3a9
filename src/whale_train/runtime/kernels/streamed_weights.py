"""Keep weights on the host, and copy each to the device while operations read it.

A graph fetches such a weight before the first operation that reads it, and frees the copy after the
last one. Where a backward reads the copy again, autograd saves a reference to the weight instead of
values, and the backward fetches the weight again. Each gradient is sent to the host when it is
computed, and added up there.
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
    """A view of a fetched weight that autograd saves for a backward, without values.

    parameter: the weight.
    size: the shape of the view.
    stride: the strides of the view.
    offset: the storage offset of the view, in elements.
    """

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class StreamedWeights:
    """Weights that stay on the host and are copied to `device` when an operation reads them.

    `dtypes` maps each weight to its dtype on the device. In a rehearsal, `forget` is called with
    each tensor that stands for a tensor of the host, so that it does not count as device memory.
    """

    def __init__(
        self,
        dtypes: Mapping[nn.Parameter, torch.dtype],
        device: torch.device,
        forget: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._dtypes, self._device, self._forget = dtypes, device, forget
        self._pins = device.type == "cuda"
        # The host copies of weights whose dtype on the device differs; the weights whose copy is
        # stale.
        self._narrow: dict[nn.Parameter, Tensor] = {}
        self._old: set[nn.Parameter] = set()
        # Fetched copies by storage address: an address is not reused while its storage is
        # referenced.
        self._there: dict[int, tuple[StorageWeakRef, nn.Parameter]] = {}
        for parameter, dtype in dtypes.items():
            if self._pins and parameter.dtype == dtype:
                parameter.data = parameter.data.pin_memory()

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._dtypes

    def fetch(self, parameter: nn.Parameter, given: Tensor) -> Tensor:
        """Return `parameter` on the device.

        `given` is the parameter as an argument of the graph. The gradient of the result becomes a
        gradient of `given` on the host.
        """
        fetched: Tensor = _Fetch.apply(given, self, parameter)  # type: ignore[no-untyped-call]
        self._there = {key: x for key, x in self._there.items() if not _is_gone(x[0])}
        storage = fetched.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._there[storage._cdata] = (reference, parameter)
        return fetched

    def changed(self) -> None:
        """Report that the weights have new values, which the next fetches read."""
        self._old.update(self._narrow)

    def keeping_none(self) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves no values of fetched weights."""
        return torch.autograd.graph.saved_tensors_hooks(self._kept, self._read)

    def values(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of `parameter` on the device, in its dtype on the device, without a
        gradient."""
        host_copy = self._on_host(parameter)
        if self._forget is not None:
            return torch.empty_like(host_copy)
        return host_copy.to(self._device, non_blocking=self._pins)

    def gradient(self, made: Tensor, like: Tensor) -> Tensor:
        """Return the device's gradient `made` on the host, in the dtype of `like`."""
        # The gradient is sent in the dtype it was computed in, the smaller one, and cast on the
        # host.
        if self._forget is None:
            return made.to(like.device).to(like.dtype)
        empty = torch.empty_like(like)
        self._forget(empty)
        return empty

    def _on_host(self, parameter: nn.Parameter) -> Tensor:
        """Return the current values of `parameter` on the host, in its dtype on the device."""
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
        """Return `value`, or an `_Again` where `value` is a view of a fetched weight."""
        _, parameter = self._there.get(value.untyped_storage()._cdata, (None, None))
        if parameter is None or value.dtype != self._dtypes[parameter]:
            return value
        return _Again(parameter, value.shape, value.stride(), int(value.storage_offset()))

    def _read(self, saved: Tensor | _Again) -> Tensor:
        """Return the values of the saved tensor `kept`; for an `_Again`, the weight is fetched
        again."""
        if isinstance(saved, Tensor):
            return saved
        return self.values(saved.parameter).as_strided(saved.size, saved.stride, saved.offset)


class Fetched(nn.Module):
    """A module that a graph calls to get `parameter` of `weights` on the device."""

    def __init__(self, weights: StreamedWeights, parameter: nn.Parameter) -> None:
        super().__init__()
        # The parameter is not registered: another module owns it.
        self._fetch = partial(weights.fetch, parameter)

    def forward(self, given: Tensor) -> Tensor:
        """Return the parameter on the device.

        `given` is the parameter, or a view of it where DeepSpeed's hooks surround the calling
        module.
        """
        return self._fetch(given)


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


class _Fetch(torch.autograd.Function):
    """Copies a weight to the device in the forward, and its gradient back to the host in the
    backward."""

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
