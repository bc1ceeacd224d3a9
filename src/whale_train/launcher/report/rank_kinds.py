"""Group the ranks of a plan by kind, so that a page of ten thousand devices stays readable."""

from dataclasses import dataclass

from whale_train.strategies.plan.inventory import PlannedDevice
from whale_train.strategies.plan.plan import MemoryEstimate, Plan


@dataclass(frozen=True)
class RankKind:
    """Ranks that do the same work on the same kind of device.

    ranks: the ranks, ascending.
    nodes: the numbers of their nodes, ascending.
    device: name of the device.
    samples: samples of a step that each rank brings.
    micro_batches: micro-batches of a step.
    micro_batch_size: samples of the largest micro-batch.
    memory: bytes of each rank at the peak of a step.
    limit_bytes: bytes of the device's memory that tensors may take; None where the plan does not
        say.
    task_graphs: ids of the TaskGraphs that each rank holds a part of.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    device: str
    samples: int
    micro_batches: int
    micro_batch_size: int
    memory: MemoryEstimate
    limit_bytes: float | None
    task_graphs: tuple[int, ...]


def fullness(kind: RankKind) -> float:
    """Return the bytes that a kind of rank needs, as a part of what its device has; the bytes
    themselves where the plan does not say what the device has."""
    return kind.memory.total / (kind.limit_bytes or 1.0)


def rank_kinds(plan: Plan) -> list[RankKind]:
    """Return the kinds of ranks of a plan, in the order of their first ranks."""
    samples = samples_by_rank(plan)
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in plan.ranks:
        work = (rank.micro_batches, rank.micro_batch_size, rank.memory_bytes, rank.task_graphs)
        alike.setdefault((rank.device, samples[rank.rank], *work), []).append(rank.rank)
    devices = plan.inventory.devices if plan.inventory is not None else {}
    kinds = []
    for ranks in alike.values():
        first = plan.ranks[ranks[0]]
        device: PlannedDevice | None = devices.get(first.device)
        kinds.append(
            RankKind(
                ranks=tuple(ranks),
                nodes=tuple(sorted({plan.ranks[rank].node for rank in ranks})),
                device=first.device,
                samples=samples[first.rank],
                micro_batches=first.micro_batches,
                micro_batch_size=first.micro_batch_size,
                memory=first.memory_bytes,
                limit_bytes=None if device is None else device.room_bytes,
                task_graphs=first.task_graphs,
            )
        )
    return kinds


def samples_by_rank(plan: Plan) -> list[int]:
    """Return the samples of a step that each rank brings, the smallest of its shares.

    All ranks of a split head see the whole batch of the head, but each brings its own samples.
    """
    samples: dict[int, int] = {}
    for task_graph in plan.task_graphs:
        for replica, share in zip(task_graph.replicas, task_graph.shares, strict=True):
            for rank in replica:
                samples[rank] = min(share, samples.get(rank, share))
    return [samples.get(rank.rank, 0) for rank in plan.ranks]
