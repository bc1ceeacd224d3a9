"""Hosts of ranks that end well or badly, and parents of such hosts, as programs of their own.

`program` is the command of one, ENTRIES what its ranks can do.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from whale_train.launcher.ranks.host_process import HostProcess


def join(run_dir: Path, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{run_dir}/rendezvous", rank=rank, world_size=world_size
    )


def succeed(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    import numpy
    import torch
    import torch.distributed as dist

    join(run_dir, rank, world_size)
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    # Both pools of threads that a fork could have broken.
    row = torch.ones(2_000_000).mul(0.5).sum().item()
    product = float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum())
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    report = {
        "total": total.item(),
        "row": row,
        "product": product,
        "threads": torch.get_num_threads(),
        "tasks": len(os.listdir("/proc/self/task")),
        "prepared": prepared,
        "host": os.getppid(),
        "environment": [os.environ[name] for name in names],
    }
    (run_dir / f"report_{rank}.json").write_text(json.dumps(report))
    print(f"I am {rank}")  # noqa: T201
    os.system("echo so says a child")
    dist.barrier()
    dist.destroy_process_group()


def raise_at_2(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    join(run_dir, rank, world_size)
    loop(run_dir, rank, until=20 if rank == 2 else 10**9)
    lookup: dict[str, int] = {}
    lookup["absent"]


def loop_forever(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    join(run_dir, rank, world_size)
    loop(run_dir, rank, until=10**9)


def loop(run_dir: Path, rank: int, until: int) -> None:
    import torch
    import torch.distributed as dist

    for step in range(until):
        dist.all_reduce(torch.ones(1000))
        if rank == 0:
            with (run_dir / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step}) + "\n")
        if step == 2:
            (run_dir / f"pid_{rank}").write_text(str(os.getpid()))
        time.sleep(0.005)


def ignore_sigterm(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run_dir / f"pid_{rank}").write_text(str(os.getpid()))
    time.sleep(10**6)


def exit_3_at_1(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    if rank == 1:
        sys.exit(3)
    time.sleep(10**6)


def never_called(run_dir: Path, rank: int, world_size: int, prepared: int) -> None:
    (run_dir / "called").touch()


ENTRIES: dict[str, Callable[[Path, int, int, int], None]] = {
    entry.__name__: entry
    for entry in (
        succeed,
        raise_at_2,
        loop_forever,
        ignore_sigterm,
        exit_3_at_1,
        never_called,
    )
}


def prepare(name: str, run_dir: Path) -> int:
    if name == "never_called":
        raise ValueError("no such model")
    return os.getpid()


def forget(run_dir: Path, prepared: int) -> None:
    with (run_dir / "forgotten").open("a") as file:
        file.write(f"{prepared} in {os.getpid()}\n")


def be_host(options: argparse.Namespace) -> int:
    from whale_train.runtime.cpu.threads import set_num_threads
    from whale_train.runtime.process.fork_server import record_host_failure, serve, wait_until_ready

    set_num_threads(1)
    try:
        wait_until_ready(options.run_dir, options.parent)
        return serve(
            options.run_dir,
            options.world_size,
            lambda: prepare(options.entry, options.run_dir),
            ENTRIES[options.entry],
            options.parent,
            lambda prepared: forget(options.run_dir, prepared),
        )
    except Exception as error:
        record_host_failure(options.run_dir, error)
        return 1


def be_parent(options: argparse.Namespace) -> int:
    host = HostProcess.start(options.run_dir, program(options.entry, options.world_size))
    (options.run_dir / "pid_host").write_text(str(host.pid))
    (options.run_dir / "ready").touch()
    return 0 if host.wait(lambda: None).status == "done" else 1


def program(entry: str, world_size: int, role: str = "host") -> tuple[str, ...]:
    return (sys.executable, __file__, role, entry, str(world_size))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["host", "parent"])
    parser.add_argument("entry")
    parser.add_argument("world_size", type=int)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args()
    sys.exit(be_host(given) if given.role == "host" else be_parent(given))
