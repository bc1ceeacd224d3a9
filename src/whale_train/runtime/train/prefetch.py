"""Read items ahead of their use, in a thread."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Reads items of consecutive steps ahead, in a thread.

    It calls `read(step)` from `first` to before `stop`, at most `depth` steps ahead of `next`. The
    thread ends after the last step or when it is closed, and does not keep its process alive.
    """

    def __init__(self, read: Callable[[int], Item], first: int, stop: int, depth: int = 2) -> None:
        self.next = first
        self._read, self._stop, self._depth = read, stop, depth
        self._changed = threading.Condition()
        self._ready: deque[Item | BaseException] = deque()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._work, args=(first,), name="prefetch", daemon=True
        )
        self._thread.start()

    def get(self) -> Item:
        """Return the item of step `next`, and advance `next`.

        Raises the error of `read`, and RuntimeError after the last step.
        """
        if self.next >= self._stop:
            raise RuntimeError(f"step {self.next} is after the last one that is read")
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready))
            item = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(item, BaseException):
            raise item
        self.next += 1
        return item

    def close(self) -> None:
        """Stop reading, and return once no read is running."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self, first: int) -> None:
        for step in range(first, self._stop):
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth)
                if self._is_closed:
                    return
            try:
                item: Item | BaseException = self._read(step)
            except Exception as error:
                item = error
            with self._changed:
                self._ready.append(item)
                self._changed.notify_all()
            if isinstance(item, BaseException):
                return
