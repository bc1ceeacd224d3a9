"""Sum the gradients of logical workers in the order of the workers, whichever rank computed them.

Additions of floating-point numbers round, so the bits of a sum depend on its order. An all-reduce
adds what each rank has accumulated, and its order changes with the number of ranks. Here the first
worker's gradient is added to the second's, the third's to their sum, and so on
(`strategies/stages/logical_workers.py` deals the workers in rounds that allow it).

Every rank owns a slice of each bucket of gradients. After each round, the members of the round send
every owner its slice of their gradients, by an all-to-all, and the owner adds them up. After the
last round, the sums are gathered. Over n ranks with one worker each, that sends as many bytes as a
ring's all-reduce. Ranks that share memory need no slices: their all-reduce has an order.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.cpu.shm_collectives import SharedMemoryGroup
from whale_train.runtime.engines.grad_reduce import in_buckets

# Elements at multiples of which a gradient begins in its bucket: 64 bytes, the alignment of torch's
# own tensors. Libraries may sum elements of another alignment in another order.
_ALIGNED = 16


class WorkerSums:
    """The sums of gradients over the logical workers of all ranks, once a step.

    parameters: the trained parameters; the same on all ranks.
    group: the ranks that run the workers.
    of_ranks: the workers of each member of `group`, as a plan's `LogicalWorkers.of_ranks`.
    bucket_elements: the number of gradients that are sent together.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        of_ranks: Sequence[Sequence[int]],
        bucket_elements: int,
    ) -> None:
        self._group, self._ranks = group, len(of_ranks)
        self._rank = group.rank() if self._ranks > 1 else 0
        self._rounds = [
            [rank for rank, workers in enumerate(of_ranks) if turn < len(workers)]
            for turn in range(max(map(len, of_ranks)))
        ]
        self._buckets = [
            _Bucket(bucket, self._ranks, group)
            for bucket in in_buckets(reversed(parameters), bucket_elements)
        ]
        self._turn = 0

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Return (): no gradient is final before the last worker has run."""
        return ()

    def final(self, parameter: nn.Parameter) -> None:
        """Do nothing: gradients are sent worker by worker."""

    def add(self) -> None:
        """Add the gradients of the worker that this rank has just run, and drop them.

        A collective of all ranks: those without a worker in this round take part by `finish`. A
        rank that is alone leaves the gradients, to which autograd adds the next worker's.
        """
        if self._ranks > 1:
            self._exchange()

    def finish(self) -> None:
        """Leave the sums in the parameters' `.grad`, after this rank's last worker of a step."""
        if self._ranks == 1:
            return
        while self._turn < len(self._rounds):
            self._exchange()
        for bucket in self._buckets:
            bucket.give()
        self._turn = 0

    def wait(self) -> None:
        """Do nothing: `finish` has waited."""

    def _exchange(self) -> None:
        members = self._rounds[self._turn]
        for bucket in self._buckets:
            bucket.add(members, self._rank)
        self._turn += 1


@dataclass
class _Place:
    """The place of a parameter's gradient in the flat tensor of its bucket: [start, stop)."""

    parameter: nn.Parameter
    start: int
    stop: int


class _Bucket:
    """Gradients that are sent together, as one flat tensor of equal slices, one for each rank."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: int, group: dist.ProcessGroup
    ) -> None:
        self._places, end = list[_Place](), 0
        for parameter in parameters:
            self._places.append(_Place(parameter, end, end + parameter.numel()))
            end += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        self._slice, self._ranks = -(-end // (ranks * _ALIGNED)) * _ALIGNED, ranks
        self._like, self._group = parameters[0], group
        self._sums: Tensor | None = None  # over the workers so far: of all slices, or of one
        # Flat tensors that nobody reads. Making them anew would clear pages of memory.
        self._free: list[Tensor] = []
        self._given: Tensor | None = None  # what the parameters' `.grad` are views of
        self._filled: Tensor | None = None  # with the gradients of the worker that runs
        self._reached: set[int] = set()  # the places whose parameter has a gradient, by `start`
        for place in self._places if ranks > 1 else ():
            hook = partial(self._take, place)
            place.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def add(self, members: Sequence[int], rank: int) -> None:
        """Add the gradients of a round, whose workers run on the ranks `members`, in this order."""
        if isinstance(self._group, SharedMemoryGroup):
            self._add_whole(members, rank)
        else:
            self._add_slice(members, rank)

    def _add_whole(self, members: Sequence[int], rank: int) -> None:
        """Add all slices on every rank: a group in shared memory sums in the order of its members.

        The first member of the round brings the earlier sum, and ranks without a worker bring -0.0,
        the number whose addition changes no other, +0.0 and -0.0 included.
        """
        if rank in members:
            flat = self._taken()
            if self._sums is not None and rank == members[0]:
                torch.add(self._sums, flat, out=flat)
        else:
            flat = self._flat().fill_(-0.0)
        dist.all_reduce(flat, group=self._group)
        if self._sums is not None:
            self._free.append(self._sums)
        self._sums = flat

    def _add_slice(self, members: Sequence[int], rank: int) -> None:
        """Add this rank's slice alone."""
        size = self._slice
        sent = self._taken() if rank in members else self._like.new_empty(0)
        received = self._like.new_empty(len(members) * size)
        dist.all_to_all_single(
            received,
            sent,
            [size if member in members else 0 for member in range(self._ranks)],
            [size if rank in members else 0] * self._ranks,
            group=self._group,
        )
        if rank in members:
            self._free.append(sent)
        for part in received.view(len(members), size):
            self._sums = part.clone() if self._sums is None else self._sums.add_(part)

    def give(self) -> None:
        """Write the sums of all slices to the parameters' `.grad`."""
        sums, self._sums = self._sums, None
        assert sums is not None
        if len(sums) < self._ranks * self._slice:
            own, sums = sums, self._flat()
            dist.all_gather_into_tensor(sums, own, group=self._group)
        self._given = sums
        for place in self._places:
            if place.start in self._reached:
                place.parameter.grad = sums[place.start : place.stop].view_as(place.parameter)

    def _flat(self) -> Tensor:
        """Return a flat tensor of any values, one that is free or a new one."""
        if self._free:
            return self._free.pop()
        return self._like.new_empty(self._ranks * self._slice)

    def _take(self, place: _Place, parameter: Tensor) -> None:
        """Move the gradient that a backward has just made into the flat tensor, while it is in the
        processor's caches."""
        if self._filled is None:
            if self._given is not None:  # by the step before, whose gradients are dropped
                self._free.append(self._given)
                self._given = None
            self._filled, self._reached = self._flat(), set()
        assert parameter.grad is not None
        view = self._filled[place.start : place.stop].view_as(parameter)
        if place.start in self._reached:  # by another call of the same backward
            view.add_(parameter.grad)
        else:
            view.copy_(parameter.grad)
        self._reached.add(place.start)
        parameter.grad = None

    def _taken(self) -> Tensor:
        """Return the gradients of a worker as one flat tensor.

        A parameter that the loss does not reach has zeros. The forward of every worker reaches the
        same parameters: that of an exported model.
        """
        flat, self._filled = self._filled, None
        if flat is None:
            flat, self._reached = self._flat(), set()
        end = 0
        for place in self._places:
            flat[end : place.start] = 0.0
            end = place.stop if place.start in self._reached else place.start
        flat[end:] = 0.0
        return flat
