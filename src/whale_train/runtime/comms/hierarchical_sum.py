"""Sum a tensor over ranks of several hosts in two levels.

Each host's ranks reduce-scatter the tensor, the ranks with the same part on different hosts
all-reduce it, and each host's ranks all-gather the parts. So the network between hosts carries a
part for each rank, not the whole tensor around a ring of all ranks (Jia et al. 2018, arXiv
1807.11205, section 3.2). The plan says where it is done (`strategies/stages/gradient_sync.py`).
"""

from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.futures import Future

from whale_train.runtime.comms.layout_collectives import all_gather_single, reduce_scatter_single
from whale_train.runtime.emulate.emulated_group import PacedGroup
from whale_train.runtime.emulate.worker_thread import InTurn


class HierarchicalSum:
    """The sum over all ranks of a group that spans hosts.

    inside: the ranks of this host, in one order on all hosts.
    across: the ranks of other hosts at this rank's place.

    Nothing else may use the two groups: sums on CPUs run in a thread of their own, so that their
    order among other collectives is not known.
    """

    def __init__(self, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
        self.inside, self.across = inside, across
        self._in_turn = InTurn("gradient sums")

    @property
    def size(self) -> int:
        """Return the number of ranks that are summed over."""
        return self.inside.size() * self.across.size()

    def begin(self, tensor: Tensor) -> Future[Tensor]:
        """Begin to sum a flat tensor in place, and return the future of it.

        Sums are done in the order of the calls, which must be the same on all ranks. On CPUs each
        level would start wherever the one before ends, in gloo's threads and in an order of its
        own, so a thread does one sum after another. On GPUs the levels are enqueued at once.
        """
        if tensor.is_meta:
            self.now(tensor)
            return _ended(tensor)
        if tensor.device.type == "cuda":
            return self._enqueue(tensor)
        if isinstance(self.across, PacedGroup) and self.across.pace is not None:
            self.across.pace.settle()
        errors: list[Exception] = []
        done: Future[Tensor] = Future()

        def job() -> None:
            try:
                self.now(tensor)
            except Exception as error:
                errors.append(error)
            done.set_result(tensor)

        def outcome(_: Any) -> Tensor:
            if errors:
                raise errors[0]
            return tensor

        self._in_turn.do(job)
        return done.then(outcome)

    def now(self, tensor: Tensor) -> None:
        """Sum a flat tensor in place."""
        body, part, rest = self._parts(tensor)
        if body.numel():
            reduce_scatter_single(_own(part, body, self), body, group=self.inside)
        self._rest(tensor, body, part, rest)

    def _enqueue(self, tensor: Tensor) -> Future[Tensor]:
        """Enqueue the sum of a flat tensor on a GPU, and return the future of it."""
        body, part, rest = self._parts(tensor)
        if not body.numel():
            self._rest(tensor, body, part, rest)
            return _ended(tensor)
        own = _own(part, body, self)
        work = reduce_scatter_single(own, body, group=self.inside, async_op=True)
        assert work is not None

        def others(_: Any) -> Tensor:  # on a stream that waits for the first level
            self._rest(tensor, body, part, rest)
            return tensor

        summed: Future[Tensor] = work.get_future().then(others)
        return summed

    def _parts(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the elements that the host's ranks can share evenly, room for this rank's part of
        the sum, and the remaining elements.

        The remaining elements, fewer than the ranks of a host, are summed whole on every rank, and
        travel with its part.
        """
        evenly = tensor.numel() // self.inside.size() * self.inside.size()
        body, rest = tensor[:evenly], tensor[evenly:]
        return body, tensor.new_empty(evenly // self.inside.size() + rest.numel()), rest

    def _rest(self, tensor: Tensor, body: Tensor, part: Tensor, rest: Tensor) -> None:
        """Carry out all levels after the reduce-scatter."""
        own = _own(part, body, self)
        if rest.numel():
            part[own.numel() :] = rest
            dist.all_reduce(part[own.numel() :], group=self.inside)
        dist.all_reduce(part, group=self.across)
        if body.numel():
            all_gather_single(body, own, group=self.inside)
        rest.copy_(part[own.numel() :])


def _own(part: Tensor, body: Tensor, levels: HierarchicalSum) -> Tensor:
    """Return the room for this rank's part of `body`."""
    return part[: body.numel() // levels.inside.size()]


def _ended(tensor: Tensor) -> Future[Tensor]:
    """Return a completed future of `tensor`."""
    done: Future[Tensor] = Future()
    done.set_result(tensor)
    return done
