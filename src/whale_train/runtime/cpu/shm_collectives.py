"""Process groups whose members share one host's memory: the collectives of a split on CPUs.

A split puts a collective between any two layers, and all members wait for it. gloo sends it through
the loopback's TCP by a thread of its own. On a host whose cores are all busy, that took 0.6 to 5 ms
for a sum of 1 MB over two processes; two copies and an addition take a tenth of that.

This file owns the transport and the collectives over it (all-reduce, all-gather, reduce-scatter,
all-to-all); `runtime/comms/process_groups.py` chooses the groups that use it. torch.distributed's
own functions accept such a group like any other.
"""

import mmap
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from whale_train.runtime.cpu.named_group import NamedGroup

# The most that a member writes at once. Larger tensors are sent in parts, so that a sum is computed
# from caches, and the shared memory does not grow with the model.
SLOT_BYTES = 1 << 20

_Combine = Callable[..., Tensor]
_Take = Callable[[Tensor, int], None]


def home() -> str | None:
    """Return an id that is equal in processes that can share memory.

    Such processes have the same kernel and the same network namespace. The result is None if the
    system has no anonymous files to share.
    """
    if not hasattr(os, "memfd_create"):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


class SharedMemoryGroup(NamedGroup):
    """A process group that computes collectives in shared memory.

    Sums are computed in the order of the members, so that all members get the same bits. A
    collective is completed by its `wait`, or when the next collective begins. Reductions other than
    SUM, MAX and MIN raise NotImplementedError.
    """

    BACKEND = "shared_memory"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._slots = _Slots(store, rank, size, timeout)
        self._begun: _Exchange | None = None

    # torch has several overloads of these three methods; its functions call those with lists of one
    # tensor.
    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: Any
    ) -> dist.Work:
        """Begin to reduce a tensor over the members, in place."""
        (tensor,) = tensors
        combine, flat = _combination(options.reduceOp), tensor.view(-1)

        def take(parts: Tensor, start: int) -> None:
            _combine(combine, parts, flat[start : start + parts.shape[1]])

        return self._begin(flat, take)

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None
    ) -> dist.Work:
        """Begin to gather the members' tensors, of one size, into a list of one tensor per
        member."""
        (output,), (sent,) = outputs, inputs
        members = [received.view(-1) for received in output]

        def take(parts: Tensor, start: int) -> None:
            for member, part in zip(members, parts, strict=True):
                member[start : start + len(part)] = part

        return self._begin(sent.reshape(-1), take)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> dist.Work:
        """Begin to gather the members' tensors, [n] each, into `output`, [members * n]."""
        return self.allgather([list(output.view(self.size(), -1))], [tensor], options)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any
    ) -> dist.Work:
        """Begin to reduce a list of one tensor per member; this member gets the sum of its own."""
        (output,), (chunks,) = outputs, inputs
        combine, own_sum = _combination(options.reduceOp), output.view(-1)
        first = sum(chunk.numel() for chunk in chunks[: self.rank()])
        last = first + own_sum.numel()

        def take(parts: Tensor, start: int) -> None:
            low, high = max(first, start), min(last, start + parts.shape[1])
            if low < high:
                _combine(combine, parts[:, low - start : high - start], own_sum[low - first :])

        return self._begin(torch.cat([chunk.reshape(-1) for chunk in chunks]), take)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any) -> dist.Work:
        """Begin to reduce `tensor`, [members * n]; this member gets its part, [n]."""
        return self.reduce_scatter([output], [list(tensor.view(self.size(), -1))], options)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        options: Any = None,
    ) -> dist.Work:
        """Begin to exchange rows: `input_sizes` rows go to the members, `output_sizes` come from
        them.

        Without sizes, parts are equal.
        """
        sent = _elements(tensor, input_sizes, self.size())
        all_sent = torch.empty(self.size(), self.size(), dtype=torch.int64)
        self.all_gather_single(all_sent, torch.tensor(sent)).wait()
        flat = output.view(-1)
        ends = (all_sent.cumsum(1)[:, self.rank()]).tolist()
        sizes = all_sent[:, self.rank()].tolist()
        assert sizes == _elements(output, output_sizes, self.size())
        to = torch.cumsum(torch.tensor([0, *sizes]), 0).tolist()

        def take(parts: Tensor, start: int) -> None:
            for member, (end, size) in enumerate(zip(ends, sizes, strict=True)):
                low, high = max(end - size, start), min(end, start + parts.shape[1])
                if low < high:
                    first = to[member] + low - (end - size)
                    flat[first : first + high - low] = parts[member, low - start : high - start]

        padded = tensor.new_zeros(int(all_sent.sum(1).max()))  # all members put equally many
        padded[: tensor.numel()] = tensor.view(-1)
        return self._begin(padded, take)

    # These are the names of both methods up to torch 2.12.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Close the sockets to the other members."""
        self._slots.close()

    def _begin(self, sent: Tensor, take: _Take) -> dist.Work:
        """Begin a collective of the flat tensor `sent`, after completing the previous
        collective."""
        if self._begun is not None:
            self._begun.wait()
        self._begun = _Exchange(self._slots, sent, take)
        return self._begun


class _Exchange(dist.Work):
    """A collective: every member's flat tensor, in parts that all members can read.

    sent: [n]; this member's tensor.
    take: called with (parts, start) for each part: parts is [members, m], the elements [start,
        start + m) of all members.
    """

    def __init__(self, slots: "_Slots", sent: Tensor, take: _Take) -> None:
        super().__init__()
        self._slots, self._take = slots, take
        self._left = list(torch.split(sent, SLOT_BYTES // sent.element_size()))
        self._start = 0
        slots.put(self._left[0])

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        while self._left:
            part = self._left.pop(0)
            self._take(self._slots.parts(part), self._start)
            self._start += len(part)
            if self._left:
                self._slots.put(self._left[0])
        return True


class _Slots:
    """Shared memory in which every member has two slots, and a socket to every other member.

    A member writes its part into one slot and notifies the others. When all members have written,
    it reads their parts, and the next part goes to the other slot. A member that writes there has
    been notified by all others that they have finished reading it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._rank = rank
        self._peers = meet(store, rank, size, timeout)
        self._memory = _shared_memory(self._peers, rank, 2 * size * SLOT_BYTES)
        self._turn = 0

    def put(self, part: Tensor) -> None:
        """Write this member's part, [n] of at most SLOT_BYTES, and notify the others."""
        self._of(part)[self._rank] = part
        for peer in self._peers.values():
            peer.send(b".")

    def parts(self, part: Tensor) -> Tensor:
        """Wait until all members have put a part, and return the parts, [members, n].

        `part` is the part that this member put. The result is valid until the next `put`.

        Raises RuntimeError after the group's time limit, ConnectionError if a member has ended.
        """
        for member, peer in self._peers.items():
            try:
                notice = peer.recv(1)
            except TimeoutError:
                limit_s = peer.gettimeout()
                raise RuntimeError(f"timed out: {limit_s:g} s for member {member}") from None
            if not notice:
                raise ConnectionResetError(f"connection closed by peer, member {member}")
        all_parts = self._of(part)
        self._turn = 1 - self._turn
        return all_parts

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _of(self, part: Tensor) -> Tensor:
        """Return the current slots, as [members, n] of the dtype of `part`, [n]."""
        slots = self._memory.view(2, len(self._peers) + 1, SLOT_BYTES)[self._turn]
        return slots[:, : part.numel() * part.element_size()].view(part.dtype)


def _elements(tensor: Tensor, sizes: Sequence[int], members: int) -> list[int]:
    """Return the number of elements of `tensor` that belong to each member.

    They are the elements of `sizes` rows, or equal parts if `sizes` is empty.
    """
    if not sizes:
        return [tensor.numel() // members] * members
    row_elements = tensor.numel() // max(tensor.shape[0], 1)
    return [size * row_elements for size in sizes]


def _combination(operation: Any) -> _Combine:
    """Return the function that combines two tensors by a reduction of torch.distributed.

    Raises NotImplementedError for any reduction but SUM, MAX and MIN.
    """
    for known, combine in (
        (dist.ReduceOp.SUM, torch.add),
        (dist.ReduceOp.MAX, torch.maximum),
        (dist.ReduceOp.MIN, torch.minimum),
    ):
        if operation == known:  # torch's type of reductions has no hash of its own
            return combine
    raise NotImplementedError(f"{operation} through shared memory")


def _combine(combine: _Combine, parts: Tensor, out: Tensor) -> None:
    """Combine the parts, [members, n], of two or more members into the first n elements of
    `out`."""
    out = out[: parts.shape[1]]
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


_CREDENTIALS = struct.Struct("3i")  # Linux's SO_PEERCRED: process, user and group


def user_of(peer: socket.socket) -> int:
    """Return the id of the user at the other end of a Unix socket, as the kernel reports it."""
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)


def meet(
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    user_of: Callable[[socket.socket], int] = user_of,
) -> dict[int, socket.socket]:
    """Return a socket to every other member, by rank in the group.

    Members find each other's sockets by abstract names in `store`. An abstract name (it begins with
    a null) is no file, and disappears with its socket. All users of the host can see it and connect
    to it, so a connection from another user, as reported by `user_of`, is closed. Raises
    PermissionError where a name in the store leads to another user's socket.
    """
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.settimeout(timeout.total_seconds())
        listener.bind(f"\0whale-train {uuid4()}")
        listener.listen(size)
        store.set(str(rank), listener.getsockname())
        for member in range(rank):
            peer = socket.socket(socket.AF_UNIX, kind)
            peer.settimeout(timeout.total_seconds())
            peer.connect(store.get(str(member)))
            if user_of(peer) != os.geteuid():
                peer.close()
                raise PermissionError(f"member {member}'s socket is another user's")
            peer.sendall(rank.to_bytes(4, "big"))
            peers[member] = peer
        while len(peers) < size - 1:
            peer, _ = listener.accept()
            if user_of(peer) != os.geteuid():
                peer.close()
                continue
            peer.settimeout(timeout.total_seconds())
            peers[int.from_bytes(peer.recv(4), "big")] = peer
    return peers


def _shared_memory(peers: Mapping[int, socket.socket], rank: int, num_bytes: int) -> Tensor:
    """Return memory that all members see, uint8 [num_bytes].

    The memory is a file without a name, which the first member makes and sends to the others. It is
    freed when the last member has ended.
    """
    if rank == 0:
        file = os.memfd_create("whale-train")
        os.ftruncate(file, num_bytes)
        for peer in peers.values():
            socket.send_fds(peer, [b"."], [file])
    else:
        _, (file,), _, _ = socket.recv_fds(peers[0], 1, 1)
    memory = mmap.mmap(file, num_bytes)
    os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8)
