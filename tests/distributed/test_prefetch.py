"""Batches that are read ahead."""

import threading
import time

import pytest

from whale_train.runtime.train.prefetch import Prefetch


def test_steps_come_in_order_and_no_more_are_read_than_asked_for() -> None:
    read: list[int] = []
    ahead = Prefetch(lambda step: (read.append(step), step)[1], 3, 9, depth=2)
    assert [ahead.get() for _ in range(2)] == [3, 4]
    deadline = time.monotonic() + 10
    while len(read) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert read == [3, 4, 5, 6]  # two ahead of what was taken
    assert [ahead.get() for _ in range(4)] == [5, 6, 7, 8]
    with pytest.raises(RuntimeError, match="step 9 is after the last"):
        ahead.get()
    ahead.close()


def test_the_next_is_read_while_the_last_is_used() -> None:
    """A reader that waits to be seen at work while this thread has what came before."""
    at_work = threading.Event()

    def read(step: int) -> int:
        if step == 1:
            at_work.set()
        return step

    ahead = Prefetch(read, 0, 2, depth=1)
    assert ahead.get() == 0
    assert at_work.wait(10)
    assert ahead.get() == 1
    ahead.close()


def test_what_reading_raises_is_raised_where_it_is_used() -> None:
    def read(step: int) -> int:
        if step == 1:
            raise OSError("the disk has gone")
        return step

    ahead = Prefetch(read, 0, 5)
    assert ahead.get() == 0
    with pytest.raises(OSError, match="the disk has gone"):
        ahead.get()
    ahead.close()


def test_it_can_be_closed_while_it_waits() -> None:
    ahead = Prefetch(lambda step: step, 0, 1000, depth=1)
    ahead.close()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())
