"""The plan's process groups. Every rank makes all of them, in the plan's order.

A group is described by the plan's name for it (torch's `group_desc`, which NCCL's watchdog logs).
`runtime/failures/timeouts.py` owns the names of groups in a report.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store, _set_pg_timeout, _world

from whale_train.runtime.comms.hierarchical_sum import HierarchicalSum
from whale_train.runtime.cpu.shm_collectives import SharedMemoryGroup, home
from whale_train.runtime.cpu.shm_p2p import SharedMessages
from whale_train.runtime.emulate import emulated_group as paced_group
from whale_train.runtime.emulate.emulated_group import PacedGroup
from whale_train.runtime.emulate.emulated_links import EmulatedLinks
from whale_train.runtime.emulate.throttle import Pace
from whale_train.strategies.plan.group_names import across_of, context_of, group_name, inside_of
from whale_train.strategies.plan.plan import Plan, TaskGraph
from whale_train.strategies.plan.program import PlannedPipeline

# A rank's host notices that the rank ended; this limit is for a rank that hangs.
TIMEOUT = timedelta(minutes=30)
_INSIDE, _ACROSS = inside_of(""), across_of("")  # the ends of the names of such groups


def join(
    rendezvous: str | Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta = TIMEOUT,
    pace: Pace | None = None,
    links: EmulatedLinks | None = None,
) -> None:
    """Join the job's world, and measure `links` if given.

    GPUs use NCCL, and gloo for tensors on the host; CPU processes use gloo.

    rendezvous: the meeting point of the ranks: a URL or a store.
    timeout: the limit of the meeting, and of every wait in the world.
    pace: the slowdown that a CPU process emulates; None: full speed.
    links: the slow links that a CPU process emulates; None: no slow links.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if pace is not None or links is not None:
        backend = paced_group.register(pace, links)
    dist.init_process_group(
        backend,
        init_method=rendezvous if isinstance(rendezvous, str) else None,
        store=None if isinstance(rendezvous, str) else rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if links is not None:
        assert isinstance(dist.group.WORLD, PacedGroup)
        links.measure(dist.group.WORLD.inner)


def file_rendezvous(run_dir: Path) -> str:
    """Return the URL at which the ranks of one host meet.

    It names a file, which needs no port and cannot collide with another job's.
    """
    return f"file://{run_dir / 'rendezvous'}"


def make_groups(
    plan: Plan, rank: int, timeout: timedelta = TIMEOUT
) -> dict[str, dist.ProcessGroup]:
    """Make all groups of the plan, and return the groups that `rank` is a member of, by the plan's
    names.

    Equal lists of ranks share one group, but for groups of a HierarchicalSum, which others may not
    use. A split whose members can share memory has a separate
    group in shared memory. Copies that hold whole parameters have such a group for sums, besides
    their own group (named by `sums_of`).
    """
    world = tuple(range(plan.world_size))
    by_ranks: dict[tuple[tuple[int, ...], bool], dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        by_ranks[world, False] = dist.group.WORLD
    copied = list(_copied(plan))
    host_ids = homes() if copied or _has_splits(plan) or _has_levels(plan) else []

    def share(ranks: tuple[int, ...]) -> bool:
        return len({host_ids[member] for member in ranks}) == 1

    groups: dict[str, dist.ProcessGroup] = {}
    for name, lists in plan.groups.items():
        if _is_level(name):
            continue
        for ranks in lists:
            shared = _is_split(name, ranks) and share(ranks)
            # The same ranks sum gradients while they exchange positions: one order for each.
            apart = name.endswith(context_of(""))
            key = (ranks, shared or apart)
            if key not in by_ranks:
                new_group = SharedMemoryGroup.new if shared else _new_group
                described = name if apart else group_name(plan, ranks)
                by_ranks[key] = new_group(list(ranks), timeout, described)
            if rank in ranks:
                groups[name] = by_ranks[key]
    for name, copies in copied:
        for ranks in filter(share, copies):
            group = SharedMemoryGroup.new(list(ranks), timeout, group_name(plan, ranks))
            if rank in ranks:
                groups[name] = group
    for name, lists in plan.groups.items():
        for ranks in lists if _is_level(name) else ():
            in_memory = name.endswith(_INSIDE) and plan.reduce_dtype == "fp32" and share(ranks)
            new_group = SharedMemoryGroup.new if in_memory else _new_group
            group = new_group(list(ranks), timeout, group_name(plan, ranks))
            if rank in ranks:
                groups[name] = group
    return groups


def make_channels(
    plan: Plan, rank: int, device: torch.device, timeout: timedelta = TIMEOUT
) -> dict[int, dist.ProcessGroup]:
    """Make all groups of two for the messages of a pipeline, and return this rank's, by the other
    rank.

    GPUs have a group for every pair of ranks that communicate, and so have CPU ranks that can share
    memory. The messages of other pairs go through the world. The result is empty without a
    pipeline.
    """
    if plan.pipeline is None:
        return {}
    channels: dict[int, dist.ProcessGroup] = {}
    of_ranks = homes() if device.type == "cpu" else []
    for pair in _talking(plan.pipeline):
        if device.type != "cpu":
            group = _new_group(list(pair), timeout, "messages")
        elif of_ranks[pair[0]] == of_ranks[pair[1]]:
            group = SharedMessages.new(list(pair), timeout, "messages")
        else:
            continue
        if rank in pair:
            channels[sum(pair) - rank] = group
    return channels


def _new_group(ranks: list[int], timeout: timedelta, group_desc: str) -> dist.ProcessGroup:
    """Return a group for tensors on the ranks' devices.

    With GPUs the group has NCCL only: only the world also serves tensors on the host.
    """
    backend = "nccl" if "nccl" in dist.get_backend_config() else None
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, backend=backend, group_desc=group_desc
    )
    return group


def _talking(pipeline: PlannedPipeline) -> list[tuple[int, int]]:
    """Return the pairs of ranks (the lower first) that exchange a pipeline's values or their
    gradients."""
    pairs: set[tuple[int, int]] = set()
    for copy in pipeline.copies:
        for start, end, _ in pipeline.edges:
            for a, b in set(zip(copy.owners[start], copy.owners[end], strict=True)):
                senders, receivers = copy.positions[a], copy.positions[b]
                width = max(len(senders), len(receivers)) if a != b else 0
                for j in range(width):
                    one, other = senders[j % len(senders)], receivers[j % len(receivers)]
                    pairs.add((min(one, other), max(one, other)))
    return sorted(pairs)


def homes() -> list[str]:
    """Return the id of the host whose shared memory each rank can map, by rank.

    A rank that cannot share memory has an id of its own. A collective of the world.
    """
    host_ids = [str(rank) for rank in range(dist.get_world_size())]
    if dist.get_backend() == "gloo":
        dist.all_gather_object(host_ids, home() or host_ids[dist.get_rank()])
    return host_ids


def sums_of(task_graph: TaskGraph) -> str:
    """Return the name of the group in which the copies of `task_graph` sum gradients in shared
    memory."""
    return f"{task_graph.name}.data_parallel.sums"


def sharing_hosts(plan: Plan) -> dict[tuple[int, ...], int]:
    """Return, by its ranks, how many groups share a host's connection with each group that sums
    parts of gradients across hosts."""
    node_of = [rank.node for rank in plan.ranks]
    lists = [ranks for name, of in plan.groups.items() if name.endswith(_ACROSS) for ranks in of]
    leaving = Counter(node_of[rank] for ranks in lists for rank in ranks)
    return {ranks: max(leaving[node_of[rank]] for rank in ranks) for ranks in lists}


def two_level_sum(
    task_graph: TaskGraph, groups: Mapping[str, dist.ProcessGroup]
) -> HierarchicalSum | None:
    """Return the sum by which copies of `task_graph` add up gradients inside hosts first, or None
    where they add up at once.

    groups: the groups of this rank, by the plan's names.
    """
    inside, across = inside_of(task_graph.name), across_of(task_graph.name)
    return HierarchicalSum(groups[inside], groups[across]) if inside in groups else None


def _copied(plan: Plan) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Yield the name of the `sums_of` group, and the lists of ranks, of every TaskGraph whose
    gradients DistributedDataParallel sums.

    It sums them where a step has one backward, or the model runs unchanged, without ZeRO or a
    split. Shared memory sums fp32 only: with another `reduce_dtype` nothing is yielded.
    """
    if plan.reduce_dtype != "fp32":
        return  # shared memory sums fp32 alone
    if plan.pipeline is not None and not plan.pipeline.one_backward:
        return
    for task_graph in plan.task_graphs:
        lists = plan.groups.get(f"{task_graph.name}.data_parallel", ())
        if inside_of(task_graph.name) in plan.groups:
            continue
        is_copied = (
            task_graph.primitive == "replicate" or context_of(task_graph.name) in plan.groups
        )
        if task_graph.zero == 0 and is_copied:
            yield sums_of(task_graph), [ranks for ranks in lists if len(ranks) > 1]


def _has_splits(plan: Plan) -> bool:
    return any(_is_split(name, ranks) for name, lists in plan.groups.items() for ranks in lists)


def _has_levels(plan: Plan) -> bool:
    return any(map(_is_level, plan.groups))


def _is_level(name: str) -> bool:
    return name.endswith((_INSIDE, _ACROSS))


def _is_split(name: str, ranks: tuple[int, ...]) -> bool:
    return name.endswith((".model_parallel", context_of(""))) and len(ranks) > 1


def limit_waits(timeout: timedelta) -> None:
    """Set the limit of waits in all groups of this rank.

    DeepSpeed makes groups with torch's default limit. Groups in shared memory keep the limit that
    they were made with.
    """
    for group in _world.pg_map:
        if isinstance(group, PacedGroup):
            _set_pg_timeout(timeout, group.inner)
        # Groups in shared memory have their own limit.
        elif not isinstance(group, (SharedMemoryGroup, SharedMessages)):
            _set_pg_timeout(timeout, group)


def leave() -> None:
    """Wait for all ranks, and destroy the groups.

    A rank that left first would abort the others' pending connections.
    """
    dist.barrier()
    dist.destroy_process_group()
