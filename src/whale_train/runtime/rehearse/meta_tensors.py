"""Watch a rank's operations on tensors of the meta device, which stands for a GPU.

Tensors have no storage, so an operation costs only its dispatch. Where a GPU would refuse an
operation or wait for the host, an error reports the place: a tensor on the host among the operands,
or a value read on the host. Memory is counted as it would be allocated.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Operations with a result that depends on values, which the host would have to read from a GPU.
_READ = frozenset((
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim",
    "_unique", "_unique2", "unique_consecutive", "repeat_interleave.Tensor", "bincount",
))  # fmt: skip
_COPIES = (_aten._to_copy.default, _aten.copy_.default)


class HostRead(RuntimeError):
    """A value of the device was read on the host."""


class OnTheHost(RuntimeError):
    """An operation had operands on the device and on the host."""


class MetaTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs operations on meta tensors.

    Of equal calls only the first runs, unless they return views or change a tensor in place. `live`
    and `peak` are the bytes of all tensors made inside the mode and of those passed to `hold`. At a
    new peak, `at_peak` is called. `reads` counts the values that the model's own code reads on the
    host, by the place of the read; such a read returns True or 1.
    """

    def __init__(self, at_peak: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.num_operations = 0
        self.reads: Counter[str] = Counter()
        self._at_peak = at_peak
        self._seen_peak = 0
        self._known: dict[Any, Any] = {}
        self._storages: dict[int, Any] = {}
        self._forgotten: dict[int, Any] = {}

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor that was made outside the mode."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages or key in self._forgotten or tensor.device.type != "meta":
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self._add(size)

    def restart(self) -> None:
        """Set the peak to the live memory."""
        self.peak = self._seen_peak = self.live

    def counts(self, tensor: Tensor) -> bool:
        """Return True if the memory of `tensor` is counted."""
        return tensor.untyped_storage()._cdata in self._storages

    def forget(self, tensor: Tensor) -> None:
        """Stop counting the memory of `tensor`, which stands for a tensor outside the device."""
        storage = tensor.untyped_storage()
        self._forgotten[storage._cdata] = storage  # kept, so that its address is not reused
        if self._storages.pop(storage._cdata, None) is not None:
            self.live -= storage.nbytes()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.num_operations += 1
        tensors = list(_tensors_in(args))
        tensors += _tensors_in(kwargs.values()) if kwargs else ()
        on_device = any(x.device.type == "meta" for x in tensors)
        if on_device and function is _aten._local_scalar_dense.default:
            reader = _place()
            if not reader.is_ours:
                self.reads[str(reader)] += 1
                return _READ_AS.get(tensors[0].dtype, 1.0)
        self._refuse(function, tensors, on_device, kwargs)
        result = self._made(function, args, kwargs)
        if on_device or not tensors:
            for tensor in _tensors_in((result,)):
                self.hold(tensor)
        return result

    def _refuse(
        self, function: Any, tensors: Sequence[Tensor], on_device: bool, kwargs: Mapping[str, Any]
    ) -> None:
        """Raise HostRead or OnTheHost where a GPU could not run `function` without the host."""
        if not on_device:
            return
        name = function._schema.name.removeprefix("aten::")
        overload = f"{name}.{function._overloadname}"
        to_host = function is _aten._to_copy.default and kwargs.get("device") is not None
        to_host = to_host and torch.device(kwargs["device"]).type == "cpu"
        to_host = to_host or (function is _aten.copy_.default and tensors[0].device.type == "cpu")
        if to_host or name in _READ or overload in _READ:
            raise HostRead(f"{function} reads a value of the device on the host")
        strays = [x for x in tensors if x.device.type != "meta" and x.dim()]
        if strays and function not in _COPIES:
            stray = f"{list(strays[0].shape)} on {strays[0].device}"
            raise OnTheHost(f"{function} has a tensor {stray} beside others on the device")

    def _made(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call; for a repeated call, tensors like those of the first
        call."""
        if function.is_view or function._schema.is_mutable or not function._schema.returns:
            return self._run(function, args, kwargs)
        key = _key(function, args, kwargs)
        if key is None:
            return self._run(function, args, kwargs)
        known = self._known.get(key)
        if known is None:
            result = self._run(function, args, kwargs)
            if all(x.device.type == "meta" for x in _tensors_in((result,))):
                with suppress(TypeError):
                    self._known[key] = _described(result)
            return result
        return _like(known)

    def _run(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call, by a stand-in where torch has no meta kernel."""
        stand_in = _STAND_INS.get(function)
        return stand_in(*args) if stand_in is not None else function(*args, **kwargs)

    def _add(self, size: int) -> None:
        """Count `size` more bytes, and call `at_peak` at a new peak."""
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
            # `at_peak` would otherwise be called at each of a thousand small steps of the peak.
            if self.peak > self._seen_peak * 1.002:
                self._seen_peak = self.peak
                self._at_peak()

    def _gone(self, key: int, size: int) -> None:
        """Stop counting the storage `key` of `size` bytes, which was freed."""
        if self._storages.pop(key, None) is not None:
            self.live -= size


_READ_AS: dict[torch.dtype, object] = {
    torch.bool: True,
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), 1),
}


class _Place(NamedTuple):
    """A line of code that called an operation.

    file: the path of the file.
    line: the line number.
    function: the name of the function.
    is_ours: True for code of `whale_train.runtime`.
    """

    file: str
    line: int
    function: str
    is_ours: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def _place() -> _Place:
    """Return the innermost line on the stack that is neither torch's nor this module's."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        watches = module == __name__ or frame.f_code.co_name == "__torch_function__"
        if not watches and module.partition(".")[0] != "torch":
            break
        frame = frame.f_back
    code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
    is_ours = module.startswith("whale_train.runtime")
    return _Place(code.co_filename, frame.f_lineno, code.co_name, is_ours)


def _nothing(*_: Any) -> None:
    """Stand in for an update in place; shapes do not change."""


def _two_of_channels(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Stand in for two statistics, fp32 [channels], of `x` [batch, channels, ..]."""
    return x.new_empty(x.shape[1], dtype=torch.float32), x.new_empty(
        x.shape[1], dtype=torch.float32
    )


# Operations that have no kernel for meta tensors (torch 2.13).
_STAND_INS: dict[Any, Callable[..., Any]] = {
    **{
        getattr(getattr(_aten, name), overload): _nothing
        for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_")
        for overload in ("default", "tensor_lr")
    },
    _aten.batch_norm_update_stats.default: _two_of_channels,
    _aten.batch_norm_stats.default: _two_of_channels,
}


def _tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among `values`, lists and tuples included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _key(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a key that is equal for calls with like results, or None where a call has no key."""
    try:
        return function, _described(args), _described(tuple(kwargs.items()))
    except TypeError:
        return None


class _Tensor(tuple):  # type: ignore[type-arg]
    """The sizes, strides and dtype of a tensor, and its device where that is not meta."""


def _described(value: Any) -> Any:
    """Return a hashable description of `value`. Raises TypeError for an unknown type."""
    if isinstance(value, Tensor):
        place = None if value.device.type == "meta" else value.device
        return _Tensor((value.size(), value.stride(), value.dtype, place))
    if isinstance(value, list | tuple):
        return tuple(_described(x) for x in value)
    if value is None or isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal
    raise TypeError(type(value))


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _like(known: Any) -> Any:
    """Return a value with the description `known`, a result of `_described`."""
    if isinstance(known, _Tensor):
        size, stride, dtype, place = known
        return torch.empty_strided(size, stride, dtype=dtype, device=place or "meta")
    if isinstance(known[0], type):
        return known[1]
    return tuple(_like(x) for x in known)
