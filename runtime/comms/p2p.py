"""Values between the chunks of a pipeline: sent without waiting, received ahead of their use.

A shard group holds a value that crosses whole on every member. Member j of the receiving group
gets it from member j modulo the sender's size, so every link between two stages carries its part.

Both ends know the shape and the dtype of all that comes, and post the messages between them in one
order (`strategies/schedule/messages.py`), each as one batch: NCCL has no tags. Where there are tags
(gloo, shared memory), each value has its own.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.base.value_type import ValueType
from whale_train.strategies.schedule.messages import Message


@dataclass(frozen=True)
class Passage:
    """A message between this rank and another, which this rank sends (`is_sent`) or receives."""

    message: Message
    is_sent: bool


@dataclass
class _Link:
    """The messages of a step between this rank and `peer`, and how far they are posted."""

    peer: int
    passages: Sequence[Passage]
    posted: int = 0
    # Values of messages that are posted next, and of those that were received: by message.
    given: dict[Message, list[Tensor]] = field(default_factory=dict)
    coming: dict[Message, tuple[list[dist.Work], list[Tensor]]] = field(default_factory=dict)


class Transport:
    """The point-to-point messages of this rank.

    `groups` joins it to each rank that it talks to; without one, a message goes through the group
    of all. `types` tells what values a message has.
    """

    def __init__(
        self,
        device: torch.device,
        groups: Mapping[int, dist.ProcessGroup],
        types: Callable[[Message], Sequence[ValueType]],
    ) -> None:
        self._device, self._groups, self._types = device, groups, types
        self._links: dict[int, _Link] = {}
        self._sent: deque[tuple[list[dist.Work], list[Tensor]]] = deque()

    def begin(self, passages: Mapping[int, Sequence[Passage]]) -> None:
        """Begin a step whose messages are `passages`, by the rank at their other end, each in the
        order that both ends post them in."""
        self._links = {peer: _Link(peer, tuple(listed)) for peer, listed in passages.items()}

    def send(self, message: Message, values: Sequence[Tensor], targets: Sequence[int]) -> None:
        """Send the values of a message to ranks. Does not wait.

        Raises RuntimeError where they are not of the types that the other side expects.
        """
        types = self._types(message)
        for value, expected in zip(values, types, strict=True):
            if ValueType.of(value) != expected:
                raise RuntimeError(f"{message} has {ValueType.of(value)}, {expected} is awaited")
        plain = [_as_sent(value.detach()).contiguous() for value in values if value.numel()]
        for target in targets:
            link = self._links[target]
            link.given[message] = plain
            self._post(link, message)

    def expect(self, message: Message, source: int) -> None:
        """Begin to receive a message, as soon as those that stand before it allow."""
        link = self._links[source]
        if message not in link.coming:
            self._post(link, message, ahead=True)

    def receive(self, message: Message, source: int) -> list[Tensor]:
        """Return the values of a message, when they have come."""
        link = self._links[source]
        if message not in link.coming:
            self._post(link, message)
        works, buffers = link.coming.pop(message)
        for work in works:
            work.wait()
        return buffers

    @property
    def passing(self) -> list[Tensor]:
        """Values on their way: to be received, and sent and not known to have left."""
        coming = (values for link in self._links.values() for _, values in link.coming.values())
        return [x for values in (*coming, *(sent for _, sent in self._sent)) for x in values]

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for link in self._links.values():
            assert link.posted == len(link.passages), (link.peer, link.posted)
        while self._sent:
            self._release()

    def _post(self, link: _Link, last: Message, ahead: bool = False) -> None:
        """Post the messages of a link up to `last`. A send that is not made yet may stand before
        one that is asked for `ahead` of its use."""
        while True:
            passage = link.passages[link.posted]
            message = passage.message
            if passage.is_sent and message not in link.given:
                assert ahead, (message, last)
                return
            if passage.is_sent:
                values = link.given.pop(message)
                works = self._batch(dist.isend, link, values)
                self._forget_sent()
                self._sent.append((works, values))  # which must live until they have left
            else:
                buffers = [
                    torch.empty(of.shape, dtype=of.dtype, device=self._device)
                    for of in self._types(message)
                ]
                filled = [_as_sent(buffer) for buffer in buffers if buffer.numel()]
                link.coming[message] = (self._batch(dist.irecv, link, filled), buffers)
            link.posted += 1
            if message == last:
                return

    def _batch(
        self, operation: Callable[..., dist.Work | None], link: _Link, values: Sequence[Tensor]
    ) -> list[dist.Work]:
        if not values:
            return []
        group = self._groups.get(link.peer)
        first_tag = link.posted * _MOST_VALUES
        return dist.batch_isend_irecv(
            [
                dist.P2POp(operation, value, link.peer, group=group, tag=first_tag + number)
                for number, value in enumerate(values)
            ]
        )

    def _forget_sent(self) -> None:
        """Release what was sent first, as far as it has left."""
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            self._release()

    def _release(self) -> None:
        works, _ = self._sent.popleft()
        for work in works:  # NCCL's hold the tensor until they are waited for
            work.wait()


_MOST_VALUES = 1 << 10  # that one message may have


def _as_sent(value: Tensor) -> Tensor:
    """`value` in a dtype that every backend sends: gloo has no bool."""
    return value.view(torch.uint8) if value.dtype == torch.bool else value
