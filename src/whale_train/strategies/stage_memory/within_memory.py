"""The samples, classes and experts that fit the memory of every device, and the error where none
fit.

`rank_memory.py` owns the bytes of each rank; this file owns the limits that follow from them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from whale_train.errors import Fault, PlanError
from whale_train.quantities import in_bytes
from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import MemoryEstimate
from whale_train.strategies.schedule.apportion import most_shared
from whale_train.strategies.schedule.instructions import Instruction, Kind
from whale_train.strategies.stage_memory.rank_memory import RankMemory, largest_part
from whale_train.strategies.stage_memory.state_by_memory import with_state_parts
from whale_train.strategies.stages.chunk_cost import ChunkTimes
from whale_train.strategies.stages.chunks import Chunked, chunked
from whale_train.strategies.stages.micro_batches import Batches, BatchTooLargeError, share_batch
from whale_train.strategies.stages.placement import PlanningContext, StageChunk, form_of
from whale_train.strategies.stages.recomputation import blocks_of_model


class ShortOfMemoryError(PlanError):
    """A plan in which some rank needs more bytes than its device has.

    short_bytes: the largest shortfall of any rank, in bytes.
    work: the simulated tasks and laid-out ranks that were spent on the plan.
    most_samples: the largest global batch that fits; 0 where none does, or it is not known.
    """

    def __init__(self, fault: Fault, short_bytes: float, work: int, most_samples: int = 0) -> None:
        super().__init__([fault])
        self.short_bytes, self.work, self.most_samples = short_bytes, work, most_samples


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that the ranks of a strategy need, against the memory of their devices.

    job: the strategy on its devices.
    cut: the model in chunks.
    memory: the peak bytes of each rank.
    batches: the micro-batches for which the ranks need these bytes.
    """

    job: PlanningContext
    cut: Chunked
    memory: RankMemory
    batches: Batches

    @cached_property
    def short_bytes(self) -> float:
        """Return the largest shortfall of any rank, in bytes: its need minus its device's memory.
        It is zero or negative where all ranks fit."""
        needs = self.memory.of_batches(self.batches)
        devices = self.job.cluster.devices
        return max(need.total - devices[rank].room_bytes for rank, need in needs.items())

    @property
    def by_memory(self) -> bool:
        """Return True if copies keep parts of the state that follow their memory."""
        keeper = self.job.form.keeper
        return keeper is not None and keeper.state.mode == "memory"

    def samples(self) -> tuple[int, ...]:
        """Return the most samples per micro-batch that each rank has room for, beside the least
        part of the state that it may keep; 0 or less for a rank that has no room for one."""
        by_key: dict[object, int] = {}
        samples = []
        fraction = 0.0 if self.by_memory else None  # a rank may then keep none of the state
        for rank, device in enumerate(self.job.cluster.devices):
            key = (*self.memory.alike(rank, self.batches), device.room_bytes)
            if key not in by_key:
                by_key[key] = self.memory.most(rank, self.batches, fraction)
            samples.append(by_key[key])
        return tuple(samples)

    def caps(self, own: int | None = None) -> Mapping[int, tuple[int, ...]]:
        """Return the most units (classes, experts, shards) that each member of a shard group has
        room for in every replica, by stage. Stages without a split part are left out.

        The units come on top of the replicated rest and of `own` samples (None: the samples that
        the rank takes).
        """
        return self._caps_of([x for x in self.cut.chunks if x.shares_samples], own)

    def caps_of_unlike(self, own: int | None = None) -> Mapping[int, tuple[int, ...]]:
        """Return the caps of the stages whose members differ in memory or in units, and so could
        give each other units. `own` is as in `caps`."""
        beside = [chunk for chunk in self.cut.chunks if chunk.shares_samples]
        alike = {chunk.stage for chunk in beside if self._are_alike(chunk)}
        return self._caps_of([chunk for chunk in beside if chunk.stage not in alike], own)

    def _caps_of(
        self, chunks: Sequence[StageChunk], own: int | None
    ) -> Mapping[int, tuple[int, ...]]:
        """Return the caps of the stages of `chunks`. `own` is as in `caps`."""
        return {
            stage: tuple(
                min(self.memory.most_units(rank, self.batches, own) for rank in ranks)
                for ranks in zip(*self.job.replicas[stage], strict=True)
            )
            for stage in dict.fromkeys(chunk.stage for chunk in chunks)
        }

    def _are_alike(self, chunk: StageChunk) -> bool:
        """Return True if all members of the chunk's shard groups have the same memory, and the same
        number of units to within one."""
        devices, axes = self.job.cluster.devices, [self.cut.axes[x] for x in chunk.axes]
        ranks = (rank for group in self.job.replicas[chunk.stage] for rank in group)
        held = [[b - a for a, b in intervals] for intervals in axes]
        as_many = all(max(sizes) - min(sizes) <= 1 for sizes in held)
        return as_many and len({devices[rank].room_bytes for rank in ranks}) == 1


def refuse_memory(room: MemoryBudget, times: ChunkTimes, micro_batches: int, work: int) -> None:
    """Raise ShortOfMemoryError if some rank of `room` needs more than its device has. The error
    says by how much, and names a remedy.

    room: the memory that the ranks need and have.
    times: seconds of the chunks.
    micro_batches: number of micro-batches of a replica.
    work: the work spent on the plan, which the error carries.
    """
    short = room.short_bytes
    if short <= 0:
        return
    job, samples = room.job, room.samples()
    shares = job.as_is or job.form.copies * job.form.members > 1
    fault, most_samples = None, 0
    if room.by_memory:
        most_samples = _most_in_parts(room, times, micro_batches)
        fault = _no_room_for_batch(room, most_samples) if most_samples else _no_room_in_parts(room)
    elif job.as_is or (job.form.pipeline is None and job.form.members > 1):
        fault = _no_room_for_one(room)
    for stage, caps in room.caps(1).items() if fault is None else ():
        most = most_shared(job.strategy.balance, [max(cap, 0) for cap in caps])
        if fault is None and 0 < most < room.memory.units(stage):
            fault = _no_room_beside(room, stage, most)
    if fault is None and shares and min(samples) >= 1:
        try:
            share_batch(job, times, micro_batches, samples)
        except BatchTooLargeError as error:
            fault, most_samples = _no_room_for_batch(room, error.most), error.most
    raise ShortOfMemoryError(fault or _no_room(room), short, work, most_samples)


def _most_in_parts(room: MemoryBudget, times: ChunkTimes, micro_batches: int) -> int:
    """Return the largest global batch that fits where parts of the state follow memory; 0 where
    none does. The arguments are those of `refuse_memory`."""
    job, limits = room.job, room.samples()
    if min(limits) < 1:
        return 0

    def fits(batch: int) -> bool:
        smaller = replace(job, training=replace(job.training, global_batch=batch))
        try:
            batches = share_batch(smaller, times, micro_batches, limits)
        except (BatchTooLargeError, PlanError):
            return False
        memory = with_state_parts(smaller, room.memory, batches)
        return MemoryBudget(smaller, room.cut, memory, batches).short_bytes <= 0

    low, high = job.form.copies * micro_batches - 1, job.training.global_batch
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low if low >= job.form.copies * micro_batches else 0


def _no_room(room: MemoryBudget) -> Fault:
    """Return the fault of the rank with the largest shortfall."""
    devices = room.job.cluster.devices
    needs = room.memory.of_batches(room.batches)
    over = {rank: need.total - devices[rank].room_bytes for rank, need in needs.items()}
    worst = max(over, key=lambda rank: (over[rank], -rank))
    need = needs[worst]
    rule = (
        f"needs {in_bytes(need.total)} on rank {worst} ({devices[worst].name}), "
        f"{in_bytes(over[worst])} more than its {in_bytes(devices[worst].room_bytes)}"
    )
    if need.activations > need.total / 2:
        remedy = "use more micro-batches, recompute: full, or a smaller train.global_batch"
    else:
        remedy = "use more stages or a wider split, or zero: 1 among copies"
    return Fault("strategy", room.job.strategy.name, rule, remedy)


def _no_room_in_parts(room: MemoryBudget) -> Fault:
    """Return the fault of copies that do not fit whatever their parts of the state."""
    keeper, fault = room.job.form.keeper, _no_room(room)
    assert keeper is not None
    others = ["recompute: auto"] if room.job.form.stages[0].recompute.mode == "none" else []
    others += ["more devices, or a smaller train.global_batch"]
    rule = f"{fault.rule}, whatever the parts of the state"
    highest = [f"{keeper.path}.zero=3"] if keeper.zero < 3 and room.job.as_is else []
    remedy = f"use {', '.join((*highest, *others))}"
    return Fault(f"{keeper.path}.state", str(keeper.state), rule, remedy)


def _no_room_for_one(room: MemoryBudget) -> Fault | None:
    """Return the fault of the device with the least memory, if it has no room for its replica, one
    sample and one unit of a split part (a class, an expert); None if it has."""
    job, devices = room.job, room.job.cluster.devices
    tight = min(range(len(devices)), key=lambda rank: devices[rank].room_bytes)
    need, has = room.memory.for_one(tight, room.batches), devices[tight].room_bytes
    beside = {"classes": "one class", "experts": "one expert"}.get(
        _what(room, job.stage_of_rank(tight)), "its shards"
    )
    if need <= has:
        return None
    rule = (
        f"needs {in_bytes(need)} on rank {tight} ({devices[tight].name}) for one sample"
        f"{f' and {beside}' if job.form.members > 1 else ''}, "
        f"{in_bytes(need - has)} more than its {in_bytes(has)}"
    )
    return Fault("strategy", job.strategy.name, rule, _fitting_zero(job, room.memory))


def _what(room: MemoryBudget, stage: int) -> str:
    """Return the word for the units of a stage's split parts: `classes`, `experts` or `shards`."""
    chunks = [chunk for chunk in room.cut.chunks if chunk.stage == stage]
    if any(chunk.head for chunk in chunks):
        return "classes"
    return "experts" if any(chunk.expert_axes for chunk in chunks) else "shards"


def _no_room_beside(room: MemoryBudget, stage: int, most: int) -> Fault:
    """Return the fault of a stage whose members have room for only `most` of its classes, experts
    or shards."""
    job, units, count = room.job, _what(room, stage), room.memory.units(stage)
    short = (count - most) * room.memory.unit_bytes(job.replicas[stage][0][0], room.batches)
    rule = (
        f"has {count} {units}, {count - most} more than the devices of hardware={job.cluster.name} "
        f"have memory for ({in_bytes(short)} short)"
    )
    # Beside copies each device has samples of its own, whose logits meet on every shard.
    fewer = f"strategy=split, or at most {most}" if units == "classes" else f"or at most {most}"
    remedy = f"use more devices, a smaller train.global_batch, {fewer} {units}"
    split = job.form.stages[stage].split
    assert split is not None
    return Fault(f"{split.path}.modules", ", ".join(split.modules), rule, remedy)


def _no_room_for_batch(room: MemoryBudget, most: int) -> Fault:
    """Return the fault of a global batch of which only `most` samples fit."""
    job, batch = room.job, room.job.training.global_batch
    missing = batch - most
    sample = room.memory.sample_bytes(0, room.batches)
    rule = (
        f"is {missing} samples ({in_bytes(missing * sample)}) more than the memory of "
        f"hardware={job.cluster.name} holds under strategy={job.strategy.name}"
    )
    others = ["more ZeRO"] if job.zero < 3 else []
    keeps_all = any(stage.recompute.mode == "none" for stage in job.form.stages)
    others += ["recompute: auto"] if keeps_all and blocks_of_model(job) else []
    *first, last = (f"at most {most}", *others)
    remedy = f"{', '.join(first)}, or {last}" if first else last
    return Fault("train.global_batch", str(batch), rule, f"use {remedy}")


def _fitting_zero(job: PlanningContext, memory: RankMemory) -> str:
    """Return the remedy for ranks that need `memory`: the lowest ZeRO stage at which one sample of
    the whole model fits every device, with equal parts of the state, with parts that follow
    memory, or with state on the hosts."""
    keeper = job.form.keeper
    may_follow = job.as_is and not job.profile.varies
    fixed = keeper is not None and not keeper.offloads and keeper.state.mode in ("even", "listed")
    if keeper is not None and may_follow and fixed and _fits_by_memory(memory, job.cluster):
        return f"use {keeper.path}.state=memory"
    if not job.profile.perhaps_unused:
        for name, zero in _ZERO.items():
            needed = _bytes_for_one(job, Replicate("", None, zero))
            if needed is not None:
                return f"use strategy={name}, which needs {in_bytes(needed)}"
        for name, zero in _ZERO.items():
            of_copies = _memory_of_copies(job, Replicate("", None, zero))
            if not job.profile.varies and _fits_by_memory(of_copies, job.cluster):
                return f"use strategy={name}, whose parts of the state then follow memory"
        needed = _bytes_for_one(job, Replicate("", None, 3, "cpu", "cpu"))
        if needed is not None:
            return f"use strategy=zero3_offload, which needs {in_bytes(needed)}"
    return "no ZeRO stage makes it fit: use more devices or a smaller model"


_ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}  # stages by the names of strategies


def _bytes_for_one(job: PlanningContext, node: Replicate) -> float | None:
    """Return the bytes that each device needs for one sample where `node` replicates the whole
    model; None where that cannot run, or some device has less memory."""
    memory = _memory_of_copies(job, node)
    if memory is None:
        return None
    needed = memory.of(0, 1, 1).total
    fits = all(needed <= device.room_bytes for device in job.cluster.devices)
    return needed if fits else None


def _fits_by_memory(memory: RankMemory | None, cluster: Cluster) -> bool:
    """Return True if copies of the whole model under ZeRO fit all devices with one sample each, in
    parts of the state that follow memory. `memory` is that of the ranks (None: False)."""
    if memory is None:
        return False
    rooms = Counter(device.room_bytes for device in cluster.devices)
    of_one = partial(memory.of, 0, 1, 1)
    parts = (n * largest_part(lambda x: of_one(x).total, room) for room, n in rooms.items())
    return min(rooms) >= of_one(0.0).total and sum(parts) >= 1


def _memory_of_copies(job: PlanningContext, node: Replicate) -> RankMemory | None:
    """Return the memory of ranks that each take one sample, where `node` replicates the whole
    model; None where that cannot run."""
    cluster = job.cluster
    enough = replace(job.training, global_batch=len(cluster.devices), accumulate=1)
    strategy = replace(job.strategy, graph=(node,))
    form = form_of(strategy, cluster, enough, [])
    if form is None:
        return None
    copied = PlanningContext(strategy, cluster, job.findings, enough, form)
    order = [Instruction(Kind.FORWARD, 0, 0), Instruction(Kind.BACKWARD, 0, 0)]
    cut = chunked(copied)
    return RankMemory(copied, cut.chunks, cut.axes, [[order]] * form.copies, {})


def stages_without_room(job: PlanningContext, memory: Mapping[int, MemoryEstimate]) -> set[int]:
    """Return the stages with a rank that does not fit its device. `memory` holds the needs, by
    rank."""
    devices = job.cluster.devices
    return {
        stage
        for stage in range(len(job.form.stages))
        for group in job.replicas[stage]
        if any(memory[rank].total > devices[rank].room_bytes for rank in group)
    }
