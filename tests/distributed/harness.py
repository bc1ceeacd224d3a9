"""Runs a function on a few gloo processes and returns what each of them returned.

Ranks are forked from a server that has imported torch once, meet at a file, and are killed at a
deadline. The function is found again by its file and name, so any module-level function of a
test file will do; its arguments and results travel as plain pickles.
"""

import importlib.util
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

ROOT = Path(__file__).resolve().parents[2]


class RankError(AssertionError):
    """A rank raised, died or did not end in time. The message holds its traceback."""


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, deadline_s: float = 120.0
) -> list[Any]:
    """`function(*args)` on `size` ranks of one gloo group; the results in the order of the ranks.

    Raises RankError with the first failing rank's traceback, after ending all the others.
    """
    if str(ROOT) not in sys.path:  # the children get this path, and find this module by it
        sys.path.append(str(ROOT))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    # A pickle of our own: torch's would pass shared memory, which ends with the sender.
    call = pickle.dumps(args)
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            place = (function.__code__.co_filename, function.__qualname__)
            target = (sender, place, call, f"{folder}/meet", rank, size, deadline_s)
            process = context.Process(target=_rank_main, args=target, daemon=True)
            process.start()
            sender.close()
            ranks.append(process)
            pipes.append(receiver)
        try:
            return _results(pipes, time.monotonic() + deadline_s)
        finally:
            for process in ranks:
                process.join(timeout=1)
                if process.is_alive():
                    process.kill()
                    process.join()


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


def _rank_main(
    sender: Connection,
    place: tuple[str, str],
    call: bytes,
    meeting: str,
    rank: int,
    size: int,
    deadline_s: float,
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline_s),
        )
        result = _load(*place)(*pickle.loads(call))
        dist.barrier()
        dist.destroy_process_group()
        sender.send_bytes(pickle.dumps((False, result)))
    except BaseException:
        sender.send_bytes(pickle.dumps((True, traceback.format_exc())))
    sender.close()


def _load(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("rank_functions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
