"""A rank that torchrun or srun started: it finds its job and takes its place.

    python -m whale_train.runtime.member [--run-dir DIR --parent PID | --refused]

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where it is. Rank
0 is started with the run directory by the `whale-train` that composed the job, and tells the
others, who see it through a shared file system; `--refused` tells them that there is none.
Exit status: 0 done; 1 failed; 2 the request was refused.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from whale_train.runtime import worker
from whale_train.runtime.failure import (
    FAILURE_FILE,
    RankEnd,
    first_failure,
    read_errors,
    record_failure,
    step_in_progress,
    write_record,
)
from whale_train.runtime.host import end_with_parent, log_to, num_threads, set_num_threads

REFUSED = ""  # what rank 0 says instead of a run directory
LEAVING = timedelta(seconds=30)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of this module; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m whale_train.runtime.member")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--parent", type=int, help="end with this process")
    parser.add_argument("--refused", action="store_true", help="tell the others there is no job")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        end_with_parent(options.parent, signal.SIGTERM)
    store, rank, world_size = next(rendezvous("env://"))
    told = "whale_train/run_dir"
    if rank == 0:
        store.set(told, REFUSED if options.refused else str(options.run_dir.absolute()))
    run_dir = store.get(told).decode()
    if run_dir == REFUSED:
        store.set(f"whale_train/left/{rank}", "")
        if rank == 0:  # the store may live in this process, so it leaves last
            others = [f"whale_train/left/{other}" for other in range(1, world_size)]
            with suppress(dist.DistStoreError):
                store.wait(others, LEAVING)
        return 2
    return _train(Path(run_dir), rank, world_size, PrefixStore("whale_train/world", store))


def _train(run_dir: Path, rank: int, world_size: int, store: Store) -> int:
    if not (run_dir / "ready").exists():
        sys.stderr.write(
            f"error: rank {rank} does not see the run directory {run_dir}; "
            "put it on a file system all hosts share (hydra.run.dir=...)\n"
        )
        return 1
    log_to(run_dir / "logs" / f"rank_{rank}.log")
    set_num_threads(num_threads(int(os.environ["LOCAL_WORLD_SIZE"])))
    try:
        prepared = worker.prepare(run_dir)
        worker.compile_kernels(run_dir, prepared)
        worker.run(run_dir, rank, world_size, store, prepared)
    except Exception as error:
        step = step_in_progress(run_dir)
        record_failure(run_dir, rank, error, step)
        if not (run_dir / FAILURE_FILE).exists():
            errors = read_errors(run_dir)
            ends = [RankEnd(found, 1, 0.0) for found in errors]
            write_record(run_dir / FAILURE_FILE, asdict(first_failure(ends, errors, step)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
