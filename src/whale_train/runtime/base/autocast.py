"""Autocast: torch's own for real devices, and a counterpart for the meta device.

Tensors on the meta device stand for a GPU's, and torch has no autocast for the meta device. The
counterpart follows the rules of CUDA's autocast, read from the installed torch: it lowers some
operations to 16 bits, runs some in fp32, and widens the operands of others to the widest of their
dtypes. The rules apply at a dispatch key that nothing else uses (that of a private device): below
Python's functions and above autograd, as torch's own rules do.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.utils._pytree import tree_map

import whale_train.models.grouped_product  # noqa: F401, an operation that is lowered

# The dtype that autocast lowers operations to; in fp8 some products round their factors further
# (runtime/kernels/scaled_products.py).
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_KEY: Any = DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
# Operations with a kernel in CUDA's autocast, by its effect (torch/amp: "Op-Specific Behavior").
# An operation that has a kernel and is in none of these sets runs in fp32.
_LOWERED = frozenset((
    "_convolution", "_scaled_dot_product_flash_attention", "addbmm", "addmm", "addmv", "addr",
    "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot",
    "linear", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell",
    "scaled_dot_product_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
    "grouped_mm",  # this package's own
))  # fmt: skip
_WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put",
    "scatter_add", "tensordot", "vdot",
))  # fmt: skip
# Operations that take the dtype of their result as an argument.
_WIDE_RESULT = frozenset(("cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"))


def autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> AbstractContextManager[Any]:
    """Return `torch.autocast` with these arguments, or its counterpart for `device_type` "meta".

    dtype: the 16-bit dtype that operations are lowered to. On "meta" None means no autocast.
    cache_enabled: as torch's; without effect on "meta".
    """
    if device_type == "meta":
        return _meta_autocast(dtype if enabled else None)
    return torch.autocast(device_type, dtype, enabled, cache_enabled)


def in_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward in `precision` ("fp32", "bf16", "fp16" or "fp8") on
    `device`: a null context for fp32, else autocast to 16 bits."""
    if precision not in NARROW:
        return nullcontext()
    return autocast(device.type, NARROW[precision])


@contextmanager
def casting_once(device_type: str) -> Iterator[None]:
    """Make autocast cast every weight only once inside this context, however often autocast is
    entered.

    Otherwise autocast drops its copies of weights when a forward ends. The context does not enable
    autocast: nothing is cast outside of `autocast`.
    """
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


@contextmanager
def casting_anew() -> Iterator[None]:
    """Make autocast cast a weight at each read inside this context, and keep no copies.

    Otherwise autocast keeps its copies of all weights until the forward has ended.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that operations on `device_type` are currently lowered to, or None outside
    of autocast."""
    if device_type == "meta":
        return _now.dtype
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def as_now() -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes a context with the autocast that is active now.

    It is for work on the meta device that is repeated later (recomputation). On other devices torch
    restores its own autocast.
    """
    dtype = _now.dtype
    return nullcontext if dtype is None else lambda: _meta_autocast(dtype)


class _Now:
    """The current state of the meta device's autocast.

    dtype: the dtype that operations are lowered to; None outside of autocast.
    holders: the number of open `casting_once` contexts.
    casts: (weight, lowered copy) by the id of the weight. Copies are kept until autocast and all
        holders have ended, as torch keeps its copies until autocast ends.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.holders = 0
        self.casts: dict[int, tuple[Tensor, Tensor]] = {}

    def let_go(self) -> None:
        """Drop the lowered copies if neither autocast nor a holder is active."""
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
    """Register kernels at `_KEY` that cast as CUDA's autocast does, once in a process.

    An operation without a kernel in CUDA's autocast falls through. Return the libraries, which must
    outlive the kernels.
    """
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
    """Return whether CUDA's autocast has a kernel for the operation `name`
    ("namespace::op.overload")."""
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"))
    except RuntimeError:  # not in the dispatcher: TorchScript's alone
        return False


def _kernel(name: str, operation: Any) -> Callable[..., Any]:
    """Return a function that casts the arguments of `operation` by the rules for `name`, and then
    calls `operation`."""
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
                dtypes = [x.dtype for x in args if isinstance(x, Tensor) and _is_floating(x)]
                wide = torch.float32 in dtypes
                cast = _widened if wide else _unchanged
            else:
                cast = _widened
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _is_floating(value: Any) -> bool:
    """Return whether `value` is a tensor of a floating dtype other than fp64."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _is_narrow(value: Any) -> bool:
    """Return whether `value` is a tensor of a floating dtype of 16 bits or fewer."""
    return _is_floating(value) and value.dtype != torch.float32


def _lowered(value: Any) -> Any:
    """Return a floating tensor in autocast's dtype, and any other value unchanged.

    The copy of an fp32 leaf that requires a gradient is made once and cached.
    """
    assert _now.dtype is not None
    if not _is_floating(value) or value.dtype == _now.dtype:
        return value
    is_weight = value.is_leaf and value.requires_grad and value.dtype == torch.float32
    if not (is_weight and torch.is_autocast_cache_enabled()):
        return value.to(_now.dtype)
    if id(value) not in _now.casts:
        _now.casts[id(value)] = (value, value.to(_now.dtype))
    return _now.casts[id(value)][1]


def _widened(value: Any) -> Any:
    """Return a tensor of 16 bits in fp32, and any other value unchanged."""
    return value.float() if _is_narrow(value) else value


def _unchanged(value: Any) -> Any:
    return value
