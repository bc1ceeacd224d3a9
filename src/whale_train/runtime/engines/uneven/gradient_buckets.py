"""Send gradients to the owners of their elements, bucket by bucket, while a backward makes more."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whale_train.runtime.engines.grad_reduce import in_buckets
from whale_train.runtime.engines.uneven.flat_unit import FlatUnit

_IN_FLIGHT = 1  # buckets on their way while the next is filled


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together.

    unit: the unit of the parameters.
    parameters: neighbours in the unit, in its order.
    """

    unit: FlatUnit
    parameters: tuple[nn.Parameter, ...]


def buckets_of(units: Iterable[FlatUnit], bucket_elements: int | None) -> list[Bucket]:
    """Return the gradients of trained `units` in buckets, the last parameter first, since a
    backward begins with it. A bucket has at most `bucket_elements` gradients, or those of one
    parameter; None: all those of a unit."""
    buckets = []
    for unit in reversed([unit for unit in units if unit.is_trained]):
        most = bucket_elements or sum(p.numel() for p in unit.parameters)
        for parameters in in_buckets(reversed(unit.parameters), most):
            buckets.append(Bucket(unit, tuple(reversed(parameters))))
    return buckets


class GradientBuckets:
    """The gradients of a step, on their way to the copies that own their elements.

    A bucket is sent when a backward has made all of its gradients. Backwards make gradients in the
    same order on all copies, which run one graph.

    buckets: all gradients.
    dtype: the dtype that gradients are sent in.
    scale: the factor by which gradients are too large.
    sent: called with every bucket whose gradients have been taken.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dtype: torch.dtype,
        scale: int,
        sent: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self._buckets, self._dtype, self._scale, self._on_sent = buckets, dtype, scale, sent
        self._bucket_of = {p: bucket for bucket in buckets for p in bucket.parameters}
        self._begun: deque[Callable[[], None]] = deque()
        self._missing = {bucket: set(bucket.parameters) for bucket in buckets}

    def made(self, parameter: nn.Parameter) -> None:
        """Report that a backward has made the gradient of `parameter`, in its `.grad`."""
        bucket = self._bucket_of[parameter]
        self._missing[bucket].discard(parameter)
        if not self._missing[bucket]:
            self._send(bucket)

    def end(self) -> None:
        """Send all gradients that are left, after a backward; those that it did not make are
        zeros. The buckets that were sent are empty again."""
        for bucket in self._buckets:
            if self._missing[bucket]:
                self._send(bucket)
        self._missing = {bucket: set(bucket.parameters) for bucket in self._buckets}

    def wait(self) -> None:
        """Wait until all gradients that were sent are summed, in `gradient` of their units."""
        while self._begun:
            self._begun.popleft()()

    def _send(self, bucket: Bucket) -> None:
        self._missing[bucket] = set()
        start = bucket.unit.of[bucket.parameters[0]]
        while len(self._begun) >= _IN_FLIGHT:
            self._begun.popleft()()
        gradients = _taken(bucket.parameters, bucket.unit.master.device).to(self._dtype)
        self._begun.append(bucket.unit.begin_reduce(gradients, start, self._scale))
        self._on_sent(bucket)


def _taken(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """Return the gradients of `parameters` as one flat fp32 tensor, and leave them without one. A
    missing gradient is zeros."""
    made = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros(parameter.numel(), device=device)
        made.append(gradient.reshape(-1).float())
        parameter.grad = None
    return made[0] if len(made) == 1 else torch.cat(made)
