"""Messages between the chunks of a pipeline: sent without waiting, received ahead of their use.

Every member of a shard group holds the whole of a value that crosses stages. Member j of the
receiving group gets the value from member j modulo the sender's size, so every link between two
stages carries its part.

Both ends know the shape and the dtype of every value to come. They post the messages between them
in one order (`strategies/schedule/messages.py`), each as one batch, as NCCL has no tags. On
backends with tags (gloo, shared memory), each value has its own tag.
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
    """A message between this rank and another.

    message: the message.
    is_sent: True if this rank sends it, False if this rank receives it.
    """

    message: Message
    is_sent: bool


@dataclass
class _Link:
    """The messages of one step between this rank and another.

    peer: the other rank.
    passages: all messages, in the order in which both ends post them.
    posted: the number of posted messages.
    given: the values of messages to send that are not posted yet.
    coming: the works and buffers of receives that are posted and not awaited yet.
    """

    peer: int
    passages: Sequence[Passage]
    posted: int = 0
    given: dict[Message, list[Tensor]] = field(default_factory=dict)
    coming: dict[Message, tuple[list[dist.Work], list[Tensor]]] = field(default_factory=dict)


class Transport:
    """The point-to-point messages of this rank.

    device: the device of received tensors.
    groups: the group for messages with a rank, by rank. Messages with other ranks go through the
        world.
    types: returns the types of a message's values, in order.
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
        """Begin a step.

        passages: the step's messages, by the rank at the other end, in the order in which both ends
        post them.
        """
        self._links = {
            peer: _Link(peer, tuple(peer_passages)) for peer, peer_passages in passages.items()
        }

    def send(self, message: Message, values: Sequence[Tensor], targets: Sequence[int]) -> None:
        """Begin to send the values of a message to each rank of `targets`, without waiting.

        Raises RuntimeError if the shapes or dtypes are not those that the receiver expects.
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
        """Begin to receive a message from rank `source`, as soon as the messages before it are
        posted."""
        link = self._links[source]
        if message not in link.coming:
            self._post(link, message, ahead=True)

    def receive(self, message: Message, source: int) -> list[Tensor]:
        """Wait for a message from rank `source`, and return its values."""
        link = self._links[source]
        if message not in link.coming:
            self._post(link, message)
        works, buffers = link.coming.pop(message)
        for work in works:
            work.wait()
        return buffers

    @property
    def passing(self) -> list[Tensor]:
        """Return the tensors in transit: the buffers of receives, and sent values that may not have
        left yet."""
        coming = (values for link in self._links.values() for _, values in link.coming.values())
        return [x for values in (*coming, *(sent for _, sent in self._sent)) for x in values]

    def finish(self) -> None:
        """End a step: wait until all sent values have left."""
        for link in self._links.values():
            assert link.posted == len(link.passages), (link.peer, link.posted)
        while self._sent:
            self._release()

    def _post(self, link: _Link, last: Message, ahead: bool = False) -> None:
        """Post the messages of a link up to `last`.

        With `ahead`, posting ends before the first send whose values are not given yet. Without
        `ahead`, all values to send must be given.
        """
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
                self._sent.append((works, values))  # the tensors must live until they are sent
            else:
                buffers = [
                    torch.empty(value_type.shape, dtype=value_type.dtype, device=self._device)
                    for value_type in self._types(message)
                ]
                filled = [_as_sent(buffer) for buffer in buffers if buffer.numel()]
                link.coming[message] = (self._batch(dist.irecv, link, filled), buffers)
            link.posted += 1
            if message == last:
                return

    def _batch(
        self, operation: Callable[..., dist.Work | None], link: _Link, values: Sequence[Tensor]
    ) -> list[dist.Work]:
        """Begin to send or receive (`operation`) the values of the link's next message, and return
        the works."""
        if not values:
            return []
        group = self._groups.get(link.peer)
        tagged = [(value, link.posted * _MOST_VALUES + i) for i, value in enumerate(values)]
        if self._device.type == "cpu":
            # Only NCCL gains from a batch, and torch 2.14 makes no batch for a group written in
            # Python.
            begun = (operation(value, link.peer, group=group, tag=tag) for value, tag in tagged)
            return [work for work in begun if work is not None]
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, value, link.peer, group=group, tag=tag) for value, tag in tagged]
        )

    def _forget_sent(self) -> None:
        """Release the oldest sends that are complete, so that their tensors can be freed."""
        while self._sent and all(work.is_completed() for work in self._sent[0][0]):
            self._release()

    def _release(self) -> None:
        """Wait for the oldest send and release its tensors."""
        works, _ = self._sent.popleft()
        for work in works:  # NCCL's works hold the tensor until they are awaited
            work.wait()


_MOST_VALUES = 1 << 10  # the most that one message may have


def _as_sent(value: Tensor) -> Tensor:
    """Return `value` in a dtype that every backend sends: a bool tensor as a uint8 view, as gloo
    has no bool."""
    return value.view(torch.uint8) if value.dtype == torch.bool else value
