"""One rank's program, put together: its weights, its engines, its segments."""

from dataclasses import replace

from torch import fx

from whale_train.config import Request
from whale_train.models.export import model_path
from whale_train.models.loss import LossModule
from whale_train.runtime.batch_norm import synchronise_batch_norm
from whale_train.runtime.chunk import Chunk, Segments, parts_of
from whale_train.runtime.engine import Copies, Engine
from whale_train.runtime.engines import make_engine
from whale_train.runtime.groups import sums_of
from whale_train.runtime.loss_means import Pieces, target_counter
from whale_train.runtime.own_tensors import narrow_of, own_tensors, tensor_paths
from whale_train.runtime.programs import CutModel, Program, WholeModel
from whale_train.runtime.rewrite import Counts, Place, Segment, write_segment_graph
from whale_train.runtime.seat import Seat
from whale_train.runtime.stages import assemble_stages
from whale_train.runtime.weights import own_copy
from whale_train.strategies.layout_types import BATCH
from whale_train.strategies.plan import Plan
from whale_train.strategies.shares import tile


def assemble(
    request: Request, plan: Plan, module: LossModule, graph: fx.GraphModule | None, seat: Seat
) -> Program:
    """The program of `seat.rank`. `module` has the whole model's weights in shared memory; the
    rank takes copies of what it holds and leaves the rest untouched."""
    if plan.rewrite is None:
        return _whole_model(request, plan, module, graph, seat)
    assert graph is not None
    if plan.pipeline is not None:
        return assemble_stages(request, plan, module, graph, seat)
    return _cut_model(request, plan, module, graph, seat)


def _whole_model(
    request: Request, plan: Plan, module: LossModule, graph: fx.GraphModule | None, seat: Seat
) -> Program:
    (task_graph,) = plan.task_graphs
    group = seat.groups[f"{task_graph.name}.data_parallel"]
    if request.model.sync_batchnorm:
        synchronise_batch_norm(module, group)
    trained = set(task_graph.trained)
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and model_path(path) in trained)
    module.train()
    own_copy(module.buffers(), seat.device)  # ranks update them (BatchNorm's statistics)
    if task_graph.zero != 3:  # ZeRO 3 reads its partition straight out of the shared copy
        own_copy(module.parameters(), seat.device)
    by_path = {model_path(path): parameter for path, parameter in module.named_parameters()}
    copies = Copies(
        group, sums=seat.groups.get(sums_of(task_graph)), narrow=narrow_of(task_graph, by_path)
    )
    may_skip = not plan.exported
    engine = make_engine(
        request, plan, task_graph, module, copies, seat, may_skip_parameters=may_skip
    )
    samples = plan.ranks[seat.rank].samples
    if not samples:
        return WholeModel(engine, group, [task_graph.shares[seat.rank]], plan.loss_weights)
    assert graph is not None
    counter = target_counter(module, graph, group, seat.device)
    sizes = [stop - start for start, stop in samples]
    return WholeModel(engine, group, sizes, plan.loss_weights, counter)


def _cut_model(
    request: Request, plan: Plan, module: LossModule, graph: fx.GraphModule, seat: Seat
) -> Program:
    assert plan.rewrite is not None
    counts = Counts()
    written_segments = plan.rewrite["segments"]
    batches = _micro_batches(plan)
    pieces = held = None
    if len(batches) > 1 or request.train.evaluate_every is not None:
        counter = target_counter(module, graph, seat.groups["world"], seat.device)
        held = Pieces([shared[-1][1] for shared in batches], plan.loss_weights, counter)
        pieces = held if len(batches) > 1 else None
    canonical, tensors = own_tensors(
        written_segments, plan.task_graphs, module, graph, seat.rank, seat
    )
    # A chunk for every micro-batch that is shared otherwise than those before it.
    of_chunk = {shared: number for number, shared in enumerate(dict.fromkeys(batches))}
    chunks: list[list[tuple[int, Segment]]] = []
    for shared in of_chunk:
        axes = {**plan.rewrite["axes"], BATCH: shared}
        segments = []
        for written in written_segments:
            task_graph = plan.task_graphs[written["task_graph"]]
            kind = "model" if task_graph.primitive == "split" else "data"
            group = seat.groups[f"{task_graph.name}.{kind}_parallel"]
            place = Place(
                seat.device,
                group,
                group.rank(),
                axes,
                group if request.model.sync_batchnorm else None,
                pieces.scale if pieces is not None else None,
            )
            paths = tensor_paths(written, graph, canonical)
            tensors_here = {path: tensors[path] for path in paths}
            segment = Segment(tuple(written["takes"]), tuple(written["gives"]), tensors_here)
            write_segment_graph(segment, written, graph, canonical, place, None)
            # An evaluation has several batches, and so several pieces, where a step has one.
            place = replace(place, loss_scale=held.scale if held is not None else None)
            write_segment_graph(segment, written, graph, canonical, place, counts)
            segment.overlap_weight_gradients()
            if task_graph.zero == 3:
                segment.divide(gathered=True)
            segments.append((written["task_graph"], segment))
        chunks.append(segments)
    engines: dict[int, Engine] = {}
    for number, task_graph in enumerate(plan.task_graphs):
        mine = Segments([x for segments in chunks for owner, x in segments if owner == number])
        copies = Copies(
            seat.groups.get(f"{task_graph.name}.data_parallel"),
            sums=seat.groups.get(sums_of(task_graph)),
            narrow=narrow_of(task_graph, tensors),
        )
        if task_graph.primitive == "split":
            of_head = {id(tensors[path]) for path in task_graph.shards}
            sharded = frozenset(p for p in mine.parameters() if id(p) in of_head)
            group = seat.groups[f"{task_graph.name}.model_parallel"]
            copies = Copies(None, group, sharded)
        engines[number] = make_engine(request, plan, task_graph, mine, copies, seat)
    made = [Chunk(parts, parts[-1].segment.gives) for parts in parts_of(chunks, engines)]
    return CutModel([made[of_chunk[shared]] for shared in batches], counts, pieces, held)


def _micro_batches(plan: Plan) -> list[tuple[tuple[int, int], ...]]:
    """How each micro-batch of a step is shared among the ranks: its intervals, end to end."""
    listed = [rank.samples for rank in plan.ranks]
    if not all(listed):
        assert plan.rewrite is not None
        return [plan.rewrite["axes"][BATCH]]
    sizes = [[stop - start for start, stop in samples] for samples in listed]
    return [tile(sum(each), each) for each in zip(*sizes, strict=True)]
