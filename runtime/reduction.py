"""Gradients of a step summed over the holders of a parameter, once all its backwards are done.

For steps of several backwards (pipelines), where a reduction under each of them would be repeated
work. Buckets are sent without waiting, so that a stage that is done early reduces while others
still compute.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.strategies.memory import REDUCE_BUCKET_ELEMENTS


class SharedGradients:
    """Parameters that several TaskGraphs hold (tied ones), each whole on every member of its
    shard group. `groups` are all their holders, by parameter; `excess` is how many times too large
    this rank's gradients are in the sum (the members of a shard group all have the same one)."""

    def __init__(self, groups: Mapping[nn.Parameter, dist.ProcessGroup], excess: int) -> None:
        self._groups, self._excess = groups, excess

    def begin(self) -> list[dist.Work]:
        """Sum them over all holders. One this rank gave no gradient counts as zeros: another
        holder may have given one."""
        works = []
        for parameter, group in self._groups.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(self._excess)
            works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
        return [work for work in works if work is not None]

    def sum(self) -> None:
        for work in self.begin():
            work.wait()


class Reduction:
    """`parameters` are summed over `group` (None: one rank holds them), shared ones over theirs."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        shared: Mapping[nn.Parameter, dist.ProcessGroup],
        shards: int,
    ) -> None:
        self._parameters = parameters if group is not None and group.size() > 1 else ()
        self._group = group
        self._shared = SharedGradients(shared, shards)
        self._works: list[dist.Work] = []
        self._buckets: list[tuple[Tensor, list[Tensor]]] = []

    def begin(self) -> None:
        """Send everything. A parameter without a gradient has none in any copy, and keeps none:
        reduced zeros would be an update."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for bucket in _buckets(gradients):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                flat = bucket[0]
            else:
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                self._buckets.append((flat, bucket))
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)
        self._works += self._shared.begin()

    def wait(self) -> None:
        """Until all gradients are summed. Nothing to do before `begin`, or a second time."""
        for work in self._works:
            work.wait()
        for flat, bucket in self._buckets:
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, summed in zip(bucket, torch.split(flat, sizes), strict=True):
                gradient.copy_(summed.view_as(gradient))
        self._works, self._buckets = [], []


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype, as many as a bucket holds; a larger one is a bucket of its own."""
    found: list[list[Tensor]] = []
    filled = 0
    for gradient in gradients:
        fits = found and found[-1][0].dtype == gradient.dtype
        if not fits or filled + gradient.numel() > REDUCE_BUCKET_ELEMENTS:
            found.append([])
            filled = 0
        found[-1].append(gradient)
        filled += gradient.numel()
    return found
