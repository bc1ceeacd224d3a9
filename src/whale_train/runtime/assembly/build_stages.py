"""Assemble one rank's part of a rewritten graph: the chunks of its stage.

Only the tensors that the stage holds are copied out of the shared initial weights. Of a sharded
tensor, only this rank's shard is copied.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.config import Request
from whale_train.models.loss_module import LossModule
from whale_train.runtime.assembly.shard_params import (
    narrow_of,
    own_tensors,
    streamed_of,
    tensor_paths,
)
from whale_train.runtime.base.autocast import NARROW, casting_once
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.base.host_copies import HostCopies
from whale_train.runtime.comms.batch_sums import BatchShare
from whale_train.runtime.comms.p2p import Transport
from whale_train.runtime.comms.process_groups import sums_of, two_level_sum
from whale_train.runtime.compile.compiler import Compiler
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.make import make_engine
from whale_train.runtime.engines.rank_context import RankContext
from whale_train.runtime.graph.expert_loads import ExpertLoads
from whale_train.runtime.graph.segment import Counts, SegmentModule
from whale_train.runtime.graph.shard_graph import write_segment_graph
from whale_train.runtime.graph.shard_place import ShardContext
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.graph.value_types import ValueTypes
from whale_train.runtime.kernels.streamed_weights import StreamedWeights
from whale_train.runtime.kernels.weight_gradients import WeightGradients
from whale_train.runtime.loss.global_mean import target_counter
from whale_train.runtime.loss.micro_batch_loss import MicroBatchLoss
from whale_train.runtime.pipeline.chunk import (
    BatchShardedChunk,
    Chunk,
    PerMicroBatchChunk,
    Segments,
)
from whale_train.runtime.pipeline.executor import PipelineModel
from whale_train.runtime.pipeline.route import MessageTypes, PipelinePlace, Route
from whale_train.strategies.layouts.propagation import BATCH
from whale_train.strategies.plan.group_names import context_of
from whale_train.strategies.plan.plan import Plan, TaskGraph
from whale_train.strategies.plan.program import PlannedChunk, PlannedSegment, PlannedShard
from whale_train.strategies.plan.training import bucket_elements

_Sharing = tuple[tuple[int, int], ...]  # the interval of a micro-batch that each member takes


@dataclass(frozen=True)
class _Written:
    """The segment of one chunk, written for one sharing of its micro-batches.

    chunk: the number of the chunk.
    sharing: the interval of a micro-batch that each member of the shard group takes; empty: every
        member takes all of it.
    task_graph: the number of the segment's TaskGraph.
    segment: the segment.
    """

    chunk: int
    sharing: _Sharing
    task_graph: int
    segment: SegmentModule


def assemble_stages(
    request: Request, plan: Plan, module: LossModule, graph: fx.GraphModule, seat: RankContext
) -> PipelineModel:
    """Return the program of `seat.rank`, for a plan with a rewritten graph.

    `module` and `graph` are the arguments of `assemble`.
    """
    assert plan.pipeline is not None
    assert plan.rewrite is not None
    place = PipelinePlace.of(plan.pipeline, seat.rank)
    copy = plan.pipeline.copies[place.copy]
    held = plan.pipeline.positions[place.position]
    shared = copy.shared_at(place.position)
    own_losses = plan.pipeline.chunks[-1].own_losses
    pieces = sum(len(part.samples) for part in plan.pipeline.copies)
    samples = copy.samples
    if own_losses:
        pieces *= len(copy.positions[-1])
        samples = tuple(intervals[place.index] for intervals in shared) or samples
    counter = None
    if pieces > 1 or request.train.evaluate_every is not None:
        counter = target_counter(module, graph, seat.groups["world"], seat.device)
    loss = MicroBatchLoss(samples, plan.loss_weights, counter, seat.device)
    weight_gradients, counts = WeightGradients(), Counts()
    numbers = [plan.pipeline.chunks[chunk].segment for chunk in held]
    task_graphs = [plan.task_graphs[number] for number in plan.ranks[seat.rank].task_graphs]
    canonical, tensors = own_tensors(
        [plan.rewrite.segments[number] for number in numbers],
        *(task_graphs, module, graph, place.index, seat),
        NARROW.get(plan.precision),
    )
    places = {
        task_graph.id: ShardContext(
            device=seat.device,
            group=_casts_over(task_graph, task_graphs, seat),
            index=place.index,
            axes=plan.rewrite.axes,
            batch_norm_group=(
                seat.groups.get(_copies_of(task_graph)) if request.model.sync_batchnorm else None
            ),
            loss_scale=loss.scale if pieces > 1 else None,
            seed=_seed(request.seed, task_graph.id, place),
            share=_share(plan, task_graph, seat),
            shares_sequence=context_of(task_graph.name) in plan.groups,
        )
        for task_graph in task_graphs
    }
    # An evaluation has several batches, and so several pieces, even if a step has one.
    scale = None if counter is None else loss.scale
    streamed = streamed_of(task_graphs, tensors, NARROW.get(plan.precision), seat)
    owner = weight_gradients if plan.ranks[seat.rank].accumulates else None
    writer = _Writer(
        *(plan, graph, canonical, tensors, counts, owner, scale),
        *(seat.compiler, streamed, HostCopies(seat.device)),
    )
    loads = ExpertLoads(plan.mixtures, seat.device) if plan.mixtures else None
    sharings: tuple[_Sharing, ...] = tuple(dict.fromkeys(shared))
    segments_written: list[_Written] = []
    shared_random: list[SharedRandom] = []
    for chunk in held:
        described = plan.pipeline.chunks[chunk]
        # If all members have the same samples, only the first counts the experts' rows.
        counting = loads if described.shares_samples or place.index == 0 else None
        for number, sharing in enumerate(sharings if described.shares_samples else ((),)):
            here = {
                owner: replace(
                    at, axes={**at.axes, BATCH: sharing}, seed=at.seed + number, loads=counting
                )
                for owner, at in places.items()
            }
            shared_random += [at.random for at in here.values()]
            segments_written.append(_Written(chunk, sharing, *writer.segment(described, here)))
    engines: dict[int, Engine] = {}
    for task_graph in task_graphs:
        owned = [part.segment for part in segments_written if part.task_graph == task_graph.id]
        runs, excess = bool(owned), None
        if not runs:  # another TaskGraph runs this one's parameters
            held_here = {path: tensors[path] for path in task_graph.parameters if path in tensors}
            owned = [SegmentModule((), (), held_here)]
            excess = engines[task_graphs[0].id].scale
        segments = Segments(owned)
        copies = _copies(request, plan, task_graph, tensors, seat)
        once = runs and plan.pipeline.one_backward
        engines[task_graph.id] = make_engine(
            *(request, plan, task_graph, segments, copies, seat, tensors),
            overlap=once,
            excess=excess,
            streamed=streamed,
        )
    last = len(plan.pipeline.chunks) - 1
    chunks = _chunks(segments_written, engines, shared, places[task_graphs[-1].id], last)
    route = Route.of(plan, place)
    types = MessageTypes(route, ValueTypes(graph, route.crossing, plan.precision, seat.device))
    transport = Transport(seat.device, seat.channels, types)
    casting: Callable[[], AbstractContextManager[None]] = nullcontext
    if plan.ranks[seat.rank].keeps_casts:
        casting = partial(_casting_once, weight_gradients, seat.device)
    return PipelineModel(
        *(plan, route, chunks, loss, types, transport, counts, weight_gradients, shared_random),
        casting,
        loads,
    )


class _Writer:
    """Writes the segments that one rank runs, from the exported `graph`.

    canonical: the canonical path of every parameter's name.
    tensors: this rank's tensors, by canonical path.
    counts: receives the counts of an evaluation.
    weight_gradients: adds weights' gradients of the training graph in place, or defers them; None
        where the rank does neither.
    evaluation_scale: the scale of an evaluation's losses; None: they are not scaled.
    compiler: compiles the segments; None: they are not compiled.
    streamed: copies weights from the host.
    copies: receives what offloaded modules save.
    """

    def __init__(
        self,
        plan: Plan,
        graph: fx.GraphModule,
        canonical: dict[str, str],
        tensors: Mapping[str, Tensor],
        counts: Counts,
        weight_gradients: WeightGradients | None,
        evaluation_scale: Any,
        compiler: Compiler | None,
        streamed: StreamedWeights,
        copies: HostCopies,
    ) -> None:
        self._plan, self._graph = plan, graph
        self._canonical, self._tensors = canonical, tensors
        self._counts, self._weight_gradients = counts, weight_gradients
        self._evaluation_scale = evaluation_scale
        self._compiler, self._streamed, self._copies = compiler, streamed, copies

    def segment(
        self, described: PlannedChunk, places: Mapping[int, ShardContext]
    ) -> tuple[int, SegmentModule]:
        """Write the segment of the chunk `described`, and return the number of its TaskGraph with
        it.

        `places` maps a TaskGraph to the context in which its operations run.
        """
        assert self._plan.rewrite is not None
        planned = self._plan.rewrite.segments[described.segment]
        here = places[planned.task_graph]
        paths = tensor_paths(planned, self._graph, self._canonical)
        lent = self._lent_to(planned)
        held = {path: self._tensors[path] for path in paths if path not in lent}
        segment = SegmentModule(planned.takes, planned.gives, held, lent)
        evaluated = replace(here, loss_scale=self._evaluation_scale, loads=None)
        owner = self._weight_gradients or WeightGradients()
        for at, counts in ((here, None), (evaluated, self._counts)):
            write_segment_graph(segment, planned, self._graph, self._canonical, at, counts, owner)
        again, sent = frozenset(described.recomputed), frozenset(described.offloaded)
        gathered = self._plan.task_graphs[planned.task_graph].zero == 3
        segment.stream(self._streamed)
        if self._compiler is not None:
            segment.compile(self._compiler, again, sent)
        if again or sent or gathered:
            segment.divide(again, here.random, sent, self._copies)
        return planned.task_graph, segment

    def _lent_to(self, planned: PlannedSegment) -> dict[str, nn.Parameter]:
        """Return, by path, the parameters that a segment reads from TaskGraphs without a segment of
        their own."""
        assert self._plan.rewrite is not None
        run = {segment.task_graph for segment in self._plan.rewrite.segments}
        paths = tensor_paths(planned, self._graph, self._canonical)
        lenders = (t for t in self._plan.task_graphs if t.id not in run)
        lent_paths = {path for lender in lenders for path in lender.parameters}
        lent = ((path, self._tensors[path]) for path in paths if path in lent_paths)
        return {path: tensor for path, tensor in lent if isinstance(tensor, nn.Parameter)}


def _chunks(
    segments_written: Sequence[_Written],
    engines: Mapping[int, Engine],
    members: Sequence[_Sharing],
    beside: ShardContext,
    last: int,
) -> dict[int, Chunk]:
    """Return the chunks by number.

    A chunk whose samples the members share has a variant for every sharing.

    members: the sharing of every micro-batch, in order.
    beside: the context of operations that are sharded beside copies.
    last: the number of the chunk that computes the loss.
    """
    chunks: dict[int, dict[_Sharing, Chunk]] = {}
    numbers = dict.fromkeys(engines, 0)  # the number of segments with a chunk so far, by engine
    for variant in segments_written:
        engine, segment = engines[variant.task_graph], variant.segment
        lent = {id(parameter) for parameter in segment.lent}
        lenders = [
            other
            for other in engines.values()
            if not lent.isdisjoint(map(id, other.module.parameters()))
        ]
        run = (segment, engine, numbers[variant.task_graph], lenders)
        numbers[variant.task_graph] += 1
        if variant.sharing:
            at = replace(beside, axes={**beside.axes, BATCH: variant.sharing})
            shares = segment.gives if variant.chunk != last else ()
            chunk: Chunk = BatchShardedChunk(*run, at.along(PlannedShard(0, BATCH)), shares)
        else:
            chunk = Chunk(*run)
        chunks.setdefault(variant.chunk, {})[variant.sharing] = chunk
    return {
        number: PerMicroBatchChunk([variants[sharing] for sharing in members])
        if len(variants) > 1
        else next(iter(variants.values()))
        for number, variants in chunks.items()
    }


def _copies_of(task_graph: TaskGraph) -> str:
    """Return the name of the group of ranks that hold the same shards; the only copy has no such
    group."""
    return f"{task_graph.name}.data_parallel"


def _shard_group(task_graph: TaskGraph, seat: RankContext) -> dist.ProcessGroup | None:
    """Return the group that `task_graph` is split over, or None if it is not split."""
    return seat.groups.get(f"{task_graph.name}.model_parallel")


def _casts_over(
    task_graph: TaskGraph, task_graphs: Sequence[TaskGraph], seat: RankContext
) -> dist.ProcessGroup:
    """Return the group that the casts of a TaskGraph's segments span.

    It is the TaskGraph's own shard group, or the shard group of a split TaskGraph beside it, whose
    operations its segments may run, or the group that divides its positions. Without any, it is
    the group of its copies.
    """
    if (sequence := seat.groups.get(context_of(task_graph.name))) is not None:
        return sequence
    for candidate in (task_graph, *task_graphs):
        if (group := _shard_group(candidate, seat)) is not None:
            return group
    return seat.groups[_copies_of(task_graph)]


def _share(plan: Plan, task_graph: TaskGraph, seat: RankContext) -> BatchShare | None:
    """Return this rank's part of the batch, if the copies of a TaskGraph exchange sums over the
    batch.

    The result is None if they do not. If they do, the batch has one micro-batch per rank.
    """
    assert plan.rewrite is not None
    segments = (x for x in plan.rewrite.segments if x.task_graph == task_graph.id)
    if not any(segment.sums for segment in segments):
        return None
    ((start, stop),) = plan.ranks[seat.rank].samples
    return BatchShare(seat.groups[_copies_of(task_graph)], (stop - start) / plan.global_batch)


def _seed(seed: int, task_graph: int, place: PipelinePlace) -> int:
    """Return a seed that is the same on the members of a shard group and differs between groups."""
    return ((seed * 10_007 + task_graph) * 10_007 + place.copy) * 10_007 + place.position


def _copies(
    request: Request,
    plan: Plan,
    task_graph: TaskGraph,
    tensors: Mapping[str, Tensor],
    seat: RankContext,
) -> Copies:
    """Return the groups with which the engine of `task_graph` shares its parameters."""
    assert plan.pipeline is not None
    named = ((path, tensors[path]) for path in task_graph.parameters)
    held = {path: tensor for path, tensor in named if isinstance(tensor, nn.Parameter)}
    shared = {path: owners for path, owners in plan.pipeline.shared.items() if path in held}
    return Copies(
        seat.groups.get(_copies_of(task_graph)),
        _shard_group(task_graph, seat),
        frozenset(held[path] for path in task_graph.shards if path in held),
        {held[path]: seat.groups[f"shared.{path}"] for path in shared},
        frozenset(held[path] for path, owners in shared.items() if owners[0] != task_graph.id),
        sums=seat.groups.get(sums_of(task_graph)),
        levels=two_level_sum(task_graph, seat.groups),
        narrow=narrow_of(task_graph, held),
        reduce_dtype=NARROW.get(plan.reduce_dtype, torch.float32),
        bucket_elements=bucket_elements(request.train.bucket_mb),
    )


@contextmanager
def _casting_once(owner: WeightGradients, device: torch.device) -> Iterator[None]:
    """Make autocast cast every weight only once inside this context, in forwards and in `owner`'s
    products."""
    with owner.casting_once(), casting_once(device.type):
        yield
