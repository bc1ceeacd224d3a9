"""The plan's process groups, made. Every rank makes all of them, in the plan's order."""

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from whale_train.strategies.plan import Plan

# A rank that stops answering is noticed by its host; this only bounds a wait for one that hangs.
TIMEOUT = timedelta(minutes=30)


def join(rendezvous: str | Store, rank: int, world_size: int, device: torch.device) -> None:
    """Join the job's world, met at a URL or a store; NCCL between GPUs, gloo between CPU
    processes."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous if isinstance(rendezvous, str) else None,
        store=None if isinstance(rendezvous, str) else rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )


def file_rendezvous(run_dir: Path) -> str:
    """Where the ranks of one host meet: a file, which needs no port and collides with nobody."""
    return f"file://{run_dir / 'rendezvous'}"


def make_groups(plan: Plan, rank: int) -> dict[str, dist.ProcessGroup]:
    """The groups `rank` is in, by the plan's names. Equal lists of ranks share one group."""
    world = tuple(range(plan.world_size))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        made[world] = dist.group.WORLD
    mine: dict[str, dist.ProcessGroup] = {}
    for name, lists in plan.groups.items():
        for ranks in lists:
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=TIMEOUT)
            if rank in ranks:
                mine[name] = made[ranks]
    return mine


def leave() -> None:
    """Leave together: a rank that went first would abort the others' pending connections."""
    dist.barrier()
    dist.destroy_process_group()
