"""Sum the gradients of logical workers in the order of the workers, whichever rank computed them.

Additions of floating-point numbers round, so the bits of a sum depend on its order. An all-reduce
adds what each rank has accumulated, and its order changes with the number of ranks. Here the first
worker's gradient is added to the second's, the third's to their sum, and so on
(`strategies/stages/logical_workers.py` deals the workers in rounds that allow it).

Every rank owns a slice of each bucket of gradients. After each round, the members of the round send
every owner its slice of their gradients, by an all-to-all, and the owner adds them up. After the
last round, the sums are gathered. Over n ranks with one worker each, that sends as many bytes as a
ring's all-reduce.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.engines.grad_reduce import in_buckets

# Elements at multiples of which a gradient begins in its bucket: 64 bytes, the alignment of torch's
# own tensors. Libraries may sum elements of another alignment in another order.
_ALIGNED = 16


class WorkerSums:
    """The sums of gradients over the logical workers of all ranks, once a step.

    parameters: the trained parameters; the same on all ranks.
    group: the ranks that run the workers.
    of_ranks: the workers of each member of `group`, as a plan's `LogicalWorkers.of_ranks`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        of_ranks: Sequence[Sequence[int]],
    ) -> None:
        self._group, self._ranks = group, len(of_ranks)
        self._rank = group.rank() if self._ranks > 1 else 0
        self._rounds = [
            [rank for rank, workers in enumerate(of_ranks) if turn < len(workers)]
            for turn in range(max(map(len, of_ranks)))
        ]
        self._buckets = [
            _Bucket(parameters, self._ranks) for parameters in in_buckets(reversed(parameters))
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
            bucket.give(self._group)
        self._turn = 0

    def wait(self) -> None:
        """Do nothing: `finish` has waited."""

    def _exchange(self) -> None:
        members = self._rounds[self._turn]
        for bucket in self._buckets:
            bucket.add(members, self._rank, self._group)
        self._turn += 1


@dataclass
class _Place:
    """The place of a parameter's gradient in the flat tensor of its bucket: [start, stop)."""

    parameter: nn.Parameter
    start: int
    stop: int


class _Bucket:
    """Gradients that are sent together, as one flat tensor of equal slices, one for each rank."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        self._places, end = list[_Place](), 0
        for parameter in parameters:
            self._places.append(_Place(parameter, end, end + parameter.numel()))
            end += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        self._slice, self._ranks = -(-end // (ranks * _ALIGNED)) * _ALIGNED, ranks
        self._sum: Tensor | None = None  # of this rank's slice, over the workers so far
        self._reached: list[bool] = []  # whether a parameter's gradient is there, by place

    def add(self, members: Sequence[int], rank: int, group: dist.ProcessGroup) -> None:
        """Add this round's gradients to the sum of this rank's slice. `members` are the ranks that
        have run a worker."""
        like, size = self._places[0].parameter, self._slice
        sent = like.new_empty(0)
        if rank in members:
            sent = self._taken()
        received = like.new_empty(len(members) * size)
        dist.all_to_all_single(
            received,
            sent,
            [size if member in members else 0 for member in range(self._ranks)],
            [size if rank in members else 0] * self._ranks,
            group=group,
        )
        for part in received.view(len(members), size):
            self._sum = part.clone() if self._sum is None else self._sum.add_(part)

    def give(self, group: dist.ProcessGroup) -> None:
        """Write the sums of all slices to the parameters' `.grad`."""
        assert self._sum is not None
        sums = self._sum.new_empty(self._ranks * self._slice)
        dist.all_gather_into_tensor(sums, self._sum, group=group)
        for place, reached in zip(self._places, self._reached, strict=True):
            if reached:
                place.parameter.grad = sums[place.start : place.stop].view_as(place.parameter)
        self._sum = None

    def _taken(self) -> Tensor:
        """Return the gradients as one flat tensor, and leave the parameters without them.

        A parameter that the loss does not reach has zeros. The forward of every worker reaches the
        same parameters: that of an exported model.
        """
        flat = self._places[0].parameter.new_zeros(self._ranks * self._slice)
        self._reached = [place.parameter.grad is not None for place in self._places]
        for place in self._places:
            if (gradient := place.parameter.grad) is not None:
                flat[place.start : place.stop] = gradient.reshape(-1)
                place.parameter.grad = None
        return flat
