"""A rank's links, each as slow against the fastest as the ones it stands for.

For `launcher.link_speed`: between CPU processes of one machine all links are equal. What a
transfer over a slower one takes is the bytes it moves over that link's part of the full bandwidth,
which is what this machine's gloo is measured to move.

Owns those figures and when a link is free; that transfers wait for it is
`runtime/emulate/delayed_work.py`'s and `runtime/emulate/emulated_group.py`'s.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.emulate.worker_thread import InTurn

# An all-reduce of this many bytes, as often, gives the full bandwidth: the fastest of them, for the
# others shared the processors with something else.
_MEASURED_BYTES = 4 << 20
_MEASUREMENTS = 10


class EmulatedLinks:
    """Those of the rank that makes it. `relative[i][j]` is the bandwidth between ranks i and j over
    that of the fastest link. Until `measure`, all of them are fast."""

    def __init__(
        self, relative: Sequence[Sequence[float]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.full_bytes_s: float | None = None
        self._relative, self._clock = relative, clock
        self._links: dict[float, EmulatedLink] = {}

    def among(self, ranks: Sequence[int]) -> "EmulatedLink | None":
        """Return what a transfer among `ranks` waits for: the link of the slowest two; None for a
        fast one. Transfers that wait for links of one bandwidth wait for each other."""
        relative = min((self._relative[i][j] for i, j in combinations(ranks, 2)), default=1.0)
        if relative >= 1:
            return None
        return self._links.setdefault(relative, EmulatedLink(self, relative, self._clock))

    def measure(self, group: dist.ProcessGroup) -> None:
        """Find the full bandwidth: what a member of a ring over all ranks moves in a second. All
        call it, `group` being theirs without any slowing, and all agree."""
        tensor, taken = torch.zeros(_MEASURED_BYTES // 4), []
        for _ in range(_MEASUREMENTS):
            started = self._clock()
            group.allreduce([tensor]).wait()
            taken.append(self._clock() - started)
        fastest = torch.tensor([min(taken)], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        group.allreduce([fastest], options).wait()
        self.full_bytes_s = moved_bytes("allreduce", ([tensor],), group.size()) / fastest.item()


class EmulatedLink:
    """One transfer after another. `in_turn` is a thread for what is to be sent over it."""

    def __init__(self, links: EmulatedLinks, relative: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.in_turn = InTurn("sends")
        self._links, self._relative = links, relative
        self._lock, self._free_at_s = Lock(), 0.0

    def transfer(self, num_bytes: float) -> "Transfer | None":
        """Return what moving `num_bytes` takes; None where that is not known yet."""
        full = self._links.full_bytes_s
        if full is None:
            return None
        return Transfer(self, num_bytes / (self._relative * full), num_bytes / full)

    def occupy(self, ready_s: float, seconds: float) -> float:
        """When a transfer of so many seconds ends that could begin at `ready_s`."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, ready_s) + seconds
            return self._free_at_s

    def is_free(self) -> bool:
        return self._free_at_s <= self.clock()


@dataclass(frozen=True)
class Transfer:
    """What one takes over `link`: `nominal_s`, of which `native_s` is this machine's own time."""

    link: EmulatedLink
    nominal_s: float
    native_s: float


def moved_bytes(operation: str, arguments: Sequence[Any], members: int) -> float:
    """Return what each member moves over its link, by ProcessGroup's name of the operation and what
    it is called with. Collectives are rings, as in `strategies/cost/roofline.py`; 0 for what moves
    nothing."""
    if operation not in _MOVED or members == 1:
        return 0.0
    position, rings = _MOVED[operation]
    whole = _bytes(arguments[position])
    if rings is None:  # one member's part of what is gathered or scattered
        return whole * (members - 1)
    return whole * (rings * (members - 1) / members if rings else 1)


# The argument that is, or has as many bytes as, the whole value; how often a ring moves all of it
# but one part (0: the value is handed on whole; None: the argument is one part).
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
    """Return the bytes of a tensor, or of all in (lists of) lists."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(each) for each in value)
