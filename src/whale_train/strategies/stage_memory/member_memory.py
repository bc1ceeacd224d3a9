"""The peak bytes of a member of a shard group.

A schedule is played instruction by instruction: forwards add saved tensors, backwards free them and
leave gradients. The peak within any instruction is the memory that the member needs.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from whale_train.strategies.graph.operation_graph import (
    Operation,
    block_of,
)
from whale_train.strategies.graph.saved_tensors import View, whole_value
from whale_train.strategies.layouts.types import COMBINE, DISPATCH, Shard
from whale_train.strategies.memory.engine_memory import (
    Gradients,
    Weights,
    casts_last,
    engine_of,
    precision_bytes,
    unmeasured,
    weights_bytes,
)
from whale_train.strategies.memory.liveness import (
    ActivationProfile,
    profile_forward_backward,
    profile_with_recompute,
)
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


class MemberMemory:
    """The bytes of one member of a shard group: parameters, and the liveness of forwards and
    backwards.

    job: the strategy on its devices.
    chunks: chunks that the member holds, by their numbers.
    axes: intervals of the members of shard groups, by axis.
    member: index of the member in its shard group.
    again: True if blocks are recomputed in the backward.
    accumulates: True if weight gradients are accumulated in place or deferred.
    gathered: samples of the group for each sample of the member; a part that is split beside copies
        sees the rows of all of them.
    one_backward: True if DistributedDataParallel sums gradients in the backward.
    """

    def __init__(
        self,
        job: PlanningContext,
        chunks: Mapping[int, StageChunk],
        axes: AxisIntervals,
        member: int,
        again: bool,
        accumulates: bool,
        gathered: float,
        one_backward: bool,
    ) -> None:
        self._one_backward = one_backward
        self._job, self._chunks, self._gathered = job, chunks, gathered
        self._accumulates, self._again = accumulates, again
        self._elements: dict[str, float] = {}
        self._frozen: dict[str, float] = {}  # bytes of frozen weights
        self._experts: dict[str, float] = {}  # elements of parameters split beside a rest
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
            self._passing[number] = job.findings.once(
                ("passing", chunk.key, dealt, again, accumulates, gathered, tuple(local)),
                partial(self._passed, chunk, axes, member, local, again),
            )

    @property
    def _has_buckets(self) -> bool:
        """Return True if the rest beside experts has all gradients from its first step on, as the
        buckets of DistributedDataParallel."""
        job = self._job
        several = len(job.copies_of_rest[self._stage][0]) > 1
        return several and not (self._accumulates or job.zero or len(job.form.stages) > 1)

    def _view(self, chunk: StageChunk) -> View:
        """Return the sizes of the values as ranks run `chunk`: as it is, or rewritten."""
        job, view, on_cpu = self._job, self._job.findings.view, self._job.cluster.on_cpu
        if not job.as_is:
            return view.rewritten(rewrites_of(job, chunk, own_gradients=False))
        # Models that run as they are repeat no keys on GPUs.
        return view if on_cpu else view.rewritten(job.findings.grouped_keys)

    def _passed(
        self,
        chunk: StageChunk,
        axes: AxisIntervals,
        member: int,
        local: Mapping[str, float],
        again: bool,
    ) -> ActivationProfile:
        """Return the liveness of one forward and backward of `chunk`, with gradients of the
        parameters `local` (elements by path) alone."""
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
        run = profile_with_recompute if again else profile_forward_backward
        view = self._view(chunk).held_by(
            _part_of(chunk, axes, member, self._gathered),
            _read_as(chunk, axes, member, job.graph.trained, self._gathered),
        )
        own = () if job.as_is else own_gradients_of(job, chunk)
        return run(view, operations, weights, part.takes, gives, in_place, own)

    @cached_property
    def _made_in_order(self) -> tuple[str, ...]:
        """Return the paths of the weights in the order in which a backward makes their gradients:
        the reverse of the order in which the forward reads each weight last."""
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
        """Return the bytes of the largest gradient that a backward makes apart from the sum to
        which it is added. Gradients that are accumulated in place are left out."""
        chunks = self._chunks.values() if self._accumulates else ()
        in_place = {x for chunk in chunks for x in added_in_place(self._job, chunk)}
        made = (n for path, n in self._elements.items() if path not in in_place)
        return 4.0 * max(made, default=0.0)

    def _unmeasured(
        self, chunk: StageChunk, local: Mapping[str, float], again: bool
    ) -> ActivationProfile:
        """Return the liveness of `chunk` where no operation's saved tensors were measured, from the
        totals of its slice."""
        halved = precision_bytes(self._job.training.precision, self._job.zero).activations
        part, gradients = chunk.slice, 4.0 * sum(local.values())
        largest = 4.0 * max(local.values(), default=0.0)
        if not again:
            return unmeasured(part.activation_bytes * halved, gradients, largest)
        entering, block = part.entering_bytes * halved, part.block_bytes * halved
        once = unmeasured(entering + block, gradients, largest)
        return replace(once, kept=entering, forward=())

    def needs(self, order: Sequence[Instruction], own: int) -> MemoryEstimate:
        """Return the bytes that a rank needs at its peak, by what holds them.

        order: instructions of the schedule that the rank runs.
        own: samples of a micro-batch that the rank takes itself.
        """
        rest = self.rest(order, own)
        if self._experts:
            return with_beside(self._job, self._stage, rest, self._elements, self._experts)
        return rest

    @property
    def _stage(self) -> int:
        return next(iter(self._chunks.values())).stage

    def rest(self, order: Sequence[Instruction], samples: int) -> MemoryEstimate:
        """Return the bytes that a rank needs at its peak for all but what is split beside copies,
        in micro-batches of which it takes `samples` itself."""
        job = self._job
        keeper, on_cpu, precision = job.form.keeper, job.cluster.on_cpu, job.training.precision
        copies = len(job.copies_of_rest[self._stage][0])
        offloads = keeper is not None and keeper.offload_optimizer == "cpu"
        apart = keeper is not None and keeper.offload_parameters == "cpu"
        sizes = weights_bytes(self._elements, job.profile, precision, job.zero, apart)
        engine = engine_of(
            *(job.profile, self._elements, precision, job.zero, copies, on_cpu, offloads),
            by_block=not job.as_is,
            frozen=self._frozen,
            order=self._made_in_order if job.zero >= 2 else (),
        )
        casts, steps = self._casts(order, sizes), self._steps(order, engine)
        # 16-bit copies that an only backward frees weight by weight count as values.
        kept = casts if self._uses_up(order, engine) else 0.0
        worst = engine.worst(
            (come, added, values * samples + kept * left) for come, added, values, left in steps
        )
        frozen = sum(self._frozen.values())
        parameters = (sizes.weights + frozen) / (copies if job.zero == 3 else 1)
        if apart and not on_cpu:
            parameters = 0.0
        optimizer = job.training.state_bytes(self._elements) + sizes.master
        return MemoryEstimate(
            parameters=parameters + (casts - kept) + float(job.profile.buffer_bytes),
            gradients=worst.gradients,
            optimizer=0.0 if offloads and not on_cpu else optimizer / (copies if job.zero else 1),
            activations=worst.activations,
            communication=worst.moving,
        )

    def _on_their_way(self, order: Sequence[Instruction]) -> float:
        """Return the bytes of a sample's values and gradients that are received ahead of their use
        or have not left yet. They are those of one micro-batch at the end of a chunk that has most:
        the values it takes, twice (their gradients as well), or the values it gives."""
        if not any(x.kind in (Kind.SEND, Kind.RECEIVE) for x in order):
            return 0.0
        size = self._job.findings.view.num_bytes
        ends = ((chunk.slice.takes, chunk.slice.gives) for chunk in self._chunks.values())
        most = max(max(2 * sum(map(size, takes)), sum(map(size, gives))) for takes, gives in ends)
        return most * self._gathered  # every member receives the values of all samples

    def _casts(self, order: Sequence[Instruction], sizes: Weights) -> float:
        """Return the bytes of the 16-bit copies of weights. A step makes them once. Where blocks
        are recomputed, the copies of one block are there at a time. Under ZeRO 3 each forward makes
        its own copies, which are kept until its backward."""
        if not sizes.casts:
            return 0.0
        if self._again:
            by_block: dict[str, float] = {}
            for path, count in self._elements.items():
                block = block_of(path.rpartition(".")[0])
                by_block[block] = by_block.get(block, 0.0) + count
            return sizes.casts * max(by_block.values()) / sum(by_block.values())
        if casts_last(self._job.zero, self._again):
            return sizes.casts
        return sizes.casts * in_flight(order) / len(self._chunks)

    def _uses_up(self, order: Sequence[Instruction], engine: Gradients) -> bool:
        """Return True if the backward frees the 16-bit copies of weights one by one, as the
        backward of an only micro-batch does where gradients have no buckets that last."""
        buckets = engine.are_buckets and self._one_backward
        return _has_one_forward(order) and not (buckets or self._again or self._job.zero)

    def _steps(
        self, order: Sequence[Instruction], engine: Gradients
    ) -> Iterator[tuple[float, float, float, float]]:
        """Yield the moments on every instruction's Pareto front as tuples of four: bytes of
        gradients, bytes of gradients about to be added to them, bytes of a sample's values, and the
        fraction of the weights that are still read."""
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
            # The last of several backwards sums gradients over the copies, and fills a bucket.
            summed = not self._one_backward and last[number] is instruction
            bucket = engine.summed if summed else 0.0
            if bucket and engine.fits_a_bucket:  # all are summed at the end, when no value is left
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


def _has_one_forward(order: Sequence[Instruction]) -> bool:
    return sum(x.kind is Kind.FORWARD for x in order) == 1


def _is_weight(operation: Operation) -> bool:
    return operation.target == "parameter"


def _part_of(
    chunk: StageChunk, axes: AxisIntervals, member: int, gathered: float
) -> Callable[[str], float]:
    """Return the function from a value's name to the fraction of the value that a member of the
    chunk's shard group has, relative to its own samples. Values inside a split part are of all
    samples of the group, which has `gathered` times as many."""
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
    """Return the fractions of values that operations read after a cast that changes their size
    (puts shards together, or cuts), by (operation, value). Values without a gradient, which nobody
    keeps, are left out."""
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
