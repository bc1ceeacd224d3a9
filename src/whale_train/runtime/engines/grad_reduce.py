"""Gradients of a step with several backwards, summed over the holders of a parameter.

A reduction after every backward would be repeated work. A gradient is sent when it is final
(`runtime/pipeline/grad_ready.py` knows when), which for most is during the last backward that adds
to it, so that communication overlaps with the rest of that backward and with other stages' work.
Copies send their buckets in one order, which follows from the plan
(`runtime/engines/bucket_queue.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.engines.bucket_queue import InOrder
from whale_train.strategies.memory.engine_memory import REDUCE_BUCKET_ELEMENTS

_Group = dist.ProcessGroup


class Reduction:
    """The sums of gradients over the holders of parameters, once a step.

    parameters: in the order of their use in the forward; the same on all holders.
    group: the ranks that the gradients of `parameters` are summed over; None: one rank holds them.
    shared: parameters that several TaskGraphs hold (tied ones), each whole on every member of its
        shard group, with the group of all its holders. All holders list them in one order.
    excess: how many times too large this rank's gradients of `shared` are in the sum, as the
        members of a shard group all have the same one.
    dtype: the dtype in which gradients of `parameters` are sent; `shared` ones are sent in fp32.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: _Group | None,
        shared: Mapping[nn.Parameter, _Group],
        excess: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        several = group is not None and group.size() > 1
        # The last used is the first whose gradient is final.
        buckets = in_buckets(reversed(parameters)) if several else ()
        self._group, self._dtype = group, dtype
        self._buckets = InOrder(buckets, self._sum)
        self._shared = {p: holders for p, holders in shared.items() if p.requires_grad}
        self._excess = excess
        self._sent: list[_Sent] = []

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Return the parameters of which `final` is to be told."""
        return self._buckets.items

    def final(self, parameter: nn.Parameter) -> None:
        """Report that no backward of this step adds to the gradient of `parameter` any more.

        The gradient is sent once those before it are. At most once a step.
        """
        self._buckets.ready(parameter)

    def finish(self) -> None:
        """Send all remaining gradients, after this rank's last backward of the step.

        The gradients of shared parameters are sent only here. They are final last in the first of
        the stages that hold them, which waits for messages that the others have yet to send. A GPU
        has few queues, so a collective that waits for that stage must not be enqueued before those
        messages.
        """
        self._buckets.end()
        for parameter, holders in self._shared.items():
            if parameter.grad is None:  # another holder may have given one
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            self._all_reduce(parameter.grad.div_(self._excess), holders, torch.float32)

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
            self._all_reduce(_as_one(held), self._group, self._dtype)

    def _all_reduce(self, tensor: Tensor, group: _Group, dtype: torch.dtype) -> None:
        sent = tensor.to(dtype)
        work = dist.all_reduce(sent, group=group, async_op=True)
        assert work is not None
        self._sent.append(_Sent(work, group, sent, tensor))


@dataclass(frozen=True)
class _Sent:
    """A sum in progress.

    work: its handle.
    group: the group of the collective, by which a timeout is reported
        (`runtime/failures/timeout_frames.py`).
    sent: the tensor that is summed, in the dtype that is sent.
    where: the gradient that the sum is written to.
    """

    work: dist.Work
    group: _Group
    sent: Tensor
    where: Tensor

    def wait(self) -> None:
        """Wait for the sum and write it to `where`."""
        self.work.wait()
        if self.sent is not self.where:
            self.where.copy_(self.sent)


def _as_one(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return one tensor of all gradients of `parameters`, and make each `.grad` a view of it. A
    single contiguous gradient is returned as it is."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) == 1 and gradients[0].is_contiguous():
        return gradients[0]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
        parameter.grad = part.view_as(gradient)
    return flat


def in_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return `parameters` in buckets: neighbours of one dtype, of at most REDUCE_BUCKET_ELEMENTS
    elements together. A larger parameter is a bucket of its own."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        fits = buckets and buckets[-1][0].dtype == parameter.dtype
        if not fits or filled + parameter.numel() > REDUCE_BUCKET_ELEMENTS:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets
