"""Send buckets in one order on all ranks, although each rank fills them in an order of its own.

The members of a group must call its collectives in the same order. The time at which a gradient is
ready depends on a rank's instructions and its part of the model, but the order in which gradients
are sent must not. So no bucket is sent before the buckets ahead of it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class InOrder(Generic[Item]):
    """A queue that passes `buckets` to `send` from the first to the last, each once a round.

    A bucket is sent when all of its items are ready and all earlier buckets are sent, or when the
    round ends.
    """

    def __init__(
        self, buckets: Iterable[Sequence[Item]], send: Callable[[Sequence[Item]], None]
    ) -> None:
        self._buckets = tuple(tuple(bucket) for bucket in buckets)
        self._bucket_of = {item: i for i, bucket in enumerate(self._buckets) for item in bucket}
        self._send = send
        self._begin()

    @property
    def items(self) -> Collection[Item]:
        """Return the items of all buckets."""
        return self._bucket_of.keys()

    def ready(self, item: Item) -> None:
        """Report that `item` will not change any more in this round; call it at most once a
        round."""
        bucket = self._bucket_of[item]
        self._missing[bucket] -= 1
        assert self._missing[bucket] >= 0, "ready twice"
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send_next()

    def end(self) -> None:
        """Send the remaining buckets, ready or not, and begin the next round."""
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
