"""The bytes that the ranks of a nested strategy need.

A schedule is played instruction by instruction: forwards add what backwards will want, backwards
take it away and leave gradients. The worst moment within any of them is what a rank needs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate

from whale_train.errors import Fault, PlanError
from whale_train.quantities import in_bytes
from whale_train.strategies.alive import Passing, passing, passing_again
from whale_train.strategies.cut import HeadCut
from whale_train.strategies.in_place import added_in_place, named_in_place
from whale_train.strategies.instructions import ENDS, Instruction, Kind
from whale_train.strategies.kept import View, whole
from whale_train.strategies.memory import (
    Gradients,
    added,
    engine_of,
    head_activation_bytes,
    head_memory,
    precision_bytes,
    unmeasured,
    weights_bytes,
)
from whale_train.strategies.micro_batches import Batches, member_shares
from whale_train.strategies.plan import MemoryEstimate
from whale_train.strategies.stage_engines import fraction, held_elements
from whale_train.strategies.staging import Axes, Chunk, Staging, alike_members


def memory_of_ranks(
    job: Staging,
    chunks: Sequence[Chunk],
    axes: Axes,
    batches: Batches,
    orders: Sequence[Sequence[Sequence[Instruction]]],
    recomputed: Set[int],
) -> dict[int, MemoryEstimate]:
    """Of every rank: what it holds of its chunks, and what is alive at the worst moment of its
    schedule, `orders` by copy and position. `recomputed` are the stages that compute blocks
    again."""
    found: dict[int, MemoryEstimate] = {}
    known: dict[object, MemoryEstimate] = {}  # of members that hold as much
    stages = range(len(job.form.stages))
    held_by = [[n for n, c in enumerate(chunks) if c.stage == stage] for stage in stages]
    alike = [
        alike_members([axis for n in mine for axis in chunks[n].axes], axes) for mine in held_by
    ]  # fmt: skip
    passings: dict[tuple[int, int, bool], Held] = {}
    alike_orders = _alike_orders(orders)
    view = job.findings.once("rewritten", lambda: job.findings.view.rewritten())
    for copy, of_copy in enumerate(job.seats.positions):
        samples = max(stop - start for start, stop in batches.samples[copy])
        shares = {  # of the samples, where members have their own beside a split head
            stage: member_shares(job, stage, samples, copy)
            for stage in stages
            if job.form.stages[stage].body
        }
        for position, ranks in enumerate(of_copy):
            stage = job.seats.stage_of[position]
            order = orders[copy][position]
            joins = _accumulates(order)
            for index, rank in enumerate(ranks):
                member = alike[stage][index] if alike[stage] else 0
                if (stage, member, joins) not in passings:
                    mine = {number: chunks[number] for number in held_by[stage]}
                    passings[stage, member, joins] = Held(
                        job, mine, axes, member, stage in recomputed, view, joins
                    )
                own = shares[stage][index] if stage in shares else samples
                key = (stage, member, samples, own, alike_orders[id(order)])
                if key not in known:
                    known[key] = passings[stage, member, joins].needs(order, samples, own)
                found[rank] = known[key]
    return found


def _accumulates(order: Sequence[Instruction]) -> bool:
    """Return whether weights' gradients are added to as they are made, or left for later: where a
    chunk has one backward, they are not (`assemble_stages` in runtime/stages.py)."""
    chunks = {x.chunk for x in order}
    several = sum(x.kind is Kind.FORWARD for x in order) > len(chunks)
    return several or any(x.kind is Kind.BACKWARD_WEIGHT for x in order)


def _alike_orders(orders: Sequence[Sequence[Sequence[Instruction]]]) -> Mapping[int, int]:
    """The number of every order, by its id: the same for orders that only differ in which
    micro-batches are meant, of which any has each chunk's ascending."""
    found: dict[int, int] = {}
    numbers: dict[object, int] = {}
    for order in (order for of_copy in orders for order in of_copy):
        if id(order) not in found:
            kinds = tuple((each.kind, each.chunk) for each in order)
            found[id(order)] = numbers.setdefault(kinds, len(numbers))
    return found


class Held:
    """What one member of a shard group holds of its chunks, by their numbers, and what their
    forwards and backwards hold meanwhile. `again`: blocks are computed again in the backward.
    `accumulates`: gradients are added to as they are made, or left for later."""

    def __init__(
        self,
        job: Staging,
        chunks: Mapping[int, Chunk],
        axes: Axes,
        member: int,
        again: bool,
        view: View,
        accumulates: bool,
    ) -> None:
        self._job, self._chunks, self._view = job, chunks, view
        self._accumulates = accumulates
        self._elements: dict[str, float] = {}
        self._head_part = 0.0
        self._passing: dict[int, Passing] = {}
        for number, chunk in chunks.items():
            local = held_elements(job, chunk, axes, member)
            if chunk.head is not None:  # whose shard has an engine, and a reckoning, of its own
                self._head_part = fraction(next(iter(chunk.shards.values())), axes, member)
                local = {path: n for path, n in local.items() if path not in chunk.shards}
            self._elements |= local
            dealt = tuple((axes[x][member], axes[x][-1]) for x in chunk.axes)
            self._passing[number] = job.findings.once(
                ("passing", chunk.key, dealt, again, accumulates),
                partial(self._passed, chunk, axes, member, local, again),
            )

    @cached_property
    def _crossing(self) -> Mapping[int, tuple[float, float]]:
        """Bytes of a sample that each chunk gives, and takes."""
        size = self._view.num_bytes
        return {
            number: (sum(map(size, chunk.slice.gives)), sum(map(size, chunk.slice.takes)))
            for number, chunk in self._chunks.items()
        }

    def _passed(
        self, chunk: Chunk, axes: Axes, member: int, local: Mapping[str, float], again: bool
    ) -> Passing:
        job, part = self._job, chunk.slice
        if not any(operation.saved for operation in job.graph):
            return self._unmeasured(chunk, local, again)
        operations = part.operations
        if chunk.head is not None:
            of_head = job.graph.descendants({chunk.head.operation})
            operations = tuple(name for name in operations if name not in of_head)
        canonical = {name: p.path for name, p in job.profile.parameter_by_path.items()}
        read = ((name, job.graph[name]) for name in operations)
        paths = {name: canonical[op.path] for name, op in read if op.target == "parameter"}
        weights = {name: 4.0 * local[path] for name, path in paths.items() if path in local}
        # The loss is a number, which nobody takes.
        gives = [name for name in part.gives if name in operations and job.graph[name].shape]
        in_place = named_in_place(job, chunk) if self._accumulates else ()
        run = passing_again if again else passing
        view = self._view.held_by(_part_of(chunk, axes, member))
        return run(view, operations, weights, part.takes, gives, in_place)

    @cached_property
    def _largest_made(self) -> float:
        """Bytes of the largest gradient that is made before it is added."""
        chunks = self._chunks.values() if self._accumulates else ()
        in_place = {x for chunk in chunks for x in added_in_place(self._job, chunk)}
        made = (n for path, n in self._elements.items() if path not in in_place)
        return 4.0 * max(made, default=0.0)

    def _unmeasured(self, chunk: Chunk, local: Mapping[str, float], again: bool) -> Passing:
        halved = precision_bytes(self._job.training.precision, self._job.zero).activations
        part, gradients = chunk.slice, 4.0 * sum(local.values())
        largest = 4.0 * max(local.values(), default=0.0)
        if not again:
            kept = part.activation_bytes
            if chunk.head is not None:
                logits = self._job.graph[chunk.head.operation]
                kept = max(kept - head_activation_bytes(logits), 0.0)
            return unmeasured(kept * halved, gradients, largest)
        entering, block = part.entering_bytes * halved, part.block_bytes * halved
        once = unmeasured(entering + block, gradients, largest)
        return replace(once, kept=entering, forward=())

    def needs(self, order: Sequence[Instruction], samples: int, own: int) -> MemoryEstimate:
        """Return what a rank needs that runs micro-batches of `samples` in the order of the
        schedule; beside a split head it has `own` of these, and of the head a shard."""
        head = next((chunk.head for chunk in self._chunks.values() if chunk.head), None)
        rest = self._rest(order, own)
        return rest if head is None else added(rest, self._shard(head, order, samples))

    def _shard(self, head: HeadCut, order: Sequence[Instruction], samples: int) -> MemoryEstimate:
        """Return what the rank's shard of `head` needs. Its gradients are there from the start
        where there are several backwards, or copies, whose buckets they are."""
        job, stage = self._job, self._stage
        kinds = [x.kind for x in order if x.kind in (Kind.FORWARD, *ENDS)]
        steps = (1 if kind is Kind.FORWARD else -1 for kind in kinds)
        stay = kinds.count(Kind.FORWARD) > 1 or len(job.replicas(stage)) > 1
        return head_memory(
            head, job.profile, self._head_part, job.training.optimizer_states,
            job.training.precision, samples, stay, max(accumulate(steps)),
        )  # fmt: skip

    @property
    def _stage(self) -> int:
        return next(iter(self._chunks.values())).stage

    def _rest(self, order: Sequence[Instruction], samples: int) -> MemoryEstimate:
        """Return what all but a split head needs, with micro-batches of `samples`."""
        job, held = self._job, sum(self._elements.values())
        keeper, on_cpu, precision = job.form.keeper, job.cluster.on_cpu, job.training.precision
        copies = len(job.copies_of_rest(self._stage)[0])
        offloads = keeper is not None and keeper.offload_optimizer == "cpu"
        apart = keeper is not None and keeper.offload_parameters == "cpu"
        sizes = weights_bytes(self._elements, job.profile, precision, job.zero, apart)
        engine = engine_of(
            job.profile, self._elements, precision, job.zero, copies, on_cpu, offloads, True
        )
        steps = self._steps(order, engine)
        worst = engine.worst((come, added, values * samples) for come, added, values in steps)
        parameters = sizes.weights / (copies if job.zero == 3 else 1)
        if apart and not on_cpu:
            parameters = 0.0
        optimizer = 4 * job.training.optimizer_states * held + sizes.master
        return MemoryEstimate(
            parameters=parameters + sizes.casts + float(job.profile.buffer_bytes),
            gradients=worst.gradients,
            optimizer=0.0 if offloads and not on_cpu else optimizer / (copies if job.zero else 1),
            activations=worst.activations,
            communication=worst.moving,
        )

    def _steps(
        self, order: Sequence[Instruction], engine: Gradients
    ) -> Iterator[tuple[float, float, float]]:
        """The worst moments of every instruction: gradients there are, gradients about to be added
        to them, and a sample's values. What is sent stays until all of the step's has left: a
        given value also when its backward has let go of it."""
        alone = sum(x.kind is Kind.FORWARD for x in order) == 1
        last = {x.chunk: x for x in order if x.kind in ENDS}
        values, sent = 0.0, {(x.chunk, x.micro_batch) for x in order if x.kind is Kind.SEND}
        done = set(self._passing) if alone and engine.are_buckets else set[int]()
        come = sum(self._passing[other].gradients for other in done)
        for instruction in order:
            kind, number, micro_batch, _ = instruction
            run = self._passing[number]
            # Of several backwards the last sums the gradients over the copies: a bucket of them is
            # put together.
            bucket = 0.0 if alone or last[number] is not instruction else engine.summed
            match kind:
                case Kind.FORWARD:
                    yield from ((come, 0.0, values + m.values) for m in run.forward)
                    values += run.kept
                case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                    values -= run.kept
                    if kind is Kind.BACKWARD_INPUT:
                        # What is left for later takes the place of what is let go of.
                        most = max((m.values for m in run.first), default=run.kept)
                        yield come, 0.0, values + most + max(run.deferred - run.kept, 0.0)
                        values += run.deferred
                    elif number in done:
                        for m in run.again:
                            yield come, m.gradients + bucket, values + m.values
                    else:
                        for m in run.first:
                            yield come + m.gradients, bucket, values + m.values
                        done.add(number)
                        come += run.gradients
                    if (number, micro_batch) in sent:
                        values += self._crossing[number][0]
                case Kind.BACKWARD_WEIGHT:
                    come += 0.0 if number in done else run.gradients
                    done.add(number)
                    yield come, self._largest_made + bucket, values
                    values -= run.deferred
                case Kind.SEND_GRADIENT:
                    values += self._crossing[number][1]


def _part_of(chunk: Chunk, axes: Axes, member: int) -> Callable[[str], float]:
    """The part of a value that a member of a chunk's shard group has."""
    if chunk.sharded is None:  # or beside a split head, whose shard is reckoned by itself
        return whole
    layouts = chunk.sharded.assignment.layouts
    return lambda name: fraction(layouts.get(name), axes, member)


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


def shortfall_bytes(job: Staging, memory: Mapping[int, MemoryEstimate]) -> float:
    """By how much the rank that is shortest of it has too little; not positive where all fit."""
    devices = job.cluster.devices
    return max(need.total - devices[rank].memory_bytes for rank, need in memory.items())


class ShortOfMemoryError(PlanError):
    """Some rank needs `short_bytes` more than its device has, which took `work` to find out."""

    def __init__(self, fault: Fault, short_bytes: float, work: int) -> None:
        super().__init__([fault])
        self.short_bytes, self.work = short_bytes, work


def refuse_memory(job: Staging, memory: Mapping[int, MemoryEstimate], work: int) -> None:
    """Raise ShortOfMemoryError where some rank needs more than its device has: by how much, what
    helps. `work` is what it says."""
    devices = job.cluster.devices
    over = {r: m.total - devices[r].memory_bytes for r, m in memory.items()}
    worst = max(over, key=lambda rank: (over[rank], -rank))
    if over[worst] <= 0:
        return
    need = memory[worst]
    rule = (
        f"needs {in_bytes(need.total)} on rank {worst} ({devices[worst].name}), "
        f"{in_bytes(over[worst])} more than its {in_bytes(devices[worst].memory_bytes)}"
    )
    if need.activations > need.total / 2:
        remedy = "use more micro-batches, recompute: full, or a smaller train.global_batch"
    else:
        remedy = "use more stages or a wider split, or zero: 1 among copies"
    raise ShortOfMemoryError(Fault("strategy", job.strategy.name, rule, remedy), over[worst], work)
