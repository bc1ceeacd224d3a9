"""A thread that runs jobs one after another."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class InTurn:
    """A daemon thread, called `name`, that runs jobs in order.

    It starts with the first job, and does not keep its process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, after all jobs before it. Returns at once."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def end(self) -> None:
        """End the thread when all its jobs are done. Do not call `do` afterwards."""
        self._jobs.put(None)


def _work(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise its objects would live until the next job
