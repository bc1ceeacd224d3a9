"""The plan's process groups, made. Every rank makes all of them, in the plan's order.

A group is described by the plan's name for it (torch's `group_desc`, which NCCL's watchdog logs);
`runtime/hangs.py` has what the plan says of a group.
"""

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store, _set_pg_timeout, _world

from whale_train.runtime import paced_group, shared_memory
from whale_train.runtime.hangs import group_name
from whale_train.runtime.links import Links
from whale_train.runtime.pace import Pace
from whale_train.runtime.paced_group import PacedGroup
from whale_train.runtime.shared_memory import SharedMemoryGroup
from whale_train.strategies.plan import Plan

# A rank that ends is noticed by its host; this only bounds a wait for one that hangs.
TIMEOUT = timedelta(minutes=30)


def join(
    rendezvous: str | Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta = TIMEOUT,
    pace: Pace | None = None,
    links: Links | None = None,
) -> None:
    """Join the job's world, met at a URL or a store; NCCL between GPUs, gloo between CPU
    processes, which may keep a `pace` and have slow `links` (measured here). `timeout` is for the
    meeting and for every wait in it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if pace is not None or links is not None:
        backend = paced_group.register(pace, links)
    dist.init_process_group(
        backend,
        init_method=rendezvous if isinstance(rendezvous, str) else None,
        store=None if isinstance(rendezvous, str) else rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    if links is not None:
        assert isinstance(dist.group.WORLD, PacedGroup)
        links.measure(dist.group.WORLD.inner)


def file_rendezvous(run_dir: Path) -> str:
    """Where the ranks of one host meet: a file, which needs no port and collides with nobody."""
    return f"file://{run_dir / 'rendezvous'}"


def make_groups(
    plan: Plan, rank: int, timeout: timedelta = TIMEOUT
) -> dict[str, dist.ProcessGroup]:
    """The groups `rank` is in, by the plan's names. Equal lists of ranks share one group; the
    members of a split that can share memory have one of their own for it."""
    world = tuple(range(plan.world_size))
    made: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        made[world, False] = dist.group.WORLD
    homes = _homes(plan)
    mine: dict[str, dist.ProcessGroup] = {}
    for name, lists in plan.groups.items():
        for ranks in lists:
            shared = _is_split(name, ranks) and len({homes[member] for member in ranks}) == 1
            if (ranks, shared) not in made:
                new_group = shared_memory.new_group if shared else dist.new_group
                description = group_name(plan, ranks)
                group = new_group(list(ranks), timeout=timeout, group_desc=description)
                made[ranks, shared] = group
            if rank in ranks:
                mine[name] = made[ranks, shared]
    return mine


def _homes(plan: Plan) -> list[str]:
    """Whose memory each rank can share; none of two ranks are equal where nobody can."""
    splits = any(_is_split(name, ranks) for name, lists in plan.groups.items() for ranks in lists)
    homes: list[str] = [str(rank) for rank in range(plan.world_size)]
    if splits and dist.get_backend() == "gloo":
        dist.all_gather_object(homes, shared_memory.home() or homes[dist.get_rank()])
    return homes


def _is_split(name: str, ranks: tuple[int, ...]) -> bool:
    return name.endswith(".model_parallel") and len(ranks) > 1


def limit_waits(timeout: timedelta) -> None:
    """Have no group of this rank wait longer: DeepSpeed makes some of its own, with torch's
    default."""
    for group in _world.pg_map:
        if isinstance(group, PacedGroup):
            _set_pg_timeout(timeout, group.inner)
        elif not isinstance(group, SharedMemoryGroup):  # only make_groups makes these
            _set_pg_timeout(timeout, group)


def leave() -> None:
    """Leave together: a rank that went first would abort the others' pending connections."""
    dist.barrier()
    dist.destroy_process_group()
