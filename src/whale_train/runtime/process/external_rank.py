"""Run a rank that torchrun or srun started: find its job and join it.

    python -m whale_train.runtime.process.external_rank [--run-dir DIR --parent PID | --refused]

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT place the rank.
WHALE_TRAIN_JOB_KEY is the key of the messages that the rank believes. The `whale-train` that
composes the job starts rank 0 with the run directory. Rank 0 writes the hosts of all ranks to it,
waits for its plan, and sends the other ranks the job, or a message that there is no job. With
`--refused` it sends that message at once. Hosts need not share any files.

Exit status: 0 done; 1 failed; 2 the request was refused.
"""

import argparse
import hmac
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from types import FrameType

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from whale_train.errors import LaunchError
from whale_train.machine.hosts import HOSTS, Seen, hosts_to_json, joined
from whale_train.machine.parents import STARTER, end_with_parent, watch_parent
from whale_train.runtime.base.job_key import JobKey
from whale_train.runtime.cpu.threads import num_threads, set_num_threads
from whale_train.runtime.failures.exchange import FailureExchange
from whale_train.runtime.failures.failure import (
    FAILURE_FILE,
    failure_among,
    record_failure,
    step_in_progress,
    write_record,
    write_whole,
)
from whale_train.runtime.process.fork_server import POLL_S, log_to, wait_until_ready
from whale_train.runtime.process.job_folder import JobFolder, take_place
from whale_train.runtime.process.job_message import Job, opened, sealed
from whale_train.runtime.process.preload import preload

LEAVING = timedelta(seconds=60)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of this module, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m whale_train.runtime.process.external_rank")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--parent", type=int, help="end with this process")
    parser.add_argument("--refused", action="store_true", help="tell the others there is no job")
    options = parser.parse_args(arguments)
    # A rank waits for the others in C++, where no Python handler would run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if options.parent is not None:
        end_with_parent(options.parent, signal.SIGTERM)
        watch_parent(options.parent)
    elif os.environ.get(STARTER):  # the command that became this process has told the kernel
        watch_parent(os.getppid())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_dir: Path | None = options.run_dir
    try:
        key = JobKey.from_environment()
        store = _meet(rank, key)
        if rank == 0:
            folder = "" if run_dir is None else JobFolder.made(run_dir).to_json()
            store.set("folder", key.signed(folder))  # type: ignore[arg-type]
        folder = key.checked(store.get("folder"), "rank 0")
        seen = Seen.here(shares=bool(folder) and JobFolder.from_json(folder).is_here)
        store.set(f"seen/{rank}", key.signed(seen.to_json()))  # type: ignore[arg-type]
        if run_dir is not None:
            hosts = joined(_seen(store, key, other) for other in range(world_size))
            write_whole(run_dir / HOSTS, hosts_to_json(hosts))
        if not options.refused:
            _prepare_for_any_job(silent=run_dir is None)
        if rank == 0:
            there_is_one = run_dir is not None and wait_until_ready(run_dir, options.parent)
            message = sealed(key, Job.read(run_dir) if run_dir and there_is_one else None)
            store.set("job", message)  # type: ignore[arg-type]  # torch's stub has str alone
        job = opened(key, store.get("job"))
    except Exception as error:
        if run_dir is None:  # no job has a place for the failure
            sys.stderr.write(f"error: rank {rank} did not meet the others: {error}\n")
        else:
            failure = failure_among({rank: record_failure(run_dir, rank, error, None)}, world_size)
            write_record(run_dir / FAILURE_FILE, asdict(failure))
        return 1
    status = 2 if job is None else _train(job, rank, world_size, store, key)
    if status != 1:
        _leave(store, rank, world_size)
    return status


def _seen(store: Store, key: JobKey, rank: int) -> Seen:
    """Wait for the report of `rank` on its host, and return the report."""
    text = key.checked(store.get(f"seen/{rank}"), f"rank {rank}")
    return Seen.from_json(text)


def _prepare_for_any_job(silent: bool) -> None:
    """Import the modules that every job needs, while rank 0 resolves its plan.

    `silent` drops DeepSpeed's output to stdout, for ranks that have no log yet.
    """
    if silent:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    preload()


def _meet(rank: int, key: JobKey) -> Store:
    """Return the store of this job, whose keys begin with the job's nonce.

    Raises LaunchError where the store cannot be opened, has another job's key, or is used by
    another process as the same rank.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        world_store, _, _ = next(rendezvous("env://"))
    except dist.DistError as error:
        rule = f"MASTER_PORT: {where} cannot be used ({str(error).splitlines()[0]})"
        raise LaunchError(f"{rule}; set MASTER_PORT to a free port of rank 0's host") from None
    public = PrefixStore("whale_train", world_store)
    if rank == 0:
        public.set("key", key.fingerprint)
    elif not hmac.compare_digest(public.get("key"), key.fingerprint.encode()):
        rule = f"MASTER_PORT: the job at {where} has another key than rank {rank}"
        remedy = "give all ranks the same WHALE_TRAIN_SECRET and run id"
        raise LaunchError(f"{rule}; {remedy}, or set MASTER_PORT to a port of their own")
    store = PrefixStore(key.nonce, public)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return PrefixStore(name_of_start(store, rank), store)
    if store.add(f"here/{rank}", 1) > 1:
        rule = f"MASTER_PORT: another rank {rank} is at {where}, so that port is another job's"
        raise LaunchError(f"{rule}; set MASTER_PORT to a free port of rank 0's host")
    return store


def name_of_start(store: Store, rank: int) -> str:
    """Return the name of this start of the ranks, which rank 0 chooses and all ranks agree on.

    torchrun restarts ranks at the same port, and the keys of earlier starts stay in the store. If
    only the number of hosts has changed, no environment variable distinguishes one start from the
    next. So a rank asks with a random word, and only a living rank 0 answers. Rank 0 answers until
    the last asker of every rank has read the answer. Raises LaunchError where a rank does not ask
    within torch's default timeout of process groups.
    """
    if rank:
        word = token_hex(8)
        store.set(f"asks/{rank}", word)
        heard = store.get(f"answer/{word}").decode()  # waits for the answer
        store.set(f"heard/{word}", heard)
        return heard
    chosen, deaf = token_hex(8), list(range(1, int(os.environ["WORLD_SIZE"])))
    deadline = time.monotonic() + default_pg_timeout.total_seconds()  # as long as other ranks wait
    while deaf:
        if time.monotonic() > deadline:
            rule = f"WORLD_SIZE: rank {deaf[0]} did not come to {os.environ['MASTER_ADDR']}"
            raise LaunchError(f"{rule}; look at its output for why")
        deaf = [other for other in deaf if not _has_heard(store, other, chosen)]
        time.sleep(POLL_S)
    return chosen


def _has_heard(store: Store, rank: int, chosen: str) -> bool:
    """Answer the last question of `rank`; return True once its asker has read `chosen`."""
    if not store.check([f"asks/{rank}"]):
        return False
    word = store.get(f"asks/{rank}").decode()
    store.set(f"answer/{word}", chosen)
    heard = f"heard/{word}"  # it may be of an earlier start, if this start's rank has not asked yet
    return store.check([heard]) and store.get(heard).decode() == chosen


def _train(job: Job, rank: int, world_size: int, store: Store, key: JobKey) -> int:
    """Train as rank `rank` of `job`, and return the exit status: 0 done, 1 failed."""
    run_dir, exchange = job.run_dir, FailureExchange(store, key, world_size)
    host = job.host_of(rank)
    try:
        take_place(job, host, rank, store, key)
        log_to(run_dir / "logs" / f"rank_{rank}.log")
        end_watch = exchange.watch(run_dir, rank)
        set_num_threads(num_threads(int(os.environ["LOCAL_WORLD_SIZE"])))
        # Imported here, because a refused job does not need these modules.
        from whale_train.config import Request
        from whale_train.runtime.process import rank_main as worker

        request = Request.from_json(job.texts["request.json"])
        prepared = worker.complete(run_dir, worker.prepare(request))
        stop_request = _StopRequest()
        if rank and request.checkpoint.saves:  # rank 0's launcher handles rank 0's signals
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, stop_request.signalled)
        world = PrefixStore("world", store)
        worker.run(run_dir, rank, world_size, world, prepared, stop_request.is_made)
        end_watch()
    except Exception as error:
        own = None if host.shares else host.name
        exchange.tell(record_failure(run_dir, rank, error, step_in_progress(run_dir), own))
        exchange.settle(run_dir)
        return 1
    return 0


class _StopRequest:
    """Records a signal that asks this rank to end, once all ranks have saved."""

    def __init__(self) -> None:
        self._signalled = False

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """Record that a signal has arrived."""
        self._signalled = True

    def is_made(self) -> bool:
        """Return True once a signal has arrived."""
        return self._signalled


def _leave(store: Store, rank: int, world_size: int) -> None:
    """Wait until all ranks are done, and leave with rank 0 last.

    Rank 0's process may host the store, and a launcher may end all ranks once the first leaves with
    a status other than 0. Waits at most `LEAVING` for each step.
    """
    others = range(1, world_size)
    with suppress(dist.DistError):  # some rank does not come
        if rank:
            store.set(f"done/{rank}", "")
            store.wait(["all_done"], LEAVING)
            store.set(f"left/{rank}", "")
        elif others:
            store.wait([f"done/{other}" for other in others], LEAVING)
            store.set("all_done", "")
            store.wait([f"left/{other}" for other in others], LEAVING)


if __name__ == "__main__":
    status = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Leave as the ranks of a host do: after a failure, communication threads still run, and would
    # abort an interpreter that shuts down in order.
    os._exit(status)
