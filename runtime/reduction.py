"""Gradients of a step of several backwards, summed over the holders of a parameter.

A reduction under every backward would be repeated work: a gradient is sent when it is final
(`runtime/finality.py` knows when), which for most is under the last backward that adds to it, so
that communication runs under what is left of that and under other stages' work. Each group gets
its buckets in an order that all its members have from the plan (`runtime/in_order.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.in_order import InOrder
from whale_train.strategies.memory import REDUCE_BUCKET_ELEMENTS

_Group = dist.ProcessGroup


class Reduction:
    """`parameters`, listed in the order of their use in forward, are summed over `group` (None:
    one rank holds them).

    `shared` ones, which several TaskGraphs hold (tied ones), each whole on every member of its
    shard group, are summed over the group of all their holders; `excess` is how many times too
    large this rank's gradients of them are in the sum (the members of a shard group all have the
    same one). All holders list them in one order, that of their first use in the model.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: _Group | None,
        shared: Mapping[nn.Parameter, _Group],
        excess: int,
    ) -> None:
        # The last used is the first whose gradient is final.
        self._lanes: list[InOrder[nn.Parameter]] = []
        if group is not None and group.size() > 1:
            buckets = _buckets(tuple(reversed(parameters)))
            self._lanes.append(InOrder(buckets, partial(self._sum, group)))
        of_group: dict[_Group, list[nn.Parameter]] = {}
        for parameter, holders in reversed(list(shared.items())):
            if parameter.requires_grad:
                of_group.setdefault(holders, []).append(parameter)
        for holders, held in of_group.items():
            send = partial(self._sum_shared, holders)
            self._lanes.append(InOrder([(parameter,) for parameter in held], send))
        self._lane_of = {parameter: lane for lane in self._lanes for parameter in lane.items}
        self._excess = excess
        self._sent: list[_Sent] = []

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Those that are summed with anyone."""
        return self._lane_of.keys()

    def final(self, parameter: nn.Parameter) -> None:
        """No backward of this step adds to its gradient any more: send it, once those before it
        are. At most once a step."""
        self._lane_of[parameter].ready(parameter)

    def finish(self) -> None:
        """No backward follows in this step: send what is left."""
        for lane in self._lanes:
            lane.end()

    def wait(self) -> None:
        """Until all that was sent is summed, in `.grad`."""
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _sum(self, group: _Group, bucket: Sequence[nn.Parameter]) -> None:
        """A parameter without a gradient has none in any copy, and keeps none: reduced zeros
        would be an update."""
        held = [parameter for parameter in bucket if parameter.grad is not None]
        if held:
            self._all_reduce(_as_one(held), group)

    def _sum_shared(self, group: _Group, bucket: Sequence[nn.Parameter]) -> None:
        """One this rank gave no gradient counts as zeros: another holder may have given one."""
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._all_reduce(parameter.grad.div_(self._excess), group)

    def _all_reduce(self, tensor: Tensor, group: _Group) -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        self._sent.append(_Sent(work, group))


@dataclass(frozen=True)
class _Sent:
    """A sum on its way, and the group that a wait in vain was for (`runtime/waits.py`)."""

    work: dist.Work
    group: _Group

    def wait(self) -> None:
        self.work.wait()


def _as_one(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of which the gradients of `parameters` are parts from here on."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(gradients) == 1 and gradients[0].is_contiguous():
        return gradients[0]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for parameter, gradient, part in zip(parameters, gradients, parts, strict=True):
        parameter.grad = part.view_as(gradient)
    return flat


def _buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype, as many as a bucket holds; a larger one is a bucket of its own."""
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
