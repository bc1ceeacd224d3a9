"""Messages between two CPU ranks of one host, through memory that both see.

Between stages gloo sends a value through the loopback's TCP by a thread of its own. Where ranks
compute on all cores, the sending thread is preempted as soon as it has woken the receiving side. It
then holds a lock for which gloo's thread on that side spins (docs/adr/013). Here the sender copies
a value into a slot that both sides have mapped and notifies the receiver; the receiver copies the
value out and returns the slot.

This file owns that protocol. `runtime/comms/process_groups.py` chooses the ranks that use it;
torch.distributed's own `isend` and `irecv` accept such a group like any other.
"""

import mmap
import os
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from select import POLLIN, POLLOUT, poll

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from whale_train.runtime.cpu.named_group import NamedGroup
from whale_train.runtime.cpu.shm_collectives import meet

_RECORD = struct.Struct("=Bqqq")  # kind of record, tag, slot, bytes
_VALUE, _NEW_SLOT, _FREE = range(3)
_PAGE = 4096


class SharedMessages(NamedGroup):
    """A process group of two ranks that send each other tensors, which are matched by their tags.

    A send does not wait for the receiver, unless the receiver's queue is full. A receive waits in
    `wait`.
    """

    BACKEND = "shared_messages"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        (self._peer,) = meet(store, rank, size, timeout, socket.SOCK_SEQPACKET).values()
        self._mine: list[Tensor] = []  # slots that this rank fills
        self._free: defaultdict[int, list[int]] = defaultdict(
            list
        )  # free slots of `_mine`, by size
        self._theirs: dict[int, Tensor] = {}
        self._read: list[int] = []  # slots of `_theirs` to be returned
        # (slot, bytes) of received values, by tag, in the order of arrival.
        self._come: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> dist.Work:
        """Send a tensor. It is copied into a slot before this method returns."""
        (tensor,) = tensors
        value = tensor.detach().reshape(-1).view(torch.uint8)
        slot = self._slot(value.numel())
        self._mine[slot][: value.numel()] = value
        self._say(_VALUE, tag, slot, value.numel())
        return _Sent()

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Return the work of a receive into a tensor; all of it is done in `wait`."""
        (tensor,) = tensors
        return _Receive(self, tensor, tag)

    def take(self, tensor: Tensor, tag: int) -> None:
        """Wait for a tensor that was sent with `tag`, and copy it into `tensor`.

        Raises RuntimeError after the group's time limit, ConnectionError if the other rank has
        ended.
        """
        while not self._come[tag]:
            self._hear()
        slot, count = self._come[tag].popleft()
        assert count == tensor.numel() * tensor.element_size(), (count, tensor.shape)
        tensor.view(-1).view(torch.uint8)[:] = self._theirs[slot][:count]
        self._read.append(slot)
        self._give_back()

    def shutdown(self) -> None:
        """Close the socket to the other rank."""
        self._peer.close()

    def _give_back(self) -> None:
        """Return the slots that were read, as far as the other side's queue has room.

        The other side may have received all its messages and wait elsewhere for this rank, so this
        rank must not wait for room.
        """
        while self._read and self._is_ready(POLLOUT):
            self._say(_FREE, 0, self._read.pop(), 0)

    def _slot(self, num_bytes: int) -> int:
        """Return the number of a free slot of at least `num_bytes`, making a new slot if none is
        free."""
        self._give_back()
        size = max(_PAGE, 1 << (num_bytes - 1).bit_length()) if num_bytes else _PAGE
        while not self._free[size] and self._is_ready(POLLIN):
            self._hear()
        if self._free[size]:
            return self._free[size].pop()
        file = os.memfd_create("whale-train")
        os.ftruncate(file, size)
        self._mine.append(_mapped(file, size))
        self._say(_NEW_SLOT, 0, len(self._mine) - 1, size, file)
        os.close(file)
        return len(self._mine) - 1

    def _say(self, kind: int, tag: int, slot: int, num_bytes: int, *files: int) -> None:
        """Send a record, with `files`, to the other side.

        While the other side's queue is full, this rank reads its own, so that two ranks that send
        do not wait for each other.

        Raises RuntimeError after the group's time limit.
        """
        record = _RECORD.pack(kind, tag, slot, num_bytes)
        while not self._is_ready(POLLOUT):
            if not self._is_ready(POLLIN | POLLOUT, self._peer.gettimeout()):
                raise self._late()
            if self._is_ready(POLLIN):
                self._hear()
        socket.send_fds(self._peer, [record], list(files))

    def _is_ready(self, event: int, within_s: float | None = 0.0) -> bool:
        """Return whether a record can be read (POLLIN) or sent (POLLOUT) within `within_s` seconds.

        None waits without a limit.
        """
        look = poll()
        look.register(self._peer, event)
        return bool(look.poll(None if within_s is None else 1e3 * within_s))

    def _hear(self) -> None:
        """Wait for one record and act on it.

        Raises RuntimeError after the group's time limit, ConnectionError if the other rank has
        ended.
        """
        try:
            record, files, _, _ = socket.recv_fds(self._peer, _RECORD.size, 1)
        except TimeoutError:
            raise self._late() from None
        if not record:
            raise ConnectionResetError(f"connection closed by peer, member {1 - self.rank()}")
        kind, tag, slot, num_bytes = _RECORD.unpack(record)
        if kind == _VALUE:
            self._come[tag].append((slot, num_bytes))
        elif kind == _FREE:
            self._free[self._mine[slot].numel()].append(slot)
        else:
            self._theirs[slot] = _mapped(files[0], num_bytes)
            os.close(files[0])

    def _late(self) -> RuntimeError:
        """Return the error of a wait beyond the group's time limit."""
        limit_s = self._peer.gettimeout()
        return RuntimeError(f"timed out: {limit_s:g} s for member {1 - self.rank()}")


class _Sent(dist.Work):
    """A send, complete from the beginning: its value is in a slot."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Receive(dist.Work):
    """A receive, which `wait` carries out."""

    def __init__(self, group: SharedMessages, tensor: Tensor, tag: int) -> None:
        super().__init__()
        self._group, self._tensor, self._tag = group, tensor, tag

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._group.take(self._tensor, self._tag)
        return True


def _mapped(file: int, num_bytes: int) -> Tensor:
    """Map a file, and return its memory, uint8 [num_bytes]."""
    return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
