"""A rank of a nested strategy, put together: the chunks of its stage and nothing else.

Only what the stage holds is copied out of the shared initial weights, and of a split tensor only
this rank's shard.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.config import Request
from whale_train.models.loss import LossModule
from whale_train.runtime.chunk import Chunk, Segments, SharingChunk, parts_of
from whale_train.runtime.engine import Copies, Engine
from whale_train.runtime.engines import make_engine
from whale_train.runtime.loss_means import target_counter
from whale_train.runtime.loss_of_pieces import LossOfPieces
from whale_train.runtime.own_tensors import narrow_of, own_tensors, tensor_paths
from whale_train.runtime.pipeline import PipelineModel
from whale_train.runtime.pipeline import Place as PipelinePlace
from whale_train.runtime.rewrite import (
    Counts,
    Place,
    Segment,
    write_segment_graph,
)
from whale_train.runtime.seat import Seat
from whale_train.runtime.shared_random import SharedRandom
from whale_train.runtime.transport import Transport
from whale_train.runtime.weight_gradients import WeightGradients
from whale_train.strategies.layouts import BATCH
from whale_train.strategies.operations import is_repeated
from whale_train.strategies.plan import Plan, TaskGraph


def assemble_stages(
    request: Request, plan: Plan, module: LossModule, graph: fx.GraphModule, seat: Seat
) -> PipelineModel:
    """The program of `seat.rank`."""
    assert plan.pipeline is not None
    assert plan.rewrite is not None
    place = PipelinePlace.of(plan, seat.rank)
    copy = plan.pipeline["copies"][place.copy]
    held = plan.pipeline["positions"][place.position]
    pieces = sum(len(each["samples"]) for each in plan.pipeline["copies"])
    world = seat.groups["world"]
    counter = None
    if pieces > 1 or request.train.evaluate_every is not None:
        counter = target_counter(module, graph, world, seat.device)
    loss = LossOfPieces(copy["samples"], plan.loss_weights, counter, seat.device)
    counts = Counts()
    weight_gradients = WeightGradients()
    several = plan.ranks[seat.rank].micro_batches > 1
    written = plan.rewrite["segments"]
    numbers = [number for chunk in held for number in plan.pipeline["chunks"][chunk]["segments"]]
    task_graphs = [plan.task_graphs[number] for number in plan.ranks[seat.rank].task_graphs]
    canonical, tensors = own_tensors(
        [written[number] for number in numbers], task_graphs, module, graph, place.index, seat
    )
    places = {
        task_graph.id: Place(
            device=seat.device,
            group=_shard_group(task_graph, seat) or _copies_group(task_graph, seat),
            index=place.index,
            axes=plan.rewrite["axes"] | {BATCH: copy.get("members", ())},
            batch_norm_group=(
                _copies_group(task_graph, seat) if request.model.sync_batchnorm else None
            ),
            loss_scale=loss.scale if pieces > 1 else None,
            seed=_seed(request.seed, task_graph.id, place),
        )
        for task_graph in task_graphs
    }
    # An evaluation has several batches, and so several pieces, where a step has one.
    scale = None if counter is None else loss.scale
    evaluations = {number: replace(here, loss_scale=scale) for number, here in places.items()}
    segments: dict[int, Segment] = {}
    for chunk in held:
        described = plan.pipeline["chunks"][chunk]
        for number in described["segments"]:
            there = written[number]
            here = places[there["task_graph"]]
            held_here = {path: tensors[path] for path in tensor_paths(there, graph, canonical)}
            segment = Segment(tuple(there["takes"]), tuple(there["gives"]), held_here)
            write_segment_graph(segment, there, graph, canonical, here, None)
            evaluated = evaluations[there["task_graph"]]
            write_segment_graph(segment, there, graph, canonical, evaluated, counts)
            if plan.schedule == "zero_bubble":
                segment.defer_weight_gradients(weight_gradients)
            else:
                segment.overlap_weight_gradients(weight_gradients if several else None)
            again = described["recompute"] == "full"
            gathered = plan.task_graphs[there["task_graph"]].zero == 3
            if again or gathered:
                random = here.random if again else None
                segment.divide(partial(_recomputed, random), gathered=gathered)
            segments[number] = segment
    engines: dict[int, Engine] = {}
    for task_graph in task_graphs:
        owned = [n for n in segments if written[n]["task_graph"] == task_graph.id]
        mine = Segments([segments[n] for n in owned])
        copies = _copies(plan, task_graph, tensors, seat)
        once = _has_one_backward(plan, mine, seat.rank)
        engines[task_graph.id] = make_engine(
            request, plan, task_graph, mine, copies, seat, overlap=once
        )
    listed = [
        [
            (written[n]["task_graph"], segments[n])
            for n in plan.pipeline["chunks"][chunk]["segments"]
        ]
        for chunk in held
    ]
    chunks: dict[int, Chunk] = {}
    for chunk, parts in zip(held, parts_of(listed, engines), strict=True):
        gives = parts[-1].segment.gives
        if plan.pipeline["chunks"][chunk]["shares_samples"]:
            head = places[task_graphs[-1].id]
            chunks[chunk] = SharingChunk(parts, gives, head.along({"axis": BATCH, "outer": 1}))
        else:
            chunks[chunk] = Chunk(parts, gives)
    return PipelineModel(
        plan,
        seat.rank,
        chunks,
        loss,
        Transport(seat.device, seat.channels),
        counts,
        weight_gradients,
    )


def _copies_group(task_graph: TaskGraph, seat: Seat) -> dist.ProcessGroup:
    return seat.groups[f"{task_graph.name}.data_parallel"]


def _shard_group(task_graph: TaskGraph, seat: Seat) -> dist.ProcessGroup | None:
    return seat.groups.get(f"{task_graph.name}.model_parallel")


def _seed(seed: int, task_graph: int, place: PipelinePlace) -> int:
    """Of what the members of a shard group draw alike, and no other group does."""
    return ((seed * 10_007 + task_graph) * 10_007 + place.copy) * 10_007 + place.position


def _copies(plan: Plan, task_graph: TaskGraph, tensors: Mapping[str, Tensor], seat: Seat) -> Copies:
    assert plan.pipeline is not None
    listed = ((path, tensors[path]) for path in task_graph.parameters)
    held = {path: tensor for path, tensor in listed if isinstance(tensor, nn.Parameter)}
    shared = {path: owners for path, owners in plan.pipeline["shared"].items() if path in held}
    return Copies(
        _copies_group(task_graph, seat),
        _shard_group(task_graph, seat),
        frozenset(held[path] for path in task_graph.shards if path in held),
        {held[path]: seat.groups[f"shared.{path}"] for path in shared},
        frozenset(held[path] for path, owners in shared.items() if owners[0] != task_graph.id),
        narrow=narrow_of(task_graph, held),
    )


def _recomputed(random: SharedRandom | None, block: str) -> SharedRandom | None:
    return random if is_repeated(block) else None


def _has_one_backward(plan: Plan, module: Segments, rank: int) -> bool:
    """Whether a step has one forward and one backward of all `module` holds, which is what
    DistributedDataParallel wants."""
    assert plan.pipeline is not None
    one_part = len(module.parts) == 1 and len(plan.pipeline["chunks"]) == 1
    return one_part and plan.ranks[rank].micro_batches == 1
