"""Operations over an emulated slow link: gloo's own, with delayed ends.

Only the calling thread ever waits for a rank whose progress may depend on this rank. A group's
collectives end in the order in which they began, which is the same on all members, and a send waits
for no rank. Delays sleep and so use no processor.
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
    """A collective in progress that ends when its emulated transfer does.

    The transfer can begin when all members have begun the operation. That moment is estimated as
    gloo's end less the transfer's time on this machine, or as this rank's beginning if that is
    later.

    inner: gloo's work.
    transfer: the emulated transfer.
    in_turn: the thread for the collectives of the group.
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
        """Wait until the emulated transfer has ended. Raises the error of the inner operation, if
        any."""
        self._end.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the emulated transfer has ended."""
        return self._end.has_come()

    def get_future(self) -> Any:
        """Return a future of the inner operation's value that completes with the emulated
        transfer."""
        inner = self._inner
        return self._end.then(lambda: inner.get_future().value())


class LateSend(dist.Work):
    """A message that is passed to gloo when it has been on its emulated link long enough.

    So it arrives late at a receiver that knows of no link. `send` passes it to gloo.
    """

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
        """Wait until the message has been passed to gloo and gloo has sent it."""
        self._end.wait()
        assert self._inner is not None
        return bool(self._inner.wait(timeout))

    def is_completed(self) -> bool:
        """Return whether gloo has sent the message."""
        return self._inner is not None and bool(self._inner.is_completed())


class _End:
    """The future end of an operation, with or without an error."""

    def __init__(self) -> None:
        self._here: Future[None] = Future()
        self._error: Exception | None = None

    def come(self, error: Exception | None = None) -> None:
        """Complete the operation, with its error if it failed."""
        self._error = error
        self._here.set_result(None)

    def has_come(self) -> bool:
        """Return whether the operation is complete."""
        return self._here.done()

    def wait(self) -> None:
        """Wait for the end. Raises the operation's error, if any.

        The error is raised without frames of the other thread, because the frames of this thread
        show the wait (runtime/failures/timeout_frames.py).
        """
        self._here.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def then(self, value: Callable[[], Any]) -> Future[Any]:
        """Return a future of `value()` that completes after this end.

        DistributedDataParallel reads the future in C++. An error that is set in Python would be a
        value there; an error that is raised is not.
        """

        def outcome(_: object) -> Any:
            self.wait()
            return value()

        return self._here.then(outcome)


def _sleep_until(transfer: Transfer, moment_s: float) -> None:
    """Sleep until `moment_s` on the link's clock."""
    left_s = moment_s - transfer.link.clock()
    if left_s > 0:
        time.sleep(left_s)
