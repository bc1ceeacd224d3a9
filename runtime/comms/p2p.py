"""Values between the chunks of a pipeline: sent without waiting, received ahead of their use.

A shard group holds a value that crosses whole on every member. Member j of the receiving group
gets it from member j modulo the sender's size, so every link between two stages carries its part.
Shapes and dtypes are what the sender's forward made (autocast and half precision change them):
they are told once, ahead of the first value of their kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

_HEADER = 10  # int64s: dtype, dimensions, extents
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.bool, torch.uint8, torch.int16, torch.int8,
)  # fmt: skip


@dataclass(frozen=True)
class Wire:
    """One value on its way between two positions, in one direction, for one micro-batch.

    `channel` is its edge and direction, `tag` tells it from all others between the same two
    ranks; `kind` is the same for values of equal shape and dtype (one channel, one value, one
    number of samples).
    """

    channel: int
    tag: int
    kind: tuple[int, ...]


class Transport:
    """Point-to-point messages of this rank: in `groups` by (source rank, target rank, channel), or
    in that of all ranks. Where messages are matched by order alone (NCCL), every channel has its
    own: values arrive in the order they are sent."""

    def __init__(
        self,
        device: torch.device,
        groups: Mapping[tuple[int, int, int], dist.ProcessGroup],
    ) -> None:
        self.device = device
        self._groups = groups
        self._known: dict[tuple[int, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]] = {}
        self._told: set[tuple[int, tuple[int, ...]]] = set()
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._posted: dict[tuple[int, int], tuple[dist.Work, Tensor, torch.dtype]] = {}

    def send(self, value: Tensor, targets: Sequence[int], wire: Wire) -> None:
        """Send `value` to ranks, who know what it is once told. Does not wait."""
        value = value.detach()
        plain = value.view(torch.uint8) if value.dtype == torch.bool else value
        plain = plain.contiguous()
        for target in targets:
            if (target, wire.kind) not in self._told:
                self._told.add((target, wire.kind))
                shape = [_DTYPES.index(value.dtype), value.dim(), *value.shape]
                header = torch.tensor(shape + [0] * (_HEADER - len(shape)), device=self.device)
                self._post_send(header, target, wire, 2 * wire.tag)
            if plain.numel():
                self._post_send(plain, target, wire, 2 * wire.tag + 1)

    def expect(self, source: int, wire: Wire) -> None:
        """Begin to receive, where what comes is known; `receive` takes it."""
        known = self._known.get((source, wire.kind))
        if known is None or (source, wire.tag) in self._posted:
            return
        dtype, shape = known
        if 0 in shape:
            return
        plain = torch.uint8 if dtype == torch.bool else dtype
        buffer = torch.empty(shape, dtype=plain, device=self.device)
        work = self._post_receive(buffer, source, wire, 2 * wire.tag + 1)
        self._posted[source, wire.tag] = (work, buffer, dtype)

    def receive(self, source: int, wire: Wire) -> Tensor:
        """Return the value, when it has come."""
        if (source, wire.kind) not in self._known:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
            self._post_receive(header, source, wire, 2 * wire.tag).wait()
            dtype, dims, *extents = header.tolist()
            self._known[source, wire.kind] = (_DTYPES[dtype], tuple(extents[:dims]))
        dtype, shape = self._known[source, wire.kind]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device=self.device)
        self.expect(source, wire)
        work, buffer, dtype = self._posted.pop((source, wire.tag))
        work.wait()
        return buffer.view(torch.bool) if dtype == torch.bool else buffer

    def settle(self) -> None:
        """Until everything sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _post_send(self, tensor: Tensor, target: int, wire: Wire, tag: int) -> None:
        group = self._groups.get((dist.get_rank(), target, wire.channel))
        work = dist.isend(tensor, target, group=group, tag=tag)
        assert work is not None
        if not work.is_completed():
            self._sent.append((work, tensor))  # the tensor must live until it has left

    def _post_receive(self, buffer: Tensor, source: int, wire: Wire, tag: int) -> dist.Work:
        group = self._groups.get((source, dist.get_rank(), wire.channel))
        work = dist.irecv(buffer, source, group=group, tag=tag)
        assert work is not None
        return work
