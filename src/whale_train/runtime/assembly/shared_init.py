"""Build initial weights that do not depend on the plan, in one copy per host.

The host builds the whole model once, as one process would with the same seed, and moves it into
files mapped into memory. The ranks that it forks inherit the mappings. A rank that reads only its
shard touches only the shard's pages, so its own memory stays near its shard. A file loses its name
as soon as it is mapped, and its memory is freed when its last reader has released it.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from whale_train.models.build import build_model
from whale_train.models.loss_module import LossModule
from whale_train.models.options import ModelOptions
from whale_train.models.weights.deferred import deferred, fill, is_deferred
from whale_train.runtime.base.seeds import seed_python

_ALIGNMENT = 64  # bytes; enough for vectorised kernels
# A tensor of at least this many bytes has a file of its own. Ranks that read the model tensor by
# tensor, as copies and ZeRO 3 do, release such files one by one. Smaller tensors share a file.
_OWN_FILE_BYTES = 2**20


def build_shared(options: ModelOptions, seed: int) -> LossModule:
    """Build the model as `torch.manual_seed(seed)` and its constructor would, with tensors in
    mapped memory.

    Unless it is built whole, tensors may be placeholders, which are made or read from a folder when
    they are needed (`models/weights/deferred.py`).
    """
    seed_python(seed)
    if options.is_built_whole:
        torch.manual_seed(seed)
        model = build_model(options)
    else:
        at_once = options.init == "whole"
        model = deferred(lambda: build_model(options), seed, draws_at_once=at_once)
    module = LossModule(model, options)
    small: list[Tensor] = []
    for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
        if is_deferred(tensor) or not tensor.numel():
            continue
        if tensor.nbytes < _OWN_FILE_BYTES:
            small.append(tensor)
        else:
            _share([tensor])
    _share(small)
    return module


def let_go(module: nn.Module) -> None:
    """Remove all parameters and buffers that are still in a file from `module`.

    Call it after this process has read the tensors that it needs.
    """
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.untyped_storage().filename is not None:
                    held[name] = None


def places_of(module: nn.Module) -> dict[int, list[tuple[dict[str, nn.Parameter | None], str]]]:
    """Return the places of every parameter of `module`, by the parameter's id.

    A place is the dictionary and the key that hold the parameter. A tied parameter has several
    places.
    """
    places: dict[int, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            places.setdefault(id(parameter), []).append((part._parameters, name))
    return places


def _share(tensors: list[Tensor]) -> None:
    """Move the tensors into one mapped file."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return
    with tempfile.NamedTemporaryFile(prefix="whale-train-") as file:
        # All space is reserved here: a page without room on the disk would raise SIGBUS when
        # written.
        os.posix_fallocate(file.fileno(), 0, end)
        storage = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=end)
    for tensor, offset in zip(tensors, offsets, strict=True):
        shared = torch.empty(0, dtype=tensor.dtype).set_(
            storage,  # type: ignore[arg-type]
            offset // tensor.element_size(),
            tensor.shape,
            tensor.stride(),
        )
        shared.copy_(tensor.detach())
        tensor.data = shared


def own_copy(
    tensors: Iterable[Tensor],
    device: torch.device,
    dtypes: Mapping[Tensor, torch.dtype] = MappingProxyType({}),
) -> None:
    """Give each of a module's parameters or buffers its own memory on `device`, and some another
    dtype.

    Tied tensors stay tied. `dtypes` maps the tensors that change dtype to the new one.
    """
    # The largest tensor comes first, because a tensor is in memory twice while it is cast.
    for tensor in sorted({id(t): t for t in tensors}.values(), key=lambda tensor: -tensor.nbytes):
        dtype = dtypes.get(tensor, tensor.dtype)
        if fill(tensor) is None and dtype == tensor.dtype:
            tensor.data = _copied(tensor.detach(), device)
        else:  # no other rank has this tensor, or the cast copies it
            tensor.data = tensor.data.to(dtype).to(device)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy of `tensor` on `device`."""
    if device.type == tensor.device.type:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous().to(device)
