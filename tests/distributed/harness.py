"""Runs a function on a few gloo processes and returns what each of them returned.

Ranks are forked from a server that has imported `preloaded` once in a session, meet at a file, and
are killed at a deadline. The function is found again by its file and name, so any module-level
function of a test file will do; its arguments and results travel as plain pickles.
"""

import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from whale_train.machine.parents import end_with_parent

ROOT = Path(__file__).resolve().parents[2]


class RankError(AssertionError):
    """A rank raised, died or did not end in time. The message holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    prepare: Callable[..., Any] | None = None,
    deadline_s: float = 120.0,
) -> list[Any]:
    """Return `function(*args)` of `size` ranks of one gloo group, in the order of the ranks.

    With `prepare`, ranks are forked from one process that has called `prepare(*args)`, and what
    it returned, inherited and not pickled, is the first argument of `function`.

    Raises RankError with the first failing rank's traceback, after ending all the others.
    """
    start_server()
    context = multiprocessing.get_context("forkserver")
    # A pickle of our own: torch's would pass shared memory, which ends with the sender.
    call = pickle.dumps(args)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            _Rank(sender, _place(function), call, f"{folder}/meet", rank, size, deadline_s)
            for rank, (_, sender) in enumerate(pipes)
        ]
        if prepare is None:
            processes = [context.Process(target=rank.main, daemon=True) for rank in ranks]
        else:
            # Not a daemon, which may have no children.
            processes = [context.Process(target=_fork, args=(_place(prepare), call, ranks))]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            receivers = [receiver for receiver, _ in pipes]
            return _results(receivers, time.monotonic() + deadline_s)
        finally:
            for process in processes:
                process.join(timeout=1)
                if process.is_alive():
                    process.kill()
                    process.join()


def start_server() -> None:
    """Start the process that ranks are forked from, unless there is one."""
    if str(ROOT) not in sys.path:  # the children get this path, and find this module by it
        sys.path.append(str(ROOT))
    forkserver.set_forkserver_preload(["tests.distributed.preloaded"])
    # The server itself knows no path but that of the environment it starts in.
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        forkserver.ensure_running()


def _results(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankError(f"ranks {late} had not ended at the deadline")
        for pipe in ready:
            rank = next(i for i, candidate in enumerate(pipes) if candidate is pipe)
            try:
                failed, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if failed:
                raise RankError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


@dataclass(frozen=True)
class _Rank:
    """A rank to be: where it sends its result, its function's place, the pickled arguments of the
    function, and the file that the ranks meet at."""

    sender: Connection
    place: tuple[str, str]
    call: bytes
    meeting: str
    rank: int
    size: int
    deadline_s: float

    def main(self, *prepared: Any) -> None:
        """Be that rank, and send (False, its result), or (True, its traceback)."""
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self.meeting}",
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self.deadline_s),
            )
            result = _load(*self.place)(*prepared, *pickle.loads(self.call))
            dist.barrier()
            dist.destroy_process_group()
            self.sender.send_bytes(pickle.dumps((False, result)))
        except BaseException:
            self.sender.send_bytes(pickle.dumps((True, traceback.format_exc())))
        self.sender.close()


def _fork(place: tuple[str, str], call: bytes, ranks: list[_Rank]) -> None:
    """Prepare, fork the ranks, which end with this process, and wait for them."""
    torch.set_num_threads(1)  # threads would not be there after a fork
    try:
        prepared = _load(*place)(*pickle.loads(call))
    except BaseException:
        for rank in ranks:
            rank.sender.send_bytes(pickle.dumps((True, traceback.format_exc())))
        return
    gc.freeze()
    parent = os.getpid()

    def main(rank: _Rank) -> None:
        end_with_parent(parent, signal.SIGKILL)
        for other in ranks:
            if other is not rank:
                other.sender.close()
        rank.main(prepared)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(rank,)) for rank in ranks]
    for process in processes:
        process.start()
    for rank in ranks:
        rank.sender.close()
    for process in processes:
        process.join()


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__code__.co_filename, function.__qualname__


def _load(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("rank_functions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
