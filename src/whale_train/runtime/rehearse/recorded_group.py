"""Process groups without other members, which record a rank's collectives and messages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.futures import Future

from whale_train.runtime.cpu.named_group import NamedGroup


@dataclass(frozen=True)
class Asked:
    """An operation on a group.

    kind: the name of the operation.
    sizes: the number of elements of each tensor.
    dtype: the name of the tensors' dtype, or '' without tensors.
    """

    kind: str
    sizes: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all tensors together."""
        return sum(self.sizes) * getattr(torch, self.dtype).itemsize if self.dtype else 0

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes)) or "nothing"
        return f"{self.kind} of {sizes} {self.dtype}".strip()


@dataclass
class Record:
    """The operations of one rank that involve other ranks, in their order.

    collectives: the collectives by the plan's name of the group.
    messages: the messages sent and received, by the other rank.
    events: posts and waits of messages as (`post` or `wait`, other rank, number of the message
        among the messages with that rank).
    """

    collectives: dict[str, list[Asked]] = field(default_factory=dict)
    messages: dict[int, list[Asked]] = field(default_factory=dict)
    events: list[tuple[str, int, int]] = field(default_factory=list)


class RecordedGroup(NamedGroup):
    """A group of `ranks` whose operations end at once, and are added to the `record` of this
    rank."""

    BACKEND = "recorded"

    def __init__(self, rank: int, ranks: Sequence[int], record: Record) -> None:
        super().__init__(rank, len(ranks))
        self.described = "world"
        self._ranks, self._record = tuple(ranks), record

    def _set_group_desc(self, description: str) -> None:
        self.described = description

    def ask(self, kind: str, tensors: Sequence[Tensor]) -> dist.Work:
        """Record a collective of `tensors`, and return work that is done."""
        name = "world" if self.described in ("", "default_pg") else self.described
        self._record.collectives.setdefault(name, []).append(_asked(kind, tensors))
        return _Done(list(tensors))

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> dist.Work:
        return self._post("send", tensors, target)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        return self._post("receive", tensors, source)

    def _post(self, kind: str, tensors: Sequence[Tensor], peer: int) -> dist.Work:
        other = self._ranks[peer]
        messages = self._record.messages.setdefault(other, [])
        messages.append(_asked(kind, tensors))
        self._record.events.append(("post", other, len(messages) - 1))
        return _Posted(self._record, other, len(messages) - 1, kind == "send")

    def shutdown(self) -> None:
        pass


def _asked(kind: str, tensors: Sequence[Tensor]) -> Asked:
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return Asked(kind, tuple(x.numel() for x in tensors), dtype)


class _Done(dist.Work):
    """A collective that is done when it is called."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Future[list[Tensor]] = Future()
        future.set_result(self._tensors)
        return future


class _Posted(dist.Work):
    """A message that is posted.

    A sent message counts as sent when `is_completed` is first called, which is when the next
    message is posted.
    """

    def __init__(self, record: Record, peer: int, number: int, is_sent: bool) -> None:
        super().__init__()
        self._record, self._peer, self._number = record, peer, number
        self._is_sent = is_sent

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if not self._is_sent:  # the device does not wait for its sends
            self._record.events.append(("wait", self._peer, self._number))
        return True

    def is_completed(self) -> bool:
        return self._is_sent


# Methods of ProcessGroup, with the collective's name and the position of the tensors that give its
# size.
_COLLECTIVES = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("all-reduce", 0)),
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_single"), ("all-gather", 0)),
    "allgather_into_tensor_coalesced": ("all-gather", 0),
    **dict.fromkeys(
        ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), ("reduce-scatter", 1)
    ),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 1),
    **dict.fromkeys(("alltoall", "alltoall_base"), ("all-to-all", 1)),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
}


def _recorded(kind: str, place: int) -> Callable[..., dist.Work]:
    """Return a method that records a collective of the tensors in its argument `place`."""

    def operation(group: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return group.ask(kind, list(_flat(args[place])))

    return operation


def _flat(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of `value`, a tensor or nested sequences of tensors."""
    if isinstance(value, Tensor):
        yield value
    else:
        for element in value:
            yield from _flat(element)


for _name, (_kind, _place) in _COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(RecordedGroup, _name, _recorded(_kind, _place))


def _barrier(group: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
    return group.ask("barrier", ())


RecordedGroup.barrier = _barrier  # type: ignore[method-assign,assignment]


@contextmanager
def alone(rank: int, world_size: int) -> Iterator[Record]:
    """Run the context as `rank` of a world whose other ranks do not exist.

    Yields the record of the rank's collectives and messages.
    """
    record = Record()

    def make(options: Any, _: object) -> dist.ProcessGroup:
        ranks = options.global_ranks_in_group or list(range(world_size))
        return RecordedGroup(options.group_rank, ranks, record)

    dist.Backend.register_backend(RecordedGroup.BACKEND, make, extended_api=True, devices=["cpu"])
    dist.init_process_group(
        RecordedGroup.BACKEND, store=HashStore(), rank=rank, world_size=world_size
    )
    try:
        yield record
    finally:
        dist.destroy_process_group()
