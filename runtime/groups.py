"""The plan's process groups, made. Every rank makes all of them, in the plan's order.

A group is described by the plan's name for it (torch's `group_desc`, which NCCL's watchdog logs);
`runtime/hangs.py` has what the plan says of a group.
"""

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store, _set_pg_timeout, _world

from whale_train.runtime.hangs import group_name
from whale_train.strategies.plan import Plan

# A rank that ends is noticed by its host; this only bounds a wait for one that hangs.
TIMEOUT = timedelta(minutes=30)


def join(
    rendezvous: str | Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta = TIMEOUT,
) -> None:
    """Join the job's world, met at a URL or a store; NCCL between GPUs, gloo between CPU
    processes. `timeout` is for the meeting and for every wait in it."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous if isinstance(rendezvous, str) else None,
        store=None if isinstance(rendezvous, str) else rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def file_rendezvous(run_dir: Path) -> str:
    """Where the ranks of one host meet: a file, which needs no port and collides with nobody."""
    return f"file://{run_dir / 'rendezvous'}"


def make_groups(
    plan: Plan, rank: int, timeout: timedelta = TIMEOUT
) -> dict[str, dist.ProcessGroup]:
    """The groups `rank` is in, by the plan's names. Equal lists of ranks share one group."""
    world = tuple(range(plan.world_size))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        made[world] = dist.group.WORLD
    mine: dict[str, dist.ProcessGroup] = {}
    for name, lists in plan.groups.items():
        for ranks in lists:
            if ranks not in made:
                description = group_name(plan, ranks)
                made[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=description)
            if rank in ranks:
                mine[name] = made[ranks]
    return mine


def limit_waits(timeout: timedelta) -> None:
    """Have no group of this rank wait longer: DeepSpeed makes some of its own, with torch's
    default."""
    for group in _world.pg_map:
        _set_pg_timeout(timeout, group)


def leave() -> None:
    """Leave together: a rank that went first would abort the others' pending connections."""
    dist.barrier()
    dist.destroy_process_group()
