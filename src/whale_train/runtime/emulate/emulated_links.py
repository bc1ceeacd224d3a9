"""The emulated links of a rank, each as slow against the fastest as the link that it stands for.

This serves `launcher.link_speed`: between CPU processes of one machine all links are equally fast.
A transfer over a slower link takes as long as its bytes take at that link's fraction of the full
bandwidth, which is the measured bandwidth of this machine's gloo.

This file owns those figures and the times at which a link is free;
`runtime/emulate/delayed_work.py` and `runtime/emulate/emulated_group.py` delay transfers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.emulate.worker_thread import InTurn

# All-reduces of this many bytes measure the full bandwidth. The fastest of several counts, as the
# others may have shared the processors with something else.
_MEASURED_BYTES = 4 << 20
_MEASUREMENTS = 10


class EmulatedLinks:
    """The emulated links of one rank.

    relative: `relative[i][j]` is the bandwidth between ranks i and j divided by that of the fastest
        link.
    clock: returns seconds.
    sharing: for groups that leave hosts at the same time as others, by their ranks, the number of
        groups that share a host's connection, whose bandwidth is divided among them.
    full_bytes_s: the bandwidth of the fastest link, in bytes per second; None until `measure`, and
        until then all links are fast.
    """

    def __init__(
        self,
        relative: Sequence[Sequence[float]],
        clock: Callable[[], float] = time.perf_counter,
        sharing: Mapping[tuple[int, ...], int] | None = None,
    ) -> None:
        self.full_bytes_s: float | None = None
        self._relative, self._clock, self._sharing = relative, clock, sharing or {}
        self._links: dict[float, EmulatedLink] = {}

    def among(self, ranks: Sequence[int]) -> "EmulatedLink | None":
        """Return the link that a transfer among `ranks` occupies: the link of the slowest pair.

        The result is None for a fast link. Transfers over links of one bandwidth wait for each
        other.
        """
        relative = min((self._relative[i][j] for i, j in combinations(ranks, 2)), default=1.0)
        relative /= self._sharing.get(tuple(ranks), 1)
        if relative >= 1:
            return None
        return self._links.setdefault(relative, EmulatedLink(self, relative, self._clock))

    def measure(self, group: dist.ProcessGroup) -> None:
        """Measure the full bandwidth: the bytes per second that a member of a ring over all ranks
        moves.

        All ranks must call it, and get the same figure. `group` has all ranks, without emulation.
        """
        tensor, taken = torch.zeros(_MEASURED_BYTES // 4), []
        for _ in range(_MEASUREMENTS):
            started = self._clock()
            group.allreduce([tensor]).wait()
            taken.append(self._clock() - started)
        fastest = torch.tensor([min(taken)], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        group.allreduce([fastest], options).wait()
        self.full_bytes_s = wire_bytes("allreduce", ([tensor],), group.size()) / fastest.item()


class EmulatedLink:
    """An emulated link, which carries one transfer after another.

    relative: the link's bandwidth divided by that of the fastest link.
    in_turn: the thread for sends over the link.
    """

    def __init__(self, links: EmulatedLinks, relative: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.in_turn = InTurn("sends")
        self._links, self._relative = links, relative
        self._lock, self._free_at_s = Lock(), 0.0

    def transfer(self, num_bytes: float) -> "Transfer | None":
        """Return the transfer of `num_bytes` over this link, or None before the bandwidth is
        measured."""
        full = self._links.full_bytes_s
        if full is None:
            return None
        return Transfer(self, num_bytes / (self._relative * full), num_bytes / full)

    def occupy(self, ready_s: float, seconds: float) -> float:
        """Reserve the link for `seconds`, and return the time at which this transfer ends.

        The transfer begins at `ready_s`, or at the end of the link's last transfer if that is
        later.
        """
        with self._lock:
            self._free_at_s = max(self._free_at_s, ready_s) + seconds
            return self._free_at_s

    def is_free(self) -> bool:
        """Return whether no transfer occupies the link."""
        return self._free_at_s <= self.clock()


@dataclass(frozen=True)
class Transfer:
    """The times of one transfer over `link`.

    nominal_s: the seconds on the emulated link.
    native_s: the seconds that this machine itself takes, which are part of `nominal_s`.
    """

    link: EmulatedLink
    nominal_s: float
    native_s: float


def wire_bytes(operation: str, arguments: Sequence[Any], members: int) -> float:
    """Return the bytes that each member moves over its link in an operation; 0 if it moves nothing.

    Collectives are rings, as in `strategies/cost/collectives.py`.

    operation: ProcessGroup's name of the operation.
    arguments: the operation's positional arguments.
    members: the size of the group.
    """
    if operation not in _MOVED or members == 1:
        return 0.0
    position, rings = _MOVED[operation]
    num_bytes = _bytes(arguments[position])
    if rings is None:  # the argument is one member's part
        return num_bytes * (members - 1)
    return num_bytes * (rings * (members - 1) / members if rings else 1)


# For each operation: the position of an argument with as many bytes as the whole value, and the
# number of times that a ring moves all of the value but one part (0: the value is passed on whole;
# None: the argument is one part).
_MOVED: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), (0, 2)),
    **dict.fromkeys(("reduce", "broadcast", "send"), (0, 0)),
    **dict.fromkeys(("allgather", "allgather_into_tensor_coalesced"), (0, 1)),
    **dict.fromkeys(("_allgather_base", "all_gather_single"), (0, 1)),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor_coalesced"), (1, 1)),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), (1, 1)),
    **dict.fromkeys(("alltoall", "alltoall_base"), (1, 1)),
    "gather": (1, None),
    "scatter": (0, None),
}


def _bytes(value: Tensor | Sequence[Any]) -> int:
    """Return the number of bytes of a tensor, or of all tensors in nested sequences."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(part) for part in value)
