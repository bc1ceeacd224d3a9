"""What must be sent in one order everywhere, and is ready in another on every rank.

The members of a group must call its collectives in the same order. When a gradient is ready is a
matter of a rank's instructions and its part of the model; the order in which gradients are sent
is not: nothing is sent before those ahead of it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class InOrder(Generic[Item]):
    """`buckets` are given to `send` from the first to the last, each once a round: when all of it
    is ready and so is all before it, or when the round ends."""

    def __init__(
        self, buckets: Iterable[Sequence[Item]], send: Callable[[Sequence[Item]], None]
    ) -> None:
        self._buckets = tuple(tuple(bucket) for bucket in buckets)
        self._bucket_of = {item: i for i, bucket in enumerate(self._buckets) for item in bucket}
        self._send = send
        self._begin()

    @property
    def items(self) -> Collection[Item]:
        return self._bucket_of.keys()

    def ready(self, item: Item) -> None:
        """`item` will not change any more. Once a round."""
        bucket = self._bucket_of[item]
        self._missing[bucket] -= 1
        assert self._missing[bucket] >= 0, "ready twice"
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send_next()

    def end(self) -> None:
        """Send what is left, ready or not; the next round begins."""
        while self._next < len(self._buckets):
            self._send_next()
        self._begin()

    def _begin(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        self._send(bucket)
