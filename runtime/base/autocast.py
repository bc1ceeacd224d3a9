"""torch's autocast, and its like for tensors on the meta device, which stand for a GPU's.

torch has no autocast for the meta device. By the rules of CUDA's, which the installed torch says
itself: what it lowers to 16 bits, what it runs in fp32, and what it widens to the widest operand.
A dispatch key that nothing else uses (that of a private device) is where they apply, below Python's
functions and above autograd, as torch's own do.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.utils._pytree import tree_map

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KEY: Any = DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
# Of the operations that CUDA's autocast has a kernel for (torch/amp: "Op-Specific Behavior"). All
# others of these run in fp32.
_LOWERED = frozenset((
    "_convolution", "_scaled_dot_product_flash_attention", "addbmm", "addmm", "addmv", "addr",
    "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot",
    "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
    "grouped_mm",  # ours
))  # fmt: skip
_WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot",
))  # fmt: skip
# These take the dtype of their result as an argument.
_WIDE_RESULT = frozenset(("cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"))


def autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> AbstractContextManager[Any]:
    """Return `torch.autocast` of these arguments, or its like for "meta"."""
    if device_type == "meta":
        return _meta_autocast(dtype if enabled else None)
    return torch.autocast(device_type, dtype, enabled, cache_enabled)


def in_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that a forward in `precision` runs in."""
    if precision not in NARROW:
        return nullcontext()
    return autocast(device.type, NARROW[precision])


@contextmanager
def casting_once(device_type: str) -> Iterator[None]:
    """Inside it, autocast makes its copy of a weight once, however often it is entered: by itself
    it lets go of them when a forward ends. Outside of `autocast`, nothing is cast."""
    if device_type == "meta":
        _now.holders += 1
        try:
            yield
        finally:
            _now.holders -= 1
            _now.let_go()
        return
    with torch.autocast(device_type, enabled=False):
        yield


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that operations are lowered to now, or None outside of autocast."""
    if device_type == "meta":
        return _now.dtype
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def as_now() -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of now again, for work on the meta device that is done once
    more later; torch keeps its own."""
    dtype = _now.dtype
    return nullcontext if dtype is None else lambda: _meta_autocast(dtype)


class _Now:
    """The dtype that operations on the meta device are lowered to, and the weights cast so far:
    as torch, once in an autocast, or in what `holders` it is in."""

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.holders = 0
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}

    def let_go(self) -> None:
        if self.dtype is None and not self.holders:
            self.casts.clear()


_now = _Now()


@contextmanager
def _meta_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    before, _now.dtype = _now.dtype, dtype
    try:
        if dtype is None:
            with _ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
                yield
            return
        _register()
        was_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
        try:
            with torch._C._IncludeDispatchKeyGuard(_KEY):
                yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, was_excluded)
    finally:
        _now.dtype = before
        _now.let_go()


@cache
def _register() -> tuple[Any, Any]:
    """Have the key's kernels cast as CUDA's; what has none falls through. They last as long as what
    is returned."""
    library: Any = torch.library.Library
    others = library("_", "IMPL", _KEY.name)
    kernels = {space: library(space, "IMPL", _KEY.name) for space in ("aten", "whale_train")}
    others.fallback(torch.library.fallthrough_kernel)
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        full = f"{name}.{schema.overload_name}" if schema.overload_name else name
        if space not in kernels or not _has_kernel(f"{space}::{full}"):
            continue
        packet = getattr(getattr(torch.ops, space), name)
        kernels[space].impl(full, _kernel(name, getattr(packet, schema.overload_name or "default")))
    return others, kernels


def _has_kernel(name: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"))
    except RuntimeError:  # not in the dispatcher: TorchScript's alone
        return False


def _kernel(name: str, operation: Any) -> Callable[..., Any]:
    named = [argument.name for argument in operation._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)):
            if name in _WIDE_RESULT:
                place = named.index("dtype")
                given = args[place] if len(args) > place else kwargs.get("dtype")
                if given is None and _is_narrow(args[0]):
                    args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
                return operation(*args, **kwargs)
            if name in _LOWERED:
                cast = _lowered
            elif name in _WIDEST:
                found = [x.dtype for x in args if isinstance(x, Tensor) and _is_floating(x)]
                wide = torch.float32 in found
                cast = _widened if wide else _unchanged
            else:
                cast = _widened
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _is_narrow(value: Any) -> bool:
    return _is_floating(value) and value.dtype != torch.float32


def _lowered(value: Any) -> Any:
    assert _now.dtype is not None
    if not _is_floating(value) or value.dtype == _now.dtype:
        return value
    if not (value.is_leaf and value.requires_grad and value.dtype == torch.float32):
        return value.to(_now.dtype)
    if id(value) not in _now.casts:
        _now.casts[id(value)] = (value, value.to(_now.dtype))
    return _now.casts[id(value)][1]


def _widened(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value


def _unchanged(value: Any) -> Any:
    return value
