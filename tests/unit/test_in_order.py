"""What is sent in one order, whatever the order in which it becomes ready."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whale_train.runtime.engines.bucket_queue import InOrder

BUCKETS = (("a", "b"), ("c",), ("d", "e", "f"), ("g",))
ITEMS = [item for bucket in BUCKETS for item in bucket]


class Sent:
    """Notes what was ready when each bucket was sent."""

    def __init__(self) -> None:
        self.in_order = InOrder(BUCKETS, self.send)
        self.buckets: list[Sequence[str]] = []
        self.ready: list[str] = []
        self.ended = False

    def send(self, bucket: Sequence[str]) -> None:
        assert self.ended or set(bucket) <= set(self.ready)
        self.buckets.append(bucket)

    def tell(self, item: str) -> None:
        self.ready.append(item)
        self.in_order.ready(item)


@given(st.permutations(ITEMS), st.integers(0, len(ITEMS)))
def test_every_bucket_once_in_the_listed_order(items: list[str], told: int) -> None:
    sent = Sent()
    for number, item in enumerate(items[:told]):
        sent.tell(item)
        # As many as are complete without a gap, and not one fewer.
        complete = [set(bucket) <= set(items[: number + 1]) for bucket in BUCKETS]
        assert len(sent.buckets) == (complete.index(False) if False in complete else 4)
    sent.ended = True
    sent.in_order.end()
    assert tuple(sent.buckets) == BUCKETS


def test_a_round_is_as_the_one_before() -> None:
    sent = Sent()
    sent.ended = True
    sent.tell("c")
    sent.in_order.end()
    sent.tell("c")
    assert len(sent.buckets) == 4  # "c" waits for the two before it again
    sent.tell("a")
    sent.tell("b")
    assert sent.buckets[4:] == list(BUCKETS[:2])
    with pytest.raises(AssertionError, match="ready twice"):
        sent.tell("c")
