"""Gradients of a step of several backwards, summed over the holders of a parameter.

A reduction under every backward would be repeated work: a gradient is sent when it is final
(`runtime/pipeline/grad_ready.py` knows when), which for most is under the last backward that adds
to it, so that communication runs under what is left of that and under other stages' work. Copies
send their buckets in one order, which they have from the plan (`runtime/engines/bucket_queue.py`).
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
    """`parameters`, listed in the order of their use in forward, are summed over `group` (None:
    one rank holds them), sent in `dtype`.

    `shared` ones, which several TaskGraphs hold (tied ones), each whole on every member of its
    shard group, are summed over the group of all their holders; `excess` is how many times too
    large this rank's gradients of them are in the sum (the members of a shard group all have the
    same one). All holders list them in one order.
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
        """Those of which `final` is told."""
        return self._buckets.items

    def final(self, parameter: nn.Parameter) -> None:
        """No backward of this step adds to its gradient any more: send it, once those before it
        are. At most once a step."""
        self._buckets.ready(parameter)

    def finish(self) -> None:
        """This rank has run all its backwards and sent on what they gave: send what is left.

        Shared ones wait for this. They are final last in the first of the stages that hold them,
        which waits for what the others have yet to send it: on a GPU, whose queues are few, a
        collective that waits for that stage must not stand before that.
        """
        self._buckets.end()
        for parameter, holders in self._shared.items():
            if parameter.grad is None:  # another holder may have given one
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            self._all_reduce(parameter.grad.div_(self._excess), holders, torch.float32)

    def wait(self) -> None:
        """Until all that was sent is summed, in `.grad`."""
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _sum(self, bucket: Sequence[nn.Parameter]) -> None:
        """Sum the gradients that any copy has: a parameter without one has none in any copy, and
        keeps none, as reduced zeros would be an update."""
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
    """A sum on its way, as `sent`, to `where`; and the group that a wait in vain was for
    (`runtime/failures/timeout_frames.py`)."""

    work: dist.Work
    group: _Group
    sent: Tensor
    where: Tensor

    def wait(self) -> None:
        self.work.wait()
        if self.sent is not self.where:
            self.where.copy_(self.sent)


def _as_one(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return one tensor of which the gradients of `parameters` are parts from here on."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) == 1 and gradients[0].is_contiguous():
        return gradients[0]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
        parameter.grad = part.view_as(gradient)
    return flat


def in_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return `parameters` in buckets: neighbours of one dtype, as many as a bucket holds; a larger
    one is a bucket of its own."""
    found: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        fits = found and found[-1][0].dtype == parameter.dtype
        if not fits or filled + parameter.numel() > REDUCE_BUCKET_ELEMENTS:
            found.append([])
            filled = 0
        found[-1].append(parameter)
        filled += parameter.numel()
    return found
