"""Process groups that nobody else is in: they write down what a rank asks of the others."""

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
    """One operation on a group: its kind, the elements of each of its tensors, and their dtype."""

    kind: str
    sizes: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes) * getattr(torch, self.dtype).itemsize if self.dtype else 0

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes)) or "nothing"
        return f"{self.kind} of {sizes} {self.dtype}".strip()


@dataclass
class Record:
    """What a rank asked, by the plan's name of the group, and of each other rank: by its number,
    messages sent and received, in their order. A wait for a message is in `events` with its number
    among those of that rank; a post is there as well."""

    collectives: dict[str, list[Asked]] = field(default_factory=dict)
    messages: dict[int, list[Asked]] = field(default_factory=dict)
    events: list[tuple[str, int, int]] = field(default_factory=list)


class RecordedGroup(NamedGroup):
    """A group of `ranks` whose operations end at once, in the `record` of this rank."""

    BACKEND = "recorded"

    def __init__(self, rank: int, ranks: Sequence[int], record: Record) -> None:
        super().__init__(rank, len(ranks))
        self.described = "world"
        self._ranks, self._record = tuple(ranks), record

    def _set_group_desc(self, description: str) -> None:
        self.described = description

    def ask(self, kind: str, tensors: Sequence[Tensor]) -> dist.Work:
        """Write down a collective."""
        name = "world" if self.described in ("", "default_pg") else self.described
        self._record.collectives.setdefault(name, []).append(_asked(kind, tensors))
        return _Done(list(tensors))

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> dist.Work:
        return self._post("send", tensors, target)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        return self._post("receive", tensors, source)

    def _post(self, kind: str, tensors: Sequence[Tensor], peer: int) -> dist.Work:
        other = self._ranks[peer]
        listed = self._record.messages.setdefault(other, [])
        listed.append(_asked(kind, tensors))
        self._record.events.append(("post", other, len(listed) - 1))
        return _Posted(self._record, other, len(listed) - 1, kind == "send")

    def shutdown(self) -> None:
        pass


def _asked(kind: str, tensors: Sequence[Tensor]) -> Asked:
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return Asked(kind, tuple(x.numel() for x in tensors), dtype)


class _Done(dist.Work):
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
    """A message. One that is sent has left when it is asked whether it has, which is when the next
    is posted."""

    def __init__(self, record: Record, peer: int, number: int, is_sent: bool) -> None:
        super().__init__()
        self._record, self._peer, self._number = record, peer, number
        self._is_sent = is_sent

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if not self._is_sent:  # nothing on the device waits for what it sends
            self._record.events.append(("wait", self._peer, self._number))
        return True

    def is_completed(self) -> bool:
        return self._is_sent


# ProcessGroup's names of collectives: the field's, and the argument that says how much.
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
    def operation(group: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return group.ask(kind, list(_flat(args[place])))

    return operation


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from _flat(each)


for _name, (_kind, _place) in _COLLECTIVES.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(RecordedGroup, _name, _recorded(_kind, _place))


def _barrier(group: RecordedGroup, *args: Any, **kwargs: Any) -> dist.Work:
    return group.ask("barrier", ())


RecordedGroup.barrier = _barrier  # type: ignore[method-assign,assignment]


@contextmanager
def alone(rank: int, world_size: int) -> Iterator[Record]:
    """Inside it this process is `rank` of a world whose other ranks do not exist. Gives what the
    rank asks them."""
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
