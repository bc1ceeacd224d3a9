"""Process groups of ranks that keep a pace: they catch up before they communicate."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from whale_train.runtime.named_group import NamedGroup
from whale_train.runtime.pace import Pace


def register(pace: Pace) -> str:
    """The name of a backend that makes groups of gloo's whose member here keeps `pace`."""

    def make(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return PacedGroup(store, rank, size, timeout, pace)

    dist.Backend.register_backend("paced", make, devices=["cpu"])
    return "paced"


class PacedGroup(NamedGroup):
    """`inner` is a group of gloo's, which does all the work."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, pace: Pace) -> None:
        super().__init__(rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.inner = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.inner._register_backend(torch.device("cpu"), kind, gloo)
        self.inner._set_default_backend(kind)
        self.pace = pace

    def shutdown(self) -> None:
        self.inner.shutdown()


class _Work(dist.Work):
    """Of an operation that was begun: what was computed since then comes before its end."""

    def __init__(self, inner: dist.Work, group: PacedGroup) -> None:
        super().__init__()
        self._inner = inner
        self._group = group  # a name by which a wait in vain is told (runtime/waits.py)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._group.pace.settle()
        return bool(self._inner.wait(timeout))

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def get_future(self) -> Any:
        return self._inner.get_future()


def _paced(name: str) -> Callable[..., dist.Work]:
    def operation(group: PacedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        group.pace.settle()
        return _Work(getattr(group.inner, name)(*args, **kwargs), group)

    return operation


_OPERATIONS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_into_tensor_coalesced", "alltoall", "alltoall_base"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "send", "recv", "recv_anysource"),
    # These two by both of their names: torch gave them new ones in 2.13.
    *("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
)
for _name in _OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(PacedGroup, _name, _paced(_name))
