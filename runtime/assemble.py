"""One rank's program, put together: its weights, its engines, its segments."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.config import Request
from whale_train.models.loss import LossModule
from whale_train.models.profile import model_path
from whale_train.runtime.batch_norm import synchronise_batch_norm
from whale_train.runtime.engine import DeepSpeedEngine, Engine, TorchEngine, make_optimizer
from whale_train.runtime.programs import CutModel, Part, Program, Segments, WholeModel
from whale_train.runtime.rewrite import Counts, Place, Segment, write_segment_graph
from whale_train.runtime.weights import own_copy, own_shard
from whale_train.strategies.plan import Plan, TaskGraph


@dataclass(frozen=True)
class Seat:
    """Where this rank sits: its number, its device, and the groups it is in."""

    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup]


def assemble(
    request: Request, plan: Plan, module: LossModule, graph: fx.GraphModule | None, seat: Seat
) -> Program:
    """The program of `seat.rank`. `module` has the whole model's weights in shared memory; the
    rank takes copies of what it holds and leaves the rest untouched."""
    if plan.rewrite is None:
        return _whole_model(request, plan, module, seat)
    assert graph is not None
    return _cut_model(request, plan, module, graph, seat)


def _whole_model(request: Request, plan: Plan, module: LossModule, seat: Seat) -> Program:
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
    engine = _engine(request, plan, task_graph, module, group, seat, exported=False)
    return WholeModel(engine, group, task_graph.shares[seat.rank], plan.global_batch)


def _cut_model(
    request: Request, plan: Plan, module: LossModule, graph: fx.GraphModule, seat: Seat
) -> Program:
    assert plan.rewrite is not None
    counts = Counts()
    tensors, canonical = _own_tensors(plan, module, graph, seat)
    segments = []
    for written in plan.rewrite["segments"]:
        task_graph = plan.task_graphs[written["task_graph"]]
        kind = "model" if task_graph.primitive == "split" else "data"
        group = seat.groups[f"{task_graph.name}.{kind}_parallel"]
        synchronised = group if request.model.sync_batchnorm else None
        place = Place(seat.device, group, group.rank(), plan.rewrite["axes"], synchronised)
        held = {path: tensors[path] for path in _paths(written, graph, canonical)}
        segment = Segment(tuple(written["takes"]), tuple(written["gives"]), held)
        for counted in (None, counts):
            write_segment_graph(segment, written, graph, canonical, place, counted)
        segments.append((written["task_graph"], segment))
    engines: dict[int, Engine] = {}
    for number, task_graph in enumerate(plan.task_graphs):
        mine = Segments([segment for owner, segment in segments if owner == number])
        split = task_graph.primitive == "split"
        copies = None if split else seat.groups[f"{task_graph.name}.data_parallel"]
        engines[number] = _engine(request, plan, task_graph, mine, copies, seat, exported=True)
    seen = dict.fromkeys(engines, 0)
    parts = []
    for owner, segment in segments:
        parts.append(Part(segment, engines[owner], seen[owner]))
        seen[owner] += 1
    return CutModel(parts, counts)


def _own_tensors(
    plan: Plan, module: LossModule, graph: fx.GraphModule, seat: Seat
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """This rank's parameters and buffers by canonical path, and the canonical path of each name.

    Constants that export lifted out of the forward are in `graph` only.
    """
    names: dict[int, str] = {}
    canonical: dict[str, str] = {}
    own: dict[str, Tensor] = {}
    shards = {path: (t, rows) for t in plan.task_graphs for path, rows in t.shards.items()}
    trained = {path for t in plan.task_graphs for path in t.trained}
    for full_path, parameter in module.named_parameters(remove_duplicate=False):
        path = model_path(full_path)
        canonical[path] = names.setdefault(id(parameter), path)
        if canonical[path] != path:
            continue
        dim, interval = 0, (0, parameter.shape[0] if parameter.dim() else 0)
        if path in shards:
            task_graph, rows = shards[path]
            dim = task_graph.shard_dims[path]
            interval = rows[task_graph.replicas[0].index(seat.rank)]
        if parameter.dim():
            own[path] = own_shard(parameter, dim, interval, seat.device)
        else:
            own[path] = nn.Parameter(parameter.detach().clone().to(seat.device))
        own[path].requires_grad_(parameter.requires_grad and path in trained)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for node in graph.graph.nodes:
        if node.op != "get_attr" or model_path(str(node.target)) in canonical:
            continue
        target = str(node.target)
        value = buffers[target] if target in buffers else _attribute(graph, target)
        own[model_path(target)] = value.detach().clone().to(seat.device)
    return own, canonical


def _attribute(module: nn.Module, path: str) -> Tensor:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


def _paths(
    written: dict[str, list[str]], graph: fx.GraphModule, canonical: dict[str, str]
) -> list[str]:
    chosen = set(written["operations"])
    found = (
        model_path(str(node.target))
        for node in graph.graph.nodes
        if node.op == "get_attr" and node.name in chosen
    )
    return list(dict.fromkeys(canonical.get(path, path) for path in found))


def _engine(
    request: Request,
    plan: Plan,
    task_graph: TaskGraph,
    module: nn.Module,
    group: dist.ProcessGroup | None,
    seat: Seat,
    exported: bool,
) -> Engine:
    config = plan.ranks[seat.rank].deepspeed[str(task_graph.id)]
    if config is not None and group is not None:
        return DeepSpeedEngine(module, group, config, seat.device)
    options = request.optimizer
    optimizer = make_optimizer(options.name, options.arguments())
    return TorchEngine(
        module,
        group,
        optimizer,
        plan.precision,
        seat.device,
        may_skip_parameters=not exported and not plan.exported,
    )
