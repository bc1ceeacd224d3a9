"""Sum the gradients of a step with several backwards over the holders of a parameter.

A reduction after every backward would repeat work. A gradient is sent when it is final
(`runtime/pipeline/grad_ready.py` determines when). For most gradients that is during the last
backward that adds to them, so that communication overlaps with the rest of that backward and with
other stages' work. Copies send their buckets in one order, which follows from the plan
(`runtime/engines/bucket_queue.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.futures import Future

from whale_train.runtime.base.copies import LevelledSum
from whale_train.runtime.engines.bucket_queue import InOrder
from whale_train.strategies.plan.training import BUCKET_ELEMENTS

_Group = dist.ProcessGroup


class GradientSums(Protocol):
    """The interface of sums of gradients to the programs that give the gradients."""

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Return the parameters for which the caller must call `final`."""

    def final(self, parameter: nn.Parameter) -> None:
        """Report that no backward of this step adds to the gradient of `parameter` any more."""

    def finish(self) -> None:
        """Send all remaining gradients, after this rank's last backward of the step."""

    def wait(self) -> None:
        """Wait until all gradients that were sent are summed, in `.grad`."""


class Reduction:
    """The sums of gradients over the holders of parameters, once a step.

    parameters: in the order of their use in the forward; the same on all holders.
    group: the ranks that the gradients of `parameters` are summed over; None: one rank holds them.
    shared: parameters that several TaskGraphs hold (tied ones), each whole on every member of its
        shard group, with the group of all its holders. All holders list them in one order.
    excess: the divisor of this rank's gradients of `shared`: the members of a shard group all add
        the same gradient to the sum.
    dtype: the dtype in which gradients of `parameters` are sent; `shared` ones are sent in fp32.
    levels: sums gradients of `parameters` over `group` inside hosts first; None: at once.
    bucket_elements: the number of gradients of `parameters` that are sent together.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: _Group | None,
        shared: Mapping[nn.Parameter, _Group],
        excess: int,
        dtype: torch.dtype = torch.float32,
        levels: LevelledSum | None = None,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        several = group is not None and group.size() > 1
        # The parameter that is used last is the first whose gradient is final.
        buckets = in_buckets(reversed(parameters), bucket_elements) if several else ()
        self._group, self._dtype, self._levels = group, dtype, levels
        self._buckets = InOrder(buckets, self._sum)
        self._shared = {p: holders for p, holders in shared.items() if p.requires_grad}
        self._excess = excess
        self._sent: list[_Sent] = []

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Return the parameters for which the caller must call `final`."""
        return self._buckets.items

    def final(self, parameter: nn.Parameter) -> None:
        """Report that no backward of this step adds to the gradient of `parameter` any more.

        The gradient is sent once the gradients before it are sent. Call it at most once a step.
        """
        self._buckets.ready(parameter)

    def finish(self) -> None:
        """Send all remaining gradients, after this rank's last backward of the step.

        The gradients of shared parameters are sent only here. They become final last in the first
        of the stages that hold them, and that stage waits for messages that the other stages have
        yet to send. A GPU has few queues, so a collective that waits for that stage must not be
        enqueued before the messages.
        """
        self._buckets.end()
        for parameter, holders in self._shared.items():
            if parameter.grad is None:  # another holder may have given one
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            self._all_reduce(parameter.grad.div_(self._excess), holders)

    def wait(self) -> None:
        """Wait until all gradients that were sent are summed, in `.grad`."""
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _sum(self, bucket: Sequence[nn.Parameter]) -> None:
        """Begin to sum the gradients of a bucket.

        A parameter without a gradient has none on any copy and keeps none: reduced zeros would be
        an update.
        """
        held = [parameter for parameter in bucket if parameter.grad is not None]
        if held:
            assert self._group is not None
            self._all_reduce(_as_one(held), self._group, self._dtype, self._levels)

    def _all_reduce(
        self,
        tensor: Tensor,
        group: _Group,
        dtype: torch.dtype = torch.float32,
        levels: LevelledSum | None = None,
    ) -> None:
        sent = tensor.to(dtype)
        work: dist.Work | Future[Tensor] | None
        if levels is None:
            work = dist.all_reduce(sent, group=group, async_op=True)
        else:
            work = levels.begin(sent.view(-1))
        assert work is not None
        self._sent.append(_Sent(work, group, sent, tensor))


@dataclass(frozen=True)
class _Sent:
    """A sum in progress.

    work: the handle of the collective.
    group: the group of the collective, by which a timeout is reported
        (`runtime/failures/timeout_frames.py`).
    sent: the tensor that is summed, in the dtype that is sent.
    where: the gradient that the sum is written to.
    """

    work: dist.Work | Future[Tensor]
    group: _Group
    sent: Tensor
    where: Tensor

    def wait(self) -> None:
        """Wait for the sum and write it to `where`."""
        self.work.wait()
        if self.sent is not self.where:
            self.where.copy_(self.sent)


def _as_one(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients of all `parameters` as one flat tensor, and make each `.grad` a view of
    it.

    A single contiguous gradient is returned unchanged.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) == 1 and gradients[0].is_contiguous():
        return gradients[0]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
        parameter.grad = part.view_as(gradient)
    return flat


def in_buckets(
    parameters: Iterable[nn.Parameter], bucket_elements: int
) -> list[list[nn.Parameter]]:
    """Return `parameters` in buckets of neighbours that have one dtype and at most
    `bucket_elements` elements in all.

    A larger parameter is a bucket of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        fits = buckets and buckets[-1][0].dtype == parameter.dtype
        if not fits or filled + parameter.numel() > bucket_elements:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets
