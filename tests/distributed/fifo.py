"""Messages as NCCL carries them, between CPU processes: matched by order alone, one at a time on a
communicator, each from when both sides have posted it.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from tests.distributed.equality import run_job_as, train_and_save
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from whale_train.runtime.comms import process_groups
from whale_train.runtime.cpu.named_group import NamedGroup
from whale_train.runtime.emulate.worker_thread import InTurn
from whale_train.runtime.process import rank_main as worker


class FifoGroup(NamedGroup):
    """Two ranks. What is sent says how long it is: a receive of another length raises."""

    BACKEND = "fifo"

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        assert size == 2
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._stream = InTurn("fifo")

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return _Ordered(self._stream, lambda: self._send(tensor, target))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        return _Ordered(self._stream, lambda: self._receive(tensor, source))

    def shutdown(self) -> None:
        self._stream.end()

    def _send(self, tensor: Tensor, target: int) -> None:
        self._inner.send([torch.tensor([tensor.nbytes])], target, 0).wait()
        self._inner.send([tensor], target, 0).wait()
        self._inner.recv([torch.empty(1)], target, 0).wait()  # the other side has posted it

    def _receive(self, tensor: Tensor, source: int) -> None:
        length = torch.empty(1, dtype=torch.int64)
        self._inner.recv([length], source, 0).wait()
        if length.item() != tensor.nbytes:
            raise RuntimeError(f"{length.item()} bytes came, {tensor.nbytes} were awaited")
        self._inner.recv([tensor], source, 0).wait()
        self._inner.send([torch.ones(1)], source, 0).wait()


class _Ordered(dist.Work):
    def __init__(self, stream: InTurn, job: object) -> None:
        super().__init__()
        self._end: Future[None] = Future()
        assert callable(job)

        def run() -> None:
            try:
                job()
                self._end.set_result(None)
            except Exception as error:
                self._end.set_exception(error)

        stream.do(run)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._end.wait()
        return True

    def is_completed(self) -> bool:
        return bool(self._end.done())


def train_over_fifo(run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared) -> None:
    """A rank whose messages go as NCCL's would."""
    process_groups.SharedMessages = FifoGroup  # type: ignore[misc,assignment]
    train_and_save(run_dir, rank, world_size, prepared)


def run_fifo_job(overrides: list[str], run_dir: str) -> str:
    """Do what the command does, with such messages; why it failed."""
    return run_job_as(train_over_fifo, overrides, run_dir)
