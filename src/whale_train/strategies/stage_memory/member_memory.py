"""The peak bytes of a member of a shard group.

The schedule is played instruction by instruction. A forward adds saved tensors; a backward frees
them and leaves gradients. The member needs the peak over all instructions.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import ceil, inf, log2

from whale_train.strategies.graph.block_paths import unit_of
from whale_train.strategies.graph.operation_graph import Operation
from whale_train.strategies.graph.saved_tensors import SENT_BYTES, View, whole_value
from whale_train.strategies.layouts.types import COMBINE, DISPATCH, UNREPEATED, Shard
from whale_train.strategies.memory import nvme
from whale_train.strategies.memory.engine_memory import (
    Gradients,
    Weights,
    casts_last,
    dequantised_bytes,
    engine_of,
    precision_bytes,
    unmeasured,
    weights_bytes,
)
from whale_train.strategies.memory.liveness import (
    ActivationProfile,
    profile_by_unit,
    profile_forward_backward,
)
from whale_train.strategies.memory.uneven_memory import UnevenGradients
from whale_train.strategies.plan.plan import MemoryEstimate
from whale_train.strategies.schedule.instructions import ENDS, Instruction, Kind, in_flight
from whale_train.strategies.stage_memory.beside_memory import with_beside
from whale_train.strategies.stages.engines import fraction, frozen_of_member, held_elements
from whale_train.strategies.stages.fused_accumulation import added_in_place, named_in_place
from whale_train.strategies.stages.placement import (
    AxisIntervals,
    PlanningContext,
    StageChunk,
    own_gradients_of,
    rewrites_of,
)
from whale_train.strategies.stages.recomputation import key_of_units, share_of_units


class MemberMemory:
    """The memory of one member of a shard group: its parameters, and the liveness of its forwards
    and backwards.

    job: the strategy on its devices.
    chunks: the chunks that the member holds, by number.
    axes: intervals of the members of shard groups, by axis.
    member: index of the member in its shard group.
    again: paths of the modules that are recomputed in the backward.
    sent: paths of the modules whose saved tensors are on the host.
    micro_batch: samples of a micro-batch, about, to tell which tensors are large enough to be sent.
    accumulates: True if weight gradients are accumulated in place or deferred.
    gathered: samples of the group for each sample of the member. A part that is split beside
        replicas runs on the samples of all members.
    one_backward: True if DistributedDataParallel reduces gradients during the backward.
    """

    def __init__(
        self,
        job: PlanningContext,
        chunks: Mapping[int, StageChunk],
        axes: AxisIntervals,
        member: int,
        again: frozenset[str],
        accumulates: bool,
        gathered: float,
        one_backward: bool,
        sent: frozenset[str] = frozenset(),
        micro_batch: float = 1.0,
    ) -> None:
        self._one_backward = one_backward
        self._job, self._chunks, self._gathered = job, chunks, gathered
        self._accumulates, self._again = accumulates, again
        # On CPUs the host's memory is the device's.
        self._sent = frozenset[str]() if job.cluster.on_cpu else sent
        self._smallest = SENT_BYTES / micro_batch if self._sent else 0.0
        self._elements: dict[str, float] = {}
        self._frozen: dict[str, float] = {}  # bytes of frozen weights
        self._experts: dict[str, float] = {}  # elements of split parameters
        self._passing: dict[int, ActivationProfile] = {}
        for number, chunk in chunks.items():
            local = held_elements(job, chunk, axes, member)
            experts = {
                path: n
                for path, n in local.items()
                if path in chunk.shards and chunk.beside is not None
            }
            rest = {path: n for path, n in local.items() if path not in experts}
            self._experts |= experts
            self._elements |= rest
            if experts and job.zero > 1:
                local = rest
            elif experts and self._has_buckets:
                local = experts
            self._frozen |= frozen_of_member(job, chunk, axes, member)
            dealt = tuple((axes[x][member], axes[x][-1]) for x in chunk.axes)
            here = key_of_units(job, chunk, again), key_of_units(job, chunk, self._sent)
            self._passing[number] = job.findings.once(
                (
                    "passing",
                    chunk.key,
                    dealt,
                    here,
                    accumulates,
                    gathered,
                    tuple(local),
                    self._smallest,
                ),
                partial(self._passed, chunk, axes, member, local, again),
            )

    @property
    def _has_buckets(self) -> bool:
        """Return True if the replicated parameters beside experts have DistributedDataParallel's
        buckets, which hold all their gradients from the first step on."""
        job = self._job
        several = len(job.copies_of_rest[self._stage][0]) > 1
        return several and not (self._accumulates or job.zero or len(job.form.stages) > 1)

    def _view(self, chunk: StageChunk) -> View:
        """Return the sizes of the values of `chunk` in the graph that ranks run: the original or
        the rewritten one."""
        job, view, on_cpu = self._job, self._job.findings.view, self._job.cluster.on_cpu
        if not job.as_is:
            made = view.rewritten(rewrites_of(job, chunk, own_gradients=False))
            becomes = chunk.sharded.assignment.becomes if chunk.sharded else {}
            exchanged = frozenset(name for name, kind in becomes.items() if kind in UNREPEATED)
            return replace(made, divides_positions=chunk.shares_sequence, exchanged=exchanged)
        # Models that run as they are repeat no keys on GPUs.
        return view if on_cpu else view.rewritten(job.findings.grouped_keys)

    def _passed(
        self,
        chunk: StageChunk,
        axes: AxisIntervals,
        member: int,
        local: Mapping[str, float],
        again: frozenset[str],
    ) -> ActivationProfile:
        """Return the liveness of one forward and one backward of `chunk`. Only the parameters in
        `local` (elements by path) get gradients."""
        job, part = self._job, chunk.slice
        if job.profile.graph is None or not any(operation.saved for operation in job.graph):
            return self._unmeasured(chunk, local, again)
        operations = part.operations
        canonical = {name: p.path for name, p in job.profile.parameter_by_path.items()}
        read = ((name, job.graph[name]) for name in operations)
        paths = {name: canonical[op.path] for name, op in read if op.target == "parameter"}
        weights = {name: 4.0 * local[path] for name, path in paths.items() if path in local}
        # The loss is a number, which no other stage takes.
        gives = [name for name in part.gives if name in operations and job.graph[name].shape]
        in_place = named_in_place(job, chunk) if self._accumulates else ()
        view = self._view(chunk).held_by(
            _part_of(chunk, axes, member, self._gathered),
            _read_as(chunk, axes, member, job.graph.trained, self._gathered),
        )
        own = () if job.as_is else own_gradients_of(job, chunk)
        ends = (part.takes, gives, in_place, own)
        if again or self._sent:
            units = (again, *ends, self._sent, self._smallest)
            return profile_by_unit(view, operations, weights, *units)
        return profile_forward_backward(view, operations, weights, *ends)

    @cached_property
    def _made_in_order(self) -> tuple[str, ...]:
        """Return the paths of the weights in the order in which the backward makes their gradients:
        the reverse of the order of each weight's last read in the forward."""
        job, known = self._job, dict[str, None]()
        if job.profile.graph is None:
            return ()
        for chunk in reversed(list(self._chunks.values())):
            for name in reversed(chunk.slice.operations):
                read = (job.graph[x] for x in job.graph[name].inputs)
                paths = (job.profile.parameter_by_path[x.path] for x in read if _is_weight(x))
                known |= {weight.path: None for weight in paths if weight.path in self._elements}
        return tuple(known)

    @cached_property
    def _largest_made(self) -> float:
        """Return the bytes of the largest gradient that a backward makes in a tensor of its own
        before it is added to the accumulated gradient. Gradients that are accumulated in place are
        left out."""
        chunks = self._chunks.values() if self._accumulates else ()
        in_place = {x for chunk in chunks for x in added_in_place(self._job, chunk)}
        made = (n for path, n in self._elements.items() if path not in in_place)
        return 4.0 * max(made, default=0.0)

    def _unmeasured(
        self, chunk: StageChunk, local: Mapping[str, float], again: frozenset[str]
    ) -> ActivationProfile:
        """Return the liveness of `chunk` from the totals of its slice, where the saved tensors of
        operations were not measured."""
        halved = precision_bytes(self._job.training.precision, self._job.zero).activations
        part, gradients = chunk.slice, 4.0 * sum(local.values())
        largest = 4.0 * max(local.values(), default=0.0)
        if not again:
            return unmeasured(part.activation_bytes * halved, gradients, largest)
        share = share_of_units(self._job, chunk, again)
        entering, block = part.entering_bytes * halved, part.block_bytes * halved
        saved = share * entering + (1.0 - share) * part.activation_bytes * halved
        once = unmeasured(saved + block, gradients, largest)
        return replace(once, kept=saved, forward=())

    def needs(
        self, order: Sequence[Instruction], own: int, fraction: float | None = None
    ) -> MemoryEstimate:
        """Return the peak bytes of a rank, by use.

        order: instructions of the schedule that the rank runs.
        own: samples of a micro-batch that the rank takes itself.
        fraction: the rank's part of the state that ZeRO partitions, where our own engine does so in
            parts of unequal size; None: DeepSpeed partitions it equally, or nothing is partitioned.
        """
        if fraction is not None:
            return self._with_part(order, own, fraction)
        rest = self.rest(order, own)
        if self._experts:
            return with_beside(self._job, self._stage, rest, self._elements, self._experts)
        return rest

    def host_bytes(self, order: Sequence[Instruction], own: int) -> float:
        """Return the peak bytes of what the rank's blocks have sent to the host. The arguments are
        those of `needs`.

        torch reserves pinned memory in powers of two.
        """
        held = peak = 0.0
        of_chunks = {
            number: sum(_power_of_two(num_bytes * own) for num_bytes in run.sent)
            for number, run in self._passing.items()
        }
        for instruction in order:
            if instruction.kind is Kind.FORWARD:
                held += of_chunks[instruction.chunk]
                peak = max(peak, held)
            elif instruction.kind in ENDS:
                held -= of_chunks[instruction.chunk]
        return peak

    @property
    def _stage(self) -> int:
        return next(iter(self._chunks.values())).stage

    def rest(self, order: Sequence[Instruction], samples: int) -> MemoryEstimate:
        """Return the peak bytes of a rank without the parts that are split beside replicas.

        order: instructions of the schedule that the rank runs.
        samples: samples of a micro-batch that the rank takes itself.
        """
        job = self._job
        keeper, on_cpu, precision = job.form.keeper, job.cluster.on_cpu, job.training.precision
        copies = len(job.copies_of_rest[self._stage][0])
        offloads = keeper is not None and keeper.offload_optimizer != "none"
        apart = keeper is not None and keeper.offload_parameters != "none"
        sizes = weights_bytes(self._elements, job.profile, precision, job.zero, apart)
        engine = engine_of(
            *(job.profile, self._elements, precision, job.zero, copies, on_cpu, offloads),
            by_block=not job.as_is,
            frozen=self._frozen,
            order=self._made_in_order if job.zero >= 2 else (),
            bucket_elements=job.training.bucket_elements,
            in_files=job.has_gradients_in_files(order),
        )
        casts, steps = self._casts(order, sizes), self._steps(order, engine)
        # 16-bit copies that a single backward frees one by one count as values.
        casts_as_values = casts if self._uses_up(order, engine) else 0.0
        worst = engine.worst(
            (come, added, values * samples + casts_as_values * left)
            for come, added, values, left in steps
        )
        frozen = sum(self._frozen.values())
        parameters = (sizes.weights + frozen) / (copies if job.zero == 3 else 1)
        states = nvme.in_files(keeper) if keeper is not None else ()
        if apart and (not on_cpu or "parameters" in states):
            parameters = 0.0
        optimizer = job.training.state_bytes(self._elements) + sizes.master
        optimizer /= copies if job.zero else 1
        if offloads and (not on_cpu or "optimizer" in states):
            optimizer = 0.0
        if on_cpu:
            parts = ((path, count / copies) for path, count in self._elements.items())
            optimizer += nvme.buffer_bytes(states, parts)
        return MemoryEstimate(
            parameters=parameters + (casts - casts_as_values) + float(job.profile.buffer_bytes),
            gradients=worst.gradients,
            optimizer=optimizer,
            activations=worst.activations + dequantised_bytes(job.profile, precision),
            communication=worst.moving,
        )

    def _with_part(
        self, order: Sequence[Instruction], samples: int, fraction: float
    ) -> MemoryEstimate:
        """Return the peak bytes of a rank that keeps `fraction` of the state of its copies.

        order, samples: as in `rest`.
        """
        job = self._job
        precision, zero = job.training.precision, job.zero
        # Below ZeRO 3 fp32 weights are updated in place, as under it.
        sizes = weights_bytes(self._elements, job.profile, precision, 3, apart=False)
        gradients = engine_of(
            *(job.profile, self._elements, precision, zero, 1, job.cluster.on_cpu, False),
            by_block=True,
            frozen=self._frozen,
            order=self._made_in_order,
            bucket_elements=job.training.bucket_elements,
        )
        sends_once = zero == 1 and not _has_one_forward(order) if job.as_is else True
        lasting = samples * sum(run.kept for run in self._passing.values()) if self._again else inf
        engine = UnevenGradients(gradients, fraction, lasting, sends_once)
        casts = self._casts(order, sizes)
        worst = engine.worst((come, m, x * samples) for come, m, x, _ in self._steps(order, engine))
        held = sizes.weights + sum(self._frozen.values())
        optimizer = job.training.state_bytes(self._elements) + sizes.master
        return MemoryEstimate(
            parameters=held * (fraction if zero == 3 else 1.0)
            + casts
            + float(job.profile.buffer_bytes),
            gradients=worst.gradients,
            optimizer=optimizer * fraction,
            activations=worst.activations + dequantised_bytes(job.profile, precision),
            communication=worst.moving,
        )

    def _on_their_way(self, order: Sequence[Instruction]) -> float:
        """Return the bytes per sample of values and gradients in flight between stages: received
        ahead of their use, or not yet sent.

        They are the traffic of one micro-batch at the chunk that has most: the values it takes and
        the gradients of these, or the values it gives.
        """
        if not any(x.kind in (Kind.SEND, Kind.RECEIVE) for x in order):
            return 0.0
        size = self._job.findings.view.num_bytes
        ends = ((chunk.slice.takes, chunk.slice.gives) for chunk in self._chunks.values())
        most = max(max(2 * sum(map(size, takes)), sum(map(size, gives))) for takes, gives in ends)
        return most * self._gathered  # every member receives the values of all samples

    def _casts(self, order: Sequence[Instruction], sizes: Weights) -> float:
        """Return the bytes of the 16-bit copies of weights.

        A step makes the copies once. With recomputation, only the copies of one block are alive at
        a time. Under ZeRO 3, each forward makes its own copies, which are kept until its backward.
        """
        if not sizes.casts:
            return 0.0
        if self._again:
            by_unit = dict[str, float]()
            for path, count in self._elements.items():
                unit = unit_of(path.rpartition(".")[0], self._again)
                by_unit[unit] = by_unit.get(unit, 0.0) + count
            rest = by_unit.pop("", 0.0)
            alive = rest * in_flight(order) / len(self._chunks) + max(by_unit.values(), default=0.0)
            return sizes.casts * alive / (rest + sum(by_unit.values()))
        if casts_last(self._job.zero, bool(self._again)):
            return sizes.casts
        return sizes.casts * in_flight(order) / len(self._chunks)

    def _uses_up(self, order: Sequence[Instruction], engine: Gradients) -> bool:
        """Return True if the backward frees the 16-bit copies of weights one by one. It does so
        with a single micro-batch, where gradients have no persistent buckets."""
        buckets = engine.are_buckets and self._one_backward
        return _has_one_forward(order) and not (buckets or self._again or self._job.zero)

    def _steps(
        self, order: Sequence[Instruction], engine: Gradients | UnevenGradients
    ) -> Iterator[tuple[float, float, float, float]]:
        """Yield the memory points on the Pareto front of every instruction.

        A point is a tuple of four: bytes of accumulated gradients, bytes of gradients about to be
        added to them, bytes of values per sample, and the fraction of the weights that is still to
        be read.
        """
        last = {x.chunk: x for x in order if x.kind in ENDS}
        values = self._on_their_way(order)
        # DistributedDataParallel keeps its buckets from the first step on.
        buckets = engine.are_buckets and self._one_backward
        done = set(self._passing) if buckets and not self._experts else set[int]()
        come = sum(self._passing[number].gradients for number in done)
        if buckets and self._experts:
            come = 4 * sum(self._elements.values())
        for instruction in order:
            kind, number, _, _ = instruction
            run = self._passing[number]
            # The last of several backwards reduces gradients over the replicas, and fills a bucket.
            summed = not self._one_backward and last[number] is instruction
            bucket = engine.summed if summed else 0.0
            if bucket and engine.fits_a_bucket:  # reduced at the end, when no value is left
                yield come, bucket, max(values - run.kept, 0.0), 0.0
                bucket = 0.0
            match kind:
                case Kind.FORWARD:
                    yield from ((come, 0.0, values + m.values, 1.0) for m in run.forward)
                    values += run.kept
                case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                    values -= run.kept
                    if kind is Kind.BACKWARD_INPUT:
                        # Tensors deferred to the weight part replace those that are freed.
                        most = max((m.values for m in run.first), default=run.kept)
                        yield come, 0.0, values + most + max(run.deferred - run.kept, 0.0), 1.0
                        values += run.deferred
                    elif number in done:
                        for m in run.again:
                            yield come, m.gradients + bucket, values + m.values, 1.0
                    else:
                        for m in run.first:
                            left = 1 - m.gradients / run.gradients if run.gradients else 1.0
                            yield come + m.gradients, bucket, values + m.values, left
                        done.add(number)
                        come += run.gradients
                case Kind.BACKWARD_WEIGHT:
                    come += 0.0 if number in done else run.gradients
                    done.add(number)
                    yield come, self._largest_made + bucket, values, 0.0
                    values -= run.deferred


def _power_of_two(num_bytes: float) -> float:
    """Return the least power of two that is at least `num_bytes`; 0 for nothing."""
    return 2.0 ** ceil(log2(num_bytes)) if num_bytes > 0 else 0.0


def _has_one_forward(order: Sequence[Instruction]) -> bool:
    return sum(x.kind is Kind.FORWARD for x in order) == 1


def _is_weight(operation: Operation) -> bool:
    return operation.target == "parameter"


def _part_of(
    chunk: StageChunk, axes: AxisIntervals, member: int, gathered: float
) -> Callable[[str], float]:
    """Return a function from the name of a value to the fraction of the value that a member of the
    chunk's shard group holds, relative to the member's own samples.

    Values inside a split part cover the samples of the whole group, `gathered` times as many.
    """
    if chunk.sharded is None:
        return whole_value
    layouts, beside = chunk.sharded.assignment.layouts, chunk.beside
    if beside is None:
        return lambda name: fraction(layouts.get(name), axes, member)
    return lambda name: (
        fraction(layouts.get(name), axes, member) * (gathered if name in beside else 1.0)
    )


def _read_as(
    chunk: StageChunk,
    axes: AxisIntervals,
    member: int,
    trained: Container[str],
    gathered: float,
) -> dict[tuple[str, str], float]:
    """Return the fractions of values that operations read through a cast that changes their size (a
    gather or a slice), by (operation, value).

    Values without a gradient are left out: autograd does not save them.
    """
    if chunk.sharded is None:
        return {}
    return {
        (cast.user, cast.value): fraction(
            cast.target if isinstance(cast.target, Shard) else None, axes, member
        )
        * (gathered if cast.user in (chunk.beside or ()) else 1.0)
        for cast in chunk.sharded.assignment.casts
        if cast.user and cast.value in trained and (cast.kind in _CHANGE_SIZE)
    }


_CHANGE_SIZE = ("gather", "gather_enter", "gather_once", "slice", "reduce_slice", "reduce_scatter",
                "reshard", DISPATCH, COMBINE)  # fmt: skip
