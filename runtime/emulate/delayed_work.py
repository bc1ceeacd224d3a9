"""Operations over a slow link: gloo's own, that end as late as they would there.

No thread but the one that asks ever waits for a rank whose part may depend on that one: a
group's collectives end in the order they were begun, which is the same on all its members, and
sending waits for nobody. Sleeping takes no processor.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.futures import Future

from whale_train.runtime.emulate.emulated_links import Transfer
from whale_train.runtime.emulate.worker_thread import InTurn


class LateWork(dist.Work):
    """A collective that was begun, and ends when its transfer does.

    That could begin when all members had begun the operation, which is what gloo takes before its
    end. `in_turn` is the thread of its group.
    """

    def __init__(self, inner: dist.Work, transfer: Transfer, in_turn: InTurn) -> None:
        super().__init__()
        self._inner, self._end = inner, _End()
        end, begun_s = self._end, transfer.link.clock()

        def job() -> None:
            try:
                inner.wait()
                ready_s = max(begun_s, transfer.link.clock() - transfer.native_s)
                _sleep_until(transfer, transfer.link.occupy(ready_s, transfer.nominal_s))
                end.come()
            except Exception as error:
                end.come(error)

        in_turn.do(job)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._end.wait()
        return True

    def is_completed(self) -> bool:
        return self._end.has_come()

    def get_future(self) -> Any:
        inner = self._inner
        return self._end.then(lambda: inner.get_future().value())


class LateSend(dist.Work):
    """A message that is handed to gloo, by `send`, when it has been long enough on its link: it
    then comes to a receiver who knows of no link as late as it would."""

    def __init__(self, send: Callable[[], dist.Work], transfer: Transfer) -> None:
        super().__init__()
        self._end = _End()
        self._inner: dist.Work | None = None
        link = transfer.link
        end_s = link.occupy(link.clock(), transfer.nominal_s)

        def job() -> None:
            try:
                _sleep_until(transfer, end_s - transfer.native_s)
                self._inner = send()
                self._end.come()
            except Exception as error:
                self._end.come(error)

        link.in_turn.do(job)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._end.wait()
        assert self._inner is not None
        return bool(self._inner.wait(timeout))

    def is_completed(self) -> bool:
        return self._inner is not None and bool(self._inner.is_completed())


class _End:
    """A moment to come, and what went wrong until then."""

    def __init__(self) -> None:
        self._here: Future[None] = Future()
        self._error: Exception | None = None

    def come(self, error: Exception | None = None) -> None:
        self._error = error
        self._here.set_result(None)

    def has_come(self) -> bool:
        return self._here.done()

    def wait(self) -> None:
        """Raises what went wrong, without the other thread's frames: those of this one tell what
        was waited for (runtime/failures/timeout_frames.py)."""
        self._here.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def then(self, value: Callable[[], Any]) -> Future[Any]:
        """`value()` as a future, which DistributedDataParallel reads in C++: an error set in Python
        would be a value there, one that is raised is not."""

        def outcome(_: object) -> Any:
            self.wait()
            return value()

        return self._here.then(outcome)


def _sleep_until(transfer: Transfer, moment_s: float) -> None:
    left_s = moment_s - transfer.link.clock()
    if left_s > 0:
        time.sleep(left_s)
