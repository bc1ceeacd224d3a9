"""Copy the tensors that one rank holds out of the shared initial weights.

Only tensors that the rank's segments read are touched, and of a sharded tensor only this rank's
shard. Each tensor is released once it is copied, so a rank never has its part twice.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from whale_train.models.export.export import model_path
from whale_train.models.loss_module import LossModule
from whale_train.models.weights.deferred import made
from whale_train.runtime.assembly.shared_init import places_of
from whale_train.runtime.comms.layout_collectives import shard_of
from whale_train.runtime.engines.rank_context import RankContext
from whale_train.runtime.graph.nested_graphs import attribute, is_tensor
from whale_train.runtime.kernels.streamed_weights import StreamedWeights
from whale_train.strategies.plan.plan import TaskGraph
from whale_train.strategies.plan.program import PlannedSegment


def own_tensors(
    segments: Sequence[PlannedSegment],
    task_graphs: Sequence[TaskGraph],
    module: LossModule,
    graph: fx.GraphModule,
    index: int,
    seat: RankContext,
    frozen_dtype: torch.dtype | None,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the canonical path of every parameter's name, and this rank's part of the tensors by
    canonical path.

    The tensors are the parameters, buffers and constants that the `segments` read.

    module: the whole model; the parameters that are read are removed from it.
    index: this rank's place in the shard group.
    frozen_dtype: the dtype of frozen parameters that the plan holds in 16 bits.

    Streamed parameters stay on the host.
    """
    names: dict[int, str] = {}
    canonical: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for full_path, parameter in module.named_parameters(remove_duplicate=False):
        path = model_path(full_path)
        canonical[path] = names.setdefault(id(parameter), path)
        parameters[canonical[path]] = parameter
    buffers = {model_path(k): b for k, b in module.named_buffers(remove_duplicate=False)}
    trained = {path for task_graph in task_graphs for path in task_graph.trained}
    frozen = {path for task_graph in task_graphs for path in task_graph.narrow} - trained
    layouts = {path: x for t in task_graphs for path, x in t.shard_layouts.items()}
    intervals = {path: x for t in task_graphs for path, x in t.shards.items()}
    streamed = {path for t in task_graphs if t.streams for path in t.trained}
    constants = {  # export has lifted these out of the forward
        model_path(str(node.target)): attribute(graph, str(node.target))
        for node in graph.graph.nodes
        if node.op == "get_attr" and is_tensor(graph, node)
    }
    places = places_of(module)
    read = dict.fromkeys(path for x in segments for path in tensor_paths(x, graph, canonical))
    named = {**constants, **buffers, **parameters}
    own: dict[str, Tensor] = {}
    # The largest tensor comes first: until it is sharded, the rank holds all of it beside its other
    # parts.
    for path in sorted(read, key=lambda path: -named[path].nbytes):
        given = named.pop(path)
        dtype, full_tensor = given.dtype, made(given).detach()
        if path in layouts:
            part = shard_of(full_tensor, layouts[path], intervals[path], index)
        else:
            part = full_tensor.clone(memory_format=torch.contiguous_format)
        if path not in streamed:
            part = part.to(seat.device, frozen_dtype if path in frozen else dtype)
        elif seat.stand_ins is not None:
            seat.stand_ins.forget(part)
        if path in parameters:
            part = nn.Parameter(part, requires_grad=path in trained)
            for held, name in places[id(parameters.pop(path))]:
                held[name] = None
        own[path] = part
        del given, full_tensor  # before the next tensor is made
    return canonical, {path: own[path] for path in read}


def streamed_of(
    task_graphs: Sequence[TaskGraph],
    tensors: Mapping[str, Tensor],
    narrow: torch.dtype | None,
    seat: RankContext,
) -> StreamedWeights:
    """Return the object that copies the streamed weights of `task_graphs` to the rank's device.

    tensors: this rank's tensors, by path.
    narrow: the dtype on the device of weights that autocast lowers; None: their own.
    """
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    for task_graph in task_graphs:
        for path in task_graph.trained if task_graph.streams else ():
            tensor = tensors.get(path)
            if isinstance(tensor, nn.Parameter):
                lowered = narrow if path in task_graph.narrow else None
                dtypes[tensor] = lowered or tensor.dtype
    stand_ins = seat.stand_ins
    return StreamedWeights(dtypes, seat.device, None if stand_ins is None else stand_ins.forget)


def narrow_of(task_graph: TaskGraph, tensors: Mapping[str, Tensor]) -> frozenset[nn.Parameter]:
    """Return the parameters among `tensors`, by path, that `task_graph` holds in 16 bits."""
    narrow = (tensors[path] for path in task_graph.narrow if path in tensors)
    return frozenset(x for x in narrow if isinstance(x, nn.Parameter))


def tensor_paths(
    segment: PlannedSegment, graph: fx.GraphModule, canonical: dict[str, str]
) -> list[str]:
    """Return the canonical paths of the tensors that a segment reads, each once."""
    chosen = set(segment.operations)
    read_paths = (
        model_path(str(node.target))
        for node in graph.graph.nodes
        if node.op == "get_attr" and node.name in chosen
        if is_tensor(graph, node)
    )
    return list(dict.fromkeys(canonical.get(path, path) for path in read_paths))
