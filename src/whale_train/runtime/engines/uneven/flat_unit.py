"""Parameters that lie end to end in one flat tensor, of which each copy owns an interval.

A copy holds the optimizer's fp32 values of its interval alone. Below ZeRO 3 it holds all weights
beside them; under ZeRO 3 the flat tensor has memory only while the weights are gathered.

The intervals may differ in length. gloo's all-gather takes equal parts only (torch 2.13), so the
owners broadcast their intervals one after another, and gradients are reduced to each owner in turn.
NCCL does the same for unequal parts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.models.weights.deferred import fill
from whale_train.strategies.plan.state_parts import Interval, intervals_of, overlap


def storage_key(tensor: Tensor) -> int:
    """Return the identity of the memory of `tensor`, which a free and a new allocation keep."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass(frozen=True)
class Piece:
    """The elements of a trained parameter that this copy owns.

    parameter: the parameter.
    start: the index of the first element in the flattened parameter.
    value: the fp32 values that the optimizer updates, flat.
    at: the interval of the elements in this copy's interval of the unit.
    """

    parameter: nn.Parameter
    start: int
    value: nn.Parameter
    at: Interval


class FlatUnit:
    """Parameters in one flat tensor that is cut among the copies.

    parameters: tensors that are all trained or all frozen, and are to be held in one dtype. The
        values of those of a shared copy are read, and are released one by one.
    parts: the relative parts of the copies.
    group: the copies.
    dtype: the dtype that the weights are held in. Trained ones in 16 bits have an fp32 master.
    device: the device of the weights.
    flat: all weights of the unit.
    shard: this copy's interval of them.
    master: the fp32 values of this interval, `shard` itself for fp32 weights.
    gradient: the gradients of this interval that were summed so far, in fp32, or None.
    releases: whether the flat tensor has memory only between `gather` and `release` (ZeRO 3).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        parts: Sequence[int],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
        *,
        releases: bool,
    ) -> None:
        self.parameters, self.group = tuple(parameters), group
        sizes = [p.numel() for p in parameters]
        *self.starts, total = accumulate(sizes, initial=0)
        self.of = dict(zip(self.parameters, self.starts, strict=True))
        self.intervals = intervals_of(total, parts)
        self.own = self.intervals[group.rank()]
        size = self.own[1] - self.own[0]
        self.is_trained = parameters[0].requires_grad
        self.flat = torch.empty(total, dtype=dtype, device=device)
        self.releases, self.is_gathered = releases, not releases
        self.shard = self.flat[slice(*self.own)]
        if releases:
            self.shard = torch.empty(size, dtype=dtype, device=device)
        is_narrow = self.is_trained and dtype != torch.float32
        self.master = torch.empty(size, device=device) if is_narrow else self.shard
        self.gradient: Tensor | None = None  # of this copy's interval, fp32
        self._views = [
            self.flat[start : start + p.numel()].view(p.shape) for p, start in self._places()
        ]
        if releases:
            self._resize(0)
        for (parameter, start), view in zip(self._places(), self._views, strict=True):
            self._take(parameter, start, view)
        self.pieces = tuple(self._pieces()) if self.is_trained else ()

    def _places(self) -> Iterator[tuple[nn.Parameter, int]]:
        """Yield the parameters, each with the place of its first element in the flat tensor."""
        yield from self.of.items()

    def _take(self, parameter: nn.Parameter, start: int, view: Tensor) -> None:
        """Copy the value of `parameter` into the unit, and make its data a view of the unit."""
        fill(parameter)
        value = parameter.detach().reshape(-1)
        low, high = overlap(self.own, (start, start + value.numel()))
        for held in {id(x): x for x in (self.master, self.shard)}.values() if high > low else ():
            held[low - self.own[0] : high - self.own[0]].copy_(value[low - start : high - start])
        if not self.releases:
            view.copy_(value.view(view.shape))
        if self.is_trained:
            parameter.grad_dtype = torch.float32
        parameter.data = view

    def _pieces(self) -> Iterator[Piece]:
        for parameter, start in self._places():
            low, high = overlap(self.own, (start, start + parameter.numel()))
            if high > low:
                at = low - self.own[0], high - self.own[0]
                yield Piece(parameter, low - start, nn.Parameter(self.master[slice(*at)]), at)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the gathered weights."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def storage_key(self) -> int:
        """Return the identity of the memory of the gathered weights, whether it has any or not."""
        return storage_key(self.flat)

    def held_of(self, parameter: nn.Parameter) -> tuple[Tensor, int]:
        """Return this copy's elements of the weights of `parameter`, and the index of the first in
        the flattened parameter."""
        start = self.of[parameter]
        low, high = overlap(self.own, (start, start + parameter.numel()))
        if high <= low:
            return self.shard[:0], 0
        return self.shard[low - self.own[0] : high - self.own[0]], low - start

    def gather(self) -> None:
        """Give the flat tensor memory, and fill it with the intervals of all copies."""
        if self.is_gathered:
            return
        self._resize(self.nbytes)
        self.flat[slice(*self.own)].copy_(self.shard)
        self.is_gathered = True
        self._broadcast()

    def release(self) -> None:
        """Free the memory of the flat tensor, where it is held only while it is gathered."""
        if self.releases and self.is_gathered:
            self._resize(0)
            self.is_gathered = False

    def _resize(self, num_bytes: int) -> None:
        """Give the flat tensor memory of `num_bytes`. Meta tensors, which have none, keep their
        size."""
        if not self.flat.is_meta:
            self.flat.untyped_storage().resize_(num_bytes)

    def publish(self) -> None:
        """Make the weights of all copies those that the optimizer has updated."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if not self.releases:
            self._broadcast()

    def _broadcast(self) -> None:
        """Fill the flat tensor with the intervals of their owners."""
        with torch.no_grad():
            works = [
                dist.broadcast(
                    self.flat[slice(*held)], group=self.group, group_src=owner, async_op=True
                )
                for owner, held in enumerate(self.intervals)
                if held[1] > held[0]
            ]
        for work in works:
            assert work is not None
            work.wait()

    def begin_reduce(self, gradients: Tensor, start: int, scale: int) -> Callable[[], None]:
        """Begin to sum the flat `gradients`, whose first belongs at `start`, each at its owner;
        return the function that waits and adds this copy's part, divided by `scale`, to
        `gradient`."""
        works, own = [], (0, 0)
        span = start, start + gradients.numel()
        for owner, held in enumerate(self.intervals):
            low, high = overlap(held, span)
            if high > low:
                part = gradients[low - start : high - start]
                works.append(dist.reduce(part, group=self.group, group_dst=owner, async_op=True))
                own = (low, high) if owner == self.group.rank() else own

        def finish() -> None:
            for work in works:
                assert work is not None
                work.wait()
            low, high = own
            if high > low:
                if self.gradient is None:
                    self.gradient = torch.zeros_like(self.master)
                part = gradients[low - start : high - start]
                target = self.gradient[low - self.own[0] : high - self.own[0]]
                target.add_(part, alpha=1 / scale)

        return finish
