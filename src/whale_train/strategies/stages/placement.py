"""The placement of a strategy: which rank holds which shard of which stage of which replica.

Ranks are numbered by replica of the pipeline, then by stage, copy of the stage, and shard, or with
`prefer_intra_node: false` by stage and its copy, then by replica, and shard. Where
stages name a kind of device, each takes the next ranks of that kind in this order.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, pairwise

from whale_train.errors import Fault
from whale_train.strategies.cost.roofline import flops_rate
from whale_train.strategies.grammar.form import Form, needs_graph
from whale_train.strategies.grammar.nodes import Pipeline, Replicate, Strategy, every_node
from whale_train.strategies.grammar.normal_form import read_form
from whale_train.strategies.graph.operation_graph import ModelProfile, OperationGraph
from whale_train.strategies.graph.rewrites import Rewrite
from whale_train.strategies.hardware.cluster import Cluster, Device
from whale_train.strategies.layouts.propagation import Shard
from whale_train.strategies.layouts.segment import Segment
from whale_train.strategies.partition.output_head import Head
from whale_train.strategies.partition.pipeline_partition import Slice
from whale_train.strategies.plan.training import Training
from whale_train.strategies.schedule.instructions import Instruction, Kind
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.tensor_parallel.choose import Sharded

VIRTUAL_STAGES = 2  # chunks a device holds under interleaved_1f1b

AxisIntervals = Mapping[
    str, tuple[tuple[int, int], ...]
]  # by axis, the [start, stop) of each member of a shard group


@dataclass(frozen=True)
class RankGrid:
    """The ranks at each position of a strategy's pipelines.

    positions: ranks of the shard group at position p of a replica, as `positions[replica][p]`.
    stage_of: number of the stage that position p holds, as `stage_of[p]`; equal in all replicas.
    """

    positions: tuple[tuple[tuple[int, ...], ...], ...]
    stage_of: tuple[int, ...]

    def of_stage(self, stage: int) -> list[int]:
        """Return the positions that hold `stage`, ascending."""
        return [position for position, held in enumerate(self.stage_of) if held == stage]

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of ranks of neighbouring positions that send to each other."""
        for positions in self.positions:
            for senders, receivers in pairwise(positions):
                for index, receiver in enumerate(receivers):
                    yield senders[index % len(senders)], receiver


def place_ranks(
    stages: Sequence[tuple[str | None, int, int]],
    copies: int,
    devices: Sequence[Device],
    prefer_intra_node: bool = True,
) -> RankGrid:
    """Return the ranks of `copies` replicas of a pipeline of `stages`.

    stages: (kind of device or None for any, copies of the stage, shards of a copy) of each stage.
    devices: the devices, in rank order.
    prefer_intra_node: True if neighbouring stages of a replica are neighbouring ranks, which share
        a node where they can; False if the replicas of a stage are.

    Replica by replica and stage by stage, or stage by stage and replica by replica, each stage
    takes the next ranks of its kind.
    """
    unseated: dict[str | None, Iterator[int]] = {None: iter(range(len(devices)))}
    for kind in {kind for kind, _, _ in stages} - {None}:
        unseated[kind] = iter([rank for rank, dev in enumerate(devices) if dev.name == kind])
    wanted = [(kind, shards) for kind, width, shards in stages for _ in range(width)]
    if prefer_intra_node:
        positions = tuple(
            tuple(tuple(islice(unseated[kind], shards)) for kind, shards in wanted)
            for _ in range(copies)
        )
    else:
        by_position = [
            [tuple(islice(unseated[kind], shards)) for _ in range(copies)]
            for kind, shards in wanted
        ]
        positions = tuple(zip(*by_position, strict=True))
    stage_of = tuple(s for s, (_, width, _) in enumerate(stages) for _ in range(width))
    return RankGrid(positions, stage_of)


@dataclass(frozen=True)
class StageChunk:
    """A slice of the model and the stage that runs it. Chunks of one `key` differ only in names and
    in the number of their stage.

    stage: number of the stage.
    slice: operations, values and weights of the chunk.
    key: cache key of everything derived from the chunk.
    sharded: layouts of the chunk's values over its shard group; None where the stage is no split.
        Where the rest is replicated, they cover only the operations `beside`, shards of weights,
        and values made of such shards alone.
    beside: operations of the split part, which run on rows of other members as well, where the rest
        is replicated; None where the stage has no such part.
    head: the output projection, where it is the only such part.
    shares_sequence: True if the members of the shard group divide the positions of every sample.
    """

    stage: int
    slice: Slice
    key: Hashable
    sharded: Sharded | None = None
    beside: frozenset[str] | None = None
    head: Head | None = None
    shares_sequence: bool = False

    @property
    def shares_samples(self) -> bool:
        """Return True if the members of the shard group take different samples of a micro-batch."""
        return self.beside is not None

    def has_own_losses(self, loss: str) -> bool:
        """Return True if members that take different samples, or positions of them, each compute a
        `loss` of their own."""
        return self.shares_sequence or (self.beside is not None and loss not in self.beside)

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Return the layouts of the chunk's sharded parameters, by canonical path."""
        return self.sharded.weights if self.sharded is not None else {}

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Return the axes along which experts are spread while the rest is replicated (expert
        parallelism)."""
        if self.sharded is None or self.beside is None:
            return ()
        patterns = self.sharded.patterns
        cuts = (cut for path, cut in self.shards.items() if patterns.get(path) == "experts")
        return tuple(dict.fromkeys(cut.axis for cut in cuts))

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes along which the chunk's parameters and values are sharded."""
        return tuple(self.sharded.axes) if self.sharded is not None else ()


def equivalent_ranks(named: Iterable[str], axes: AxisIntervals) -> Sequence[int]:
    """Return, for each member of a shard group, the first member whose intervals along the axes
    `named` have the same sizes. The list is empty where none of these axes is in `axes`."""
    sharded = [axes[axis] for axis in dict.fromkeys(named) if axis in axes]
    first: dict[tuple[int, ...], int] = {}
    sizes = [
        tuple(stop - start for start, stop in intervals) for intervals in zip(*sharded, strict=True)
    ]
    return [first.setdefault(size, member) for member, size in enumerate(sizes)]


@dataclass(frozen=True)
class PlanningContext:
    """A strategy in the form it has on a cluster, with the model and the training it is planned
    for.

    strategy: the request's strategy.
    cluster: the devices that the strategy uses, one for each rank.
    findings: the analysis cache of the model.
    training: batch, precision and optimizer.
    form: replicas, stages and shards, as returned by `form_of`.
    """

    strategy: Strategy
    cluster: Cluster
    findings: ModelAnalysis
    training: Training
    form: Form

    @cached_property
    def seats(self) -> RankGrid:
        """Return the ranks at every position of every replica."""
        stages = [(stage.device, stage.copies, stage.shards) for stage in self.form.stages]
        intra = self.strategy.prefer_intra_node
        return place_ranks(stages, self.form.copies, self.cluster.devices, intra)

    @property
    def profile(self) -> ModelProfile:
        """Return the profile of the model."""
        return self.findings.profile

    @property
    def graph(self) -> OperationGraph:
        """Return the exported graph of the model, which must have one."""
        return self.findings.graph

    @cached_property
    def as_is(self) -> bool:
        """Return True if ranks run the user's module itself, and not its exported graph."""
        return not needs_graph(self.strategy) and not self.batch_sums

    @cached_property
    def batch_sums(self) -> Mapping[str, int]:
        """Return the degree of each sum over the batch that replicas exchange, by the value's name
        (see `independence/states.py`). The mapping is empty for one replica, and where the request
        vouches that samples are independent."""
        copies = self.form.copies * self.form.members
        if copies == 1 or self.training.samples_are_independent:
            return {}
        return self.findings.samples.sums

    @property
    def zero(self) -> int:
        """Return the ZeRO stage of the replicas; 0 where they partition nothing."""
        return self.form.keeper.zero if self.form.keeper else 0

    @property
    def chunk_count(self) -> int:
        """Return the number of chunks the model is cut into."""
        pipeline = self.form.pipeline
        interleaved = pipeline is not None and pipeline.schedule == "interleaved_1f1b"
        return len(self.form.stages) * (VIRTUAL_STAGES if interleaved else 1)

    @cached_property
    def task_graphs(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of every stage's TaskGraphs: one, or two where a part is split and the
        rest replicated. The first of two is the rest."""
        numbers, start = [], 0
        for stage in self.form.stages:
            stop = start + (2 if stage.body else 1)
            numbers.append(tuple(range(start, stop)))
            start = stop
        return tuple(numbers)

    def member_speeds(self, stage: int) -> list[float]:
        """Return the FLOP/s of each member of the stage's shard groups, summed over all replicas of
        the stage."""
        speeds = [0.0] * self.form.stages[stage].shards
        for group in self.replicas[stage]:
            for index, rank in enumerate(group):
                device = self.cluster.devices[rank]
                speeds[index] += flops_rate(device, self.training.precision)
        return speeds

    def stage_speeds(self, copy: int) -> list[float]:
        """Return the speed of every stage of a replica: FLOP/s, or the number of devices where the
        strategy balances evenly."""
        precision = self.training.precision
        even = self.strategy.balance == "even"
        speeds = [0.0] * len(self.form.stages)
        for position, ranks in enumerate(self.seats.positions[copy]):
            rates = [1.0 if even else flops_rate(self.cluster.devices[r], precision) for r in ranks]
            speeds[self.seats.stage_of[position]] += sum(rates)
        return speeds

    def chunks_of_positions(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the chunks that every position holds."""
        stages = len(self.form.stages)
        chunks = range(self.chunk_count)
        return tuple(tuple(chunks[stage::stages]) for stage in self.seats.stage_of)

    @cached_property
    def replicas(self) -> Sequence[tuple[tuple[int, ...], ...]]:
        """Return the shard groups that hold each stage, by stage."""
        by_stage: list[list[tuple[int, ...]]] = [[] for _ in self.form.stages]
        for of_copy in self.seats.positions:
            for stage, ranks in zip(self.seats.stage_of, of_copy, strict=True):
                by_stage[stage].append(ranks)
        return [tuple(groups) for groups in by_stage]

    @cached_property
    def data_parallel(self) -> Sequence[tuple[tuple[int, ...], ...]]:
        """Return the ranks that hold each shard of each stage, by stage and shard."""
        return [tuple(zip(*groups, strict=True)) for groups in self.replicas]

    @cached_property
    def copies_of_rest(self) -> Sequence[tuple[tuple[int, ...], ...]]:
        """Return the groups of ranks that hold the same replicated parameters, by stage.

        A stage with a split part beside a replicated rest has one group of all its ranks, since
        every member of every shard group holds all of the rest. So has a stage whose members divide
        positions.
        """
        return [
            (tuple(sorted(chain.from_iterable(groups))),) if stage.copies_weights else of_shards
            for stage, of_shards, groups in zip(
                self.form.stages, self.data_parallel, self.replicas, strict=True
            )
        ]

    def has_one_backward(self, orders: Sequence[Sequence[Sequence[Instruction]]]) -> bool:
        """Return True if DistributedDataParallel reduces the gradients of replicas during the
        backward.

        It does where the model runs as it is, and where every position runs one backward of the
        only chunk. `orders` are the instructions, by replica and position.
        """
        forwards = (
            [x.chunk for x in order if x.kind is Kind.FORWARD]
            for of_copy in orders
            for order in of_copy
        )
        return self.as_is or all(chunks == [0] for chunks in forwards)

    def has_gradients_in_files(self, order: Sequence[Instruction]) -> bool:
        """Return True if the rank that runs `order` writes gradients to files as its backward makes
        them.

        It does where the optimizer is in files and a step has one backward, to whose gradients no
        other backward and no other stage adds any.
        """
        keeper = self.form.keeper
        if keeper is None or keeper.offload_optimizer != "nvme" or len(self.form.stages) > 1:
            return False
        return sum(x.kind is Kind.FORWARD for x in order) == 1

    def accumulates(self, order: Sequence[Instruction]) -> bool:
        """Return True if the rank that runs `order` accumulates weight gradients in place or defers
        them. It does where some chunk has several backwards, or one in two parts."""
        chunks = {x.chunk for x in order}
        several = sum(x.kind is Kind.FORWARD for x in order) > len(chunks)
        several = several or any(x.kind is Kind.BACKWARD_WEIGHT for x in order)
        return several and not self.as_is

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the (replica, position) of a rank."""
        return self._places[rank]

    def stage_of_rank(self, rank: int) -> int:
        """Return the stage of which a rank holds a part."""
        return self.seats.stage_of[self._places[rank][1]]

    def keeper_beside(self, stage: int) -> Replicate | None:
        """Return the ZeRO and offload settings of a stage's split parts (experts, a head, other
        modules), which have an engine of their own; None where each rank holds its part and the
        state in full.

        The settings are those of the replicated rest, with ZeRO 1 at most: replicas of a split part
        partition its optimizer, or offload it, and nothing else. A part with a single replica is
        streamed (docs/adr/051) where the rest's weights are on the hosts. The result is None where
        the rest has no ZeRO, and for a single replica without offload.
        """
        form, keeper = self.form.stages[stage], self.form.keeper
        if keeper is None or not keeper.zero:
            return None
        alone = self.form.copies * form.copies == 1
        if alone and keeper.offload_parameters == "cpu":
            return replace(keeper, zero=0, offload_optimizer="cpu")
        if alone and keeper.offload_optimizer == "none":
            return None
        return replace(keeper, zero=1, offload_parameters="none")

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, int]]:
        return {
            rank: (copy, position)
            for copy, of_copy in enumerate(self.seats.positions)
            for position, ranks in enumerate(of_copy)
            for rank in ranks
        }


def segment_of(job: PlanningContext, chunk: StageChunk) -> Segment:
    """Return the segment of the graph that the stage of `chunk` runs."""
    number, part = job.task_graphs[chunk.stage][0], chunk.slice
    assignment = chunk.sharded.assignment if chunk.sharded else None
    sums = {name: job.batch_sums[name] for name in part.operations if name in job.batch_sums}
    return Segment(number, part.operations, part.takes, part.gives, assignment, sums)


def rewrites_of(
    job: PlanningContext, chunk: StageChunk, own_gradients: bool
) -> tuple[Rewrite, ...]:
    """Return the rewrites of a chunk's operations. With `own_gradients`, these operations compute
    their weights' gradients themselves; otherwise autograd does."""
    defers = job.form.pipeline is not None and job.form.pipeline.schedule == "zero_bubble"
    on_cpu = job.cluster.on_cpu

    def find() -> tuple[Rewrite, ...]:
        segment, scaled = segment_of(job, chunk), job.findings.scaled_names
        return segment.rewrites(job.graph, on_cpu, defers, own_gradients, scaled)

    key = ("rewrites", *named_key(job, chunk), on_cpu, defers, own_gradients)
    return job.findings.once(key, find)


def own_gradients_of(job: PlanningContext, chunk: StageChunk) -> Set[str]:
    """Return the names of a chunk's operations that can compute their weights' gradients
    themselves."""

    def find() -> Set[str]:
        return frozenset(segment_of(job, chunk).scope(job.graph).own_gradients())

    return job.findings.once(("own gradients", *named_key(job, chunk)), find)


def named_key(job: PlanningContext, chunk: StageChunk) -> tuple[Hashable, ...]:
    """Return a cache key for results that name the operations and weights of a chunk. Such results
    differ between chunks of one `key`."""
    names = chunk.slice.operations
    return chunk.key, names[0], names[-1], bool(job.batch_sums)


def form_of(
    strategy: Strategy, cluster: Cluster, training: Training, faults: list[Fault]
) -> Form | None:
    """Return the form of `strategy` on `cluster`. If the strategy has faults with any model, add
    all of them to `faults` and return None."""
    before = len(faults)
    sizes = {len(node.devices) for node in cluster.nodes}
    per_node = sizes.pop() if len(sizes) == 1 else 0
    kinds = Counter(device.name for device in cluster.devices)
    if training.accumulate > 1 and any(isinstance(x, Pipeline) for x in every_node(strategy.graph)):
        rule = "cuts the batch of a strategy whose micro-batches are its pipeline's"
        remedy = "use 1, and micro_batches in the strategy's pipeline"
        faults.append(Fault("train.accumulate", str(training.accumulate), rule, remedy))
    form = read_form(strategy, kinds, per_node, cluster.name, faults)
    if form is None:
        devices = len(cluster.devices)
        if not needs_graph(strategy) and training.global_batch < devices:  # with any degrees
            faults.append(_too_few_samples(training.global_batch, devices, "devices"))
        return None
    batch, pipeline = training.global_batch, form.pipeline
    sharing, key = form.copies * form.members, "train.global_batch"
    who = "devices" if form.width == form.members else "copies"
    if batch < sharing:
        faults.append(_too_few_samples(batch, sharing, who))
        return None
    widest = max(stage.copies for stage in form.stages)
    asked = pipeline.micro_batches if pipeline else training.accumulate
    most = batch // sharing
    if asked and asked > most:
        path = f"{pipeline.path}.micro_batches" if pipeline else "train.accumulate"
        rule = f"cuts the {most} samples of a copy into micro-batches of none"
        if pipeline is None:
            one = "device" if who == "devices" else "copy"
            rule = f"cuts a {one}'s share into micro-batches of none (train.global_batch={batch} "
            rule += f"on {sharing} {who})"
        faults.append(Fault(path, str(asked), rule, f"use at most {most}"))
    elif (asked or most) < widest:
        rule = f"leaves some of a stage's {widest} copies without a micro-batch"
        path = f"{pipeline.path}.micro_batches" if pipeline and asked else key
        remedy = f"use at least {widest if asked else widest * form.copies}"
        faults.append(Fault(path, str(asked or batch), rule, remedy))
    return None if len(faults) > before else form


def _too_few_samples(batch: int, sharing: int, who: str) -> Fault:
    rule = f"leaves some of the {sharing} {who} without a sample"
    return Fault("train.global_batch", str(batch), rule, f"use at least {sharing}")
