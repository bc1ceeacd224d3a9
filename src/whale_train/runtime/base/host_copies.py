"""Copy what blocks save for their backward to the host, and back before it is read.

A forward of a block sends each tensor once, and the device frees it when the next block's forward
has ended. The backward of a block fetches what the block before it has saved, beside its own work.
On a GPU, copies have pinned memory on the host and streams of their own. On the CPU they are plain
copies, and on the meta device, which stands for a GPU, no copies but tensors that come and go.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from whale_train.strategies.graph.saved_tensors import SENT_BYTES

_NARROW = (torch.bfloat16, torch.float16)


class HostLink(Protocol):
    """How tensors travel between a device and its host."""

    def send(self, flat: Tensor) -> Tensor | None:
        """Begin to copy `flat` [elements] to the host, and return the copy; None on devices without
        values."""

    def fetch(self, copy: "Copy") -> Tensor:
        """Begin to copy the values on the host back, and return the tensor [elements] that will
        have them."""

    def mark(self) -> Any:
        """Return a mark of the work that has begun."""

    def wait(self, mark: Any) -> None:
        """Make later work of the device wait for the work before `mark`."""


class Copy:
    """A storage whose values are on the host, on the device, or on both.

    source: the storage on the device, without owning it.
    flat: all elements of the storage, in one dimension.
    """

    def __init__(self, flat: Tensor, link: HostLink) -> None:
        self.source = StorageWeakRef(flat.untyped_storage())  # type: ignore[no-untyped-call]
        self.version = flat._version
        self.elements, self.dtype = flat.numel(), flat.dtype
        self.on_device: Tensor | None = flat
        self.on_host = link.send(flat)
        self._link = link
        self._arrival: Any = None

    def fetch(self) -> None:
        """Begin to fetch the values, unless the device has them."""
        if self.on_device is None:
            self.on_device = self._link.fetch(self)
            self._arrival = self._link.mark()

    def values(self) -> Tensor:
        """Return the values [elements] on the device, which waits for their arrival."""
        self.fetch()
        self._arrive()
        assert self.on_device is not None
        return self.on_device

    def is_stale(self) -> bool:
        """Return whether the storage on the device was freed."""
        return bool(self.source.expired())  # type: ignore[no-untyped-call]

    def _arrive(self) -> None:
        if self._arrival is not None:
            self._link.wait(self._arrival)
            self._arrival = None

    def __del__(self) -> None:
        self._arrive()  # nothing may use the memory before the copy into it has ended


@dataclass(eq=False)
class _Pass:
    """One forward of a block. Its copies live as long as autograd refers to them.

    before: the forward of the block that ran before.
    sent: a mark of the work that sends the copies.
    """

    before: "weakref.ref[_Pass] | None"
    sent: Any = None
    copies: "list[weakref.ref[Copy]]" = field(default_factory=list)

    def living(self) -> Iterator[Copy]:
        """Yield the copies that are still needed."""
        yield from (copy for reference in self.copies if (copy := reference()) is not None)

    def fetch(self) -> None:
        """Begin to fetch the copies that the device does not have."""
        for copy in self.living():
            copy.fetch()


@dataclass(frozen=True)
class _Sent:
    """A saved tensor whose values are in a copy, as a view of them."""

    copy: Copy
    of: _Pass
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _OfWeight:
    """A saved view of a weight, which is read again from the weight: ZeRO 3 frees the values, and
    gathers them anew for the backward."""

    weight: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostCopies:
    """What the blocks of a rank, whose device is `device`, save for their backward.

    Weights and buffers stay, 16-bit copies of weights included, and storages of less than
    `SENT_BYTES`: a transfer has a fixed cost, and small tensors together need little memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._link: HostLink = (
            _Streams(device)
            if device.type == "cuda"
            else _Nowhere()
            if device.type == "meta"
            else _Plain()
        )
        # An address is not reused while a copy refers to its storage.
        self._by_storage = weakref.WeakValueDictionary[tuple[int, torch.dtype], Copy]()
        self._last: _Pass | None = None  # its values are still on the device
        self._reached: _Pass | None = None  # the forward whose backward runs
        self.num_sent = 0

    @contextmanager
    def sending(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Return the context of a block's forward, which sends what autograd saves.

        held: the parameters and buffers of the block.
        """
        here = _Pass(None if self._last is None else weakref.ref(self._last))
        weights = _Weights(held)

        def pack(tensor: Tensor) -> Tensor | _Sent | _OfWeight:
            return self._packed(tensor, here, weights)

        with saved_tensors_hooks(pack, self._unpacked):
            yield
        if not here.copies:
            return
        if self._last is not None:
            self._link.wait(self._last.sent)
            ours = set(map(id, here.living()))
            for copy in self._last.living():
                if id(copy) not in ours:
                    copy.on_device = None
        here.sent, self._last = self._link.mark(), here

    def _packed(
        self, tensor: Tensor, here: _Pass, weights: "_Weights"
    ) -> Tensor | _Sent | _OfWeight:
        """Send `tensor`, which the forward `here` saves, and return its stand-in for autograd."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        view = (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        if (weight := weights.of(storage._cdata)) is not None:
            return _OfWeight(weight, *view)
        if storage.nbytes() < SENT_BYTES or weights.is_copied(tensor):
            return tensor
        copy = self._copied(tensor, storage)
        here.copies.append(weakref.ref(copy))
        return _Sent(copy, here, *view)

    def _copied(self, tensor: Tensor, storage: torch.UntypedStorage) -> Copy:
        """Return the copy of the storage of `tensor`, which is made where there is none."""
        key = (storage._cdata, tensor.dtype)
        copy = self._by_storage.get(key)
        if copy is None or copy.version != tensor._version or copy.is_stale():
            flat = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            copy = self._by_storage[key] = Copy(flat, self._link)
            self.num_sent += 1
        return copy

    def _unpacked(self, saved: Tensor | _Sent | _OfWeight) -> Tensor:
        """Return the tensor that autograd saved as `saved`."""
        if isinstance(saved, Tensor):
            return saved
        if isinstance(saved, _OfWeight):
            return saved.weight.detach().as_strided(saved.size, saved.stride, saved.offset)
        if self._reached is not saved.of:
            self._reached = saved.of
            saved.of.fetch()
            before = saved.of.before() if saved.of.before is not None else None
            if before is not None:
                before.fetch()
        return saved.copy.values().as_strided(saved.size, saved.stride, saved.offset)


class _Weights:
    """The parameters and buffers of a block, and their copies in 16 bits."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        tensors = list(held)
        self._by_storage = {x.untyped_storage()._cdata: x for x in tensors if x.numel()}
        self._freed = [x for x in tensors if not x.numel()]  # by ZeRO 3, while they are not used
        shapes = (getattr(x, "ds_shape", x.shape) for x in tensors if isinstance(x, nn.Parameter))
        self._shapes = {tuple(shape) for shape in shapes}

    def of(self, storage: int) -> Tensor | None:
        """Return the parameter or buffer with the storage at an address, or None."""
        if (tensor := self._by_storage.get(storage)) is not None:
            return tensor
        return next((x for x in self._freed if x.untyped_storage()._cdata == storage), None)

    def is_copied(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the shape and dtype of a weight that autocast has cast, which
        autocast keeps on the device."""
        shape = tuple(tensor.shape)
        return tensor.dtype in _NARROW and bool({shape, shape[::-1]} & self._shapes)


class _Plain:
    """Copies in the memory of the CPU, which is the device."""

    def send(self, flat: Tensor) -> Tensor:
        return flat.clone()

    def fetch(self, copy: Copy) -> Tensor:
        assert copy.on_host is not None
        return copy.on_host

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None


class _Nowhere:
    """Tensors of the meta device, without values."""

    def send(self, flat: Tensor) -> None:
        return None

    def fetch(self, copy: Copy) -> Tensor:
        return torch.empty(copy.elements, dtype=copy.dtype, device="meta")

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None


class _Streams:
    """Copies between a GPU and pinned memory, on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, flat: Tensor) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            return there.copy_(flat, non_blocking=True)

    def fetch(self, copy: Copy) -> Tensor:
        assert copy.on_host is not None
        # Memory of the computing stream, whose earlier readers of it have to end first.
        flat = torch.empty(copy.elements, dtype=copy.dtype, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return flat.copy_(copy.on_host, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)
