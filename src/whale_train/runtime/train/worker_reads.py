"""Read a rank's training samples in separate processes, ahead of the steps.

The user's own code runs in them: it may be slow, and it draws from the global generators, which in
the rank itself belong to the model's dropout.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from signal import SIGKILL, strsignal
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from whale_train.data.dataset import Batch as Arrays
from whale_train.data.dataset import Indices
from whale_train.errors import RequestError

_END_S = 2.0
Chosen = tuple[Indices, Indices]  # indices of samples, and their draws


class WorkerReads:
    """Micro-batches that worker processes read, step after step.

    samples: returns samples by their indices and draws.
    chosen: returns the indices and draws of each micro-batch of a step.
    workers: the number of processes.
    first: the step that is read first.
    """

    def __init__(
        self,
        samples: Callable[[Indices, Indices], Arrays],
        chosen: Callable[[int], Sequence[Chosen]],
        workers: int,
        first: int,
    ) -> None:
        self.next = first
        self._chosen = chosen
        loader: DataLoader[Any] = DataLoader(
            _Read(samples),
            batch_size=None,
            sampler=_Steps(chosen, first),
            num_workers=workers,
            multiprocessing_context="fork",
        )
        self._batches = iter(loader)

    def read(self, step: int) -> list[dict[str, Tensor]]:
        """Return the micro-batches of a step, which must be the step after the last one read.

        Raises the error of a worker, with its traceback, and RuntimeError where a worker has ended.
        """
        assert step == self.next, (step, self.next)
        self.next += 1
        return [next_of(self._batches) for _ in self._chosen(step)]

    def close(self) -> None:
        """End the processes."""
        shut_down = getattr(self._batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def next_of(batches: Iterator[Any]) -> Any:
    """Return the next item of the iterator of a loader with workers.

    Raises the error of a worker, with its traceback, and RuntimeError where a worker has ended.
    """
    try:
        return next(batches)
    except (OSError, EOFError, RuntimeError) as error:
        workers: Sequence[Any] = getattr(batches, "_workers", ())
        if not isinstance(error, RuntimeError):  # the connection broke: the worker is just ending
            for worker in workers:
                worker.join(_END_S / len(workers))
        codes = [worker.exitcode for worker in workers if worker.exitcode is not None]
        if not codes:
            raise
        how = f"with status {codes[0]}"
        if codes[0] < 0:
            how = f"by signal {-codes[0]} ({strsignal(-codes[0])})"
            how += ", as where memory runs out" if codes[0] == -SIGKILL else ""
        raise RuntimeError(f"a process that reads samples has ended {how}") from error


class _Read(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: Callable[[Indices, Indices], Arrays]) -> None:
        self._samples = samples

    def __getitem__(self, chosen: Chosen) -> dict[str, Tensor]:
        try:
            arrays = self._samples(*chosen)
        except RequestError as error:  # a loader would rebuild this error from its text alone
            raise RuntimeError(str(error)) from error
        return {name: torch.from_numpy(x) for name, x in arrays.items()}


class _Steps(Sampler[Chosen]):
    """The indices and draws of micro-batches, from the first step on, without an end."""

    def __init__(self, chosen: Callable[[int], Sequence[Chosen]], first: int) -> None:
        self._of_step, self._first = chosen, first

    def __iter__(self) -> Iterator[Chosen]:
        for step in count(self._first):
            yield from self._of_step(step)
