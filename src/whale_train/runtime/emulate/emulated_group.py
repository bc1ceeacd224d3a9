"""Process groups of ranks that emulate devices and links of several speeds.

A rank that emulates a slower device (runtime/emulate/throttle.py) sleeps for the difference before
it communicates. An operation over a slow link (runtime/emulate/emulated_links.py) ends later.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from whale_train.runtime.cpu.named_group import NamedGroup
from whale_train.runtime.emulate.delayed_work import LateSend, LateWork
from whale_train.runtime.emulate.emulated_links import EmulatedLinks, Transfer, wire_bytes
from whale_train.runtime.emulate.throttle import Pace
from whale_train.runtime.emulate.worker_thread import InTurn

# A shorter transfer on a free link is not slowed: passing it to a thread would take as long.
_SHORTEST_S = 1e-4


def register(pace: Pace | None = None, links: EmulatedLinks | None = None) -> str:
    """Register a backend of gloo groups with this rank's `pace` and `links`, and return its
    name."""

    def make(options: Any, _: object) -> dist.ProcessGroup:
        return PacedGroup(options, pace, links)

    dist.Backend.register_backend("paced", make, extended_api=True, devices=["cpu"])
    return "paced"


class PacedGroup(NamedGroup):
    """A process group that delays the operations of an inner gloo group.

    options: torch's DistributedBackendOptions.
    pace: the slowdown that this rank emulates; None: full speed.
    links: the slow links that this rank emulates; None: no slow links.
    inner: the gloo group that carries out all operations.
    """

    def __init__(self, options: Any, pace: Pace | None, links: EmulatedLinks | None) -> None:
        store, rank, size = options.store, options.group_rank, options.group_size
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        self.inner = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.inner._register_backend(torch.device("cpu"), kind, gloo)
        self.inner._set_default_backend(kind)
        self.pace = pace
        self._links = links
        self._ranks = options.global_ranks_in_group or list(range(size))  # without ranks: the world
        self._link = None if links is None else links.among(self._ranks)
        self._ends_in_turn = InTurn("collectives")

    def transfer(self, operation: str, arguments: tuple[Any, ...]) -> Transfer | None:
        """Return the emulated transfer of an operation of `inner`, or None for an operation without
        delay.

        An operation is not delayed over a fast link, before links are measured, if it moves no
        bytes, or if it is short and its link is free.
        """
        link = self._link
        if operation == "send" and self._links is not None:
            link = self._links.among((self._ranks[self.rank()], self._ranks[arguments[1]]))
        if link is None:
            return None
        transfer = link.transfer(wire_bytes(operation, arguments, self.size()))
        if transfer is None or not transfer.nominal_s:
            return None
        return None if transfer.nominal_s < _SHORTEST_S and link.is_free() else transfer

    def begin(self, operation: str, *args: Any, **kwargs: Any) -> dist.Work:
        """Begin the operation `operation` of `inner`, and return work that ends as late as on its
        link."""
        if self.pace is not None:
            self.pace.settle()
        operate = getattr(self.inner, operation)
        transfer = self.transfer(operation, args)
        if transfer is None:
            return operate(*args, **kwargs)  # type: ignore[no-any-return]
        if operation == "send":
            return LateSend(lambda: operate(*args, **kwargs), transfer)
        return LateWork(operate(*args, **kwargs), transfer, self._ends_in_turn)

    def shutdown(self) -> None:
        """End the thread of collectives and shut down the inner group."""
        self._ends_in_turn.end()
        self.inner.shutdown()


class _Work(dist.Work):
    """An operation in progress. The computing of this rank since its beginning is slowed before its
    end.

    group: the group of a collective, by which a timeout is reported
        (runtime/failures/timeout_frames.py); None for a message.
    """

    def __init__(self, inner: dist.Work, pace: Pace | None, group: PacedGroup | None) -> None:
        super().__init__()
        self._inner, self._pace, self._group = inner, pace, group

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if self._pace is not None:
            self._pace.settle()
        return bool(self._inner.wait(timeout))

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def get_future(self) -> Any:
        return self._inner.get_future()


def _paced(name: str) -> Callable[..., dist.Work]:
    """Return PacedGroup's method for the operation `name` of a process group."""

    def operation(group: PacedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        work = group.begin(name, *args, **kwargs)
        return _Work(work, group.pace, None if name in _MESSAGES else group)

    return operation


_MESSAGES = ("send", "recv", "recv_anysource")
_OPERATIONS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_into_tensor_coalesced", "alltoall", "alltoall_base"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", *_MESSAGES),
    # Both names of two operations that torch renamed in 2.13.
    *("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
)
for _name in _OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(PacedGroup, _name, _paced(_name))
