"""A thread that does what it is given, one after the other."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class InTurn:
    """The thread begins with the first job. It does not keep its process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Do `job`, which raises nothing, after all that came before it."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def end(self) -> None:
        """When all that was given is done, the thread ends. Nothing may be given after this."""
        self._jobs.put(None)


def _work(jobs: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # or what it holds would live until the next one comes
