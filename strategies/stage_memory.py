"""The bytes that the ranks of a nested strategy need.

Activations are kept for as many micro-batches as the schedule has in flight.
"""

from collections.abc import Mapping, Sequence, Set

from whale_train.errors import Fault, PlanError
from whale_train.strategies.instructions import Instruction, in_flight
from whale_train.strategies.layouts import Layout, Shard
from whale_train.strategies.memory import (
    REDUCE_BUCKET_ELEMENTS,
    precision_bytes,
    stage_3_moving_bytes,
)
from whale_train.strategies.micro_batches import Batches
from whale_train.strategies.operations import OperationGraph
from whale_train.strategies.plan import MemoryEstimate
from whale_train.strategies.stages import value_bytes
from whale_train.strategies.staging import Axes, Chunk, Staging, alike_members


def memory_of_ranks(
    job: Staging,
    chunks: Sequence[Chunk],
    axes: Axes,
    batches: Batches,
    orders: Sequence[Sequence[Sequence[Instruction]]],
    recomputed: Set[int],
) -> dict[int, MemoryEstimate]:
    """Of every rank: what it holds of its chunks, and the activations of as many micro-batches
    as its schedule, `orders` by copy and position, keeps in flight. `recomputed` are the stages
    that compute blocks again."""
    found: dict[int, MemoryEstimate] = {}
    known: dict[tuple[int, int, int, int], MemoryEstimate] = {}  # of members that hold as much
    held_by = [[c for c in chunks if c.stage == stage] for stage in range(len(job.form.stages))]
    alike = [
        alike_members([axis for c in mine for axis in c.axes], axes) for mine in held_by
    ]  # fmt: skip
    for copy, of_copy in enumerate(job.seats.positions):
        samples = max(stop - start for start, stop in batches.samples[copy])
        for position, ranks in enumerate(of_copy):
            stage = job.seats.stage_of[position]
            kept = in_flight(orders[copy][position])
            for index, rank in enumerate(ranks):
                member = alike[stage][index] if alike[stage] else 0
                key = (stage, member, samples, kept)
                if key not in known:
                    again = stage in recomputed
                    known[key] = _of_member(job, held_by[stage], axes, member, samples, kept, again)
                found[rank] = known[key]
    return found


def _of_member(
    job: Staging,
    chunks: Sequence[Chunk],
    axes: Axes,
    member: int,
    samples: int,
    kept: int,
    again: bool,
) -> MemoryEstimate:
    """Of one member of the shard group that holds `chunks`, with micro-batches of `samples`, `kept`
    of them in flight."""
    sizes = precision_bytes(job.training.precision, job.zero)
    copies = job.form.copies * job.form.stages[chunks[0].stage].copies
    elements = {
        path: _local_elements(job, path, chunk, axes, member)
        for chunk in chunks
        for path in chunk.slice.parameters
    }
    held = sum(elements.values())
    own = held / copies if job.zero else held
    parts = [_kept_part(job.graph, chunk, axes, member) for chunk in chunks]
    activations = _kept_bytes(chunks, parts, kept, again)
    crossing = sum(
        value_bytes(job.graph[name])
        for chunk in chunks
        for name in (*chunk.slice.takes, *chunk.slice.gives)
    )
    bucket = min(held, REDUCE_BUCKET_ELEMENTS) if copies > 1 else 0.0
    moving = sizes.gradients * bucket
    gradients = sizes.gradients * held
    if job.zero == 3:
        gradients = sizes.gradients * own
        if copies > 1:
            largest = max(elements.values(), default=0.0)
            moving += stage_3_moving_bytes(sizes, bucket, largest)
    keeper = job.form.keeper
    offloaded = keeper is not None and keeper.offload_optimizer == "cpu"
    states = 4 * job.training.optimizer_states + sizes.master
    return MemoryEstimate(
        parameters=sizes.weights * (own if job.zero == 3 else held)
        + sizes.casts * held
        + float(job.profile.buffer_bytes),
        gradients=float(gradients),
        optimizer=0.0 if offloaded else own * states,
        activations=activations * samples * sizes.activations,
        communication=float(moving + 2 * samples * crossing),
    )


def _kept_bytes(
    chunks: Sequence[Chunk], parts: Sequence[float], in_flight: int, again: bool
) -> float:
    """What a rank's chunks keep of `in_flight` micro-batches of one sample; a part of each value
    where it is cut. With blocks computed `again`: their inputs, and one block's whole."""
    slices = [chunk.slice for chunk in chunks]
    if again:
        entering = sum(part.entering_bytes for part in slices) / len(slices)
        largest = max(s.block_bytes * p for s, p in zip(slices, parts, strict=True))
        return in_flight * entering + largest
    whole = sum(s.activation_bytes * p for s, p in zip(slices, parts, strict=True))
    return in_flight * whole / len(slices)


def recomputed_stages(job: Staging, memory: Mapping[int, MemoryEstimate]) -> set[int]:
    """The stages that compute their blocks again: those told to, and of those left to choose
    (auto), the ones whose activations do not fit as `memory` has them."""
    found = set()
    for stage, form in enumerate(job.form.stages):
        ranks = [rank for group in job.replicas(stage) for rank in group]
        over = any(memory[r].total > job.cluster.devices[r].memory_bytes for r in ranks)
        if form.recompute == "full" or (form.recompute == "auto" and over):
            found.add(stage)
    return found


def _local_elements(
    job: Staging,
    path: str,
    chunk: Chunk,
    axes: Axes,
    index: int,
) -> float:
    elements = job.profile.parameter_by_path[path].elements
    return elements * _fraction(chunk.shards.get(path), axes, index)


def refuse_memory(job: Staging, memory: Mapping[int, MemoryEstimate]) -> None:
    """Raise PlanError where some rank needs more than its device has: by how much, what helps."""
    devices = job.cluster.devices
    over = {r: m.total - devices[r].memory_bytes for r, m in memory.items()}
    worst = max(over, key=lambda rank: (over[rank], -rank))
    if over[worst] <= 0:
        return
    need = memory[worst]
    rule = (
        f"needs {need.total / 1e9:.1f} GB on rank {worst} ({devices[worst].name}), "
        f"{over[worst] / 1e9:.1f} GB more than its {devices[worst].memory_bytes / 1e9:.1f} GB"
    )
    if need.activations > need.total / 2:
        remedy = "use more micro-batches, recompute: full, or a smaller train.global_batch"
    else:
        remedy = "use more stages or a wider split, or zero: 1 among copies"
    raise PlanError([Fault("strategy", job.strategy.name, rule, remedy)])


def _fraction(layout: Layout | None, axes: Axes, index: int) -> float:
    if not isinstance(layout, Shard) or layout.axis not in axes:
        return 1.0
    start, stop = axes[layout.axis][index]
    return (stop - start) / axes[layout.axis][-1][1]


def _kept_part(
    graph: OperationGraph,
    chunk: Chunk,
    axes: Axes,
    index: int,
) -> float:
    """The part of a chunk's activations one member of its shard group keeps."""
    if chunk.head is not None:  # of the samples or of the classes
        return _fraction(next(iter(chunk.shards.values())), axes, index)
    if chunk.sharded is None:
        return 1.0
    layouts = chunk.sharded.assignment.layouts
    whole = local = 0.0
    for name in chunk.slice.operations:
        if graph[name].target in ("parameter", "buffer", "input"):
            continue
        size = value_bytes(graph[name])
        whole += size
        local += size * _fraction(layouts.get(name), axes, index)
    return local / whole if whole else 1.0
