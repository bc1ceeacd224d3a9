"""Assemble one rank's program: its weights, its engines, its segments."""

import torch
from torch import Tensor, fx, nn

from whale_train.config import Request
from whale_train.models.export.export import model_path
from whale_train.models.loss_module import LossModule
from whale_train.runtime.assembly.build_stages import assemble_stages
from whale_train.runtime.assembly.offload_modules import offload_modules
from whale_train.runtime.assembly.quantise_weights import quantise_weights
from whale_train.runtime.assembly.recompute_modules import recompute_modules
from whale_train.runtime.assembly.scale_linear_layers import scale_linear_layers
from whale_train.runtime.assembly.shard_params import narrow_of
from whale_train.runtime.assembly.shared_init import own_copy
from whale_train.runtime.base.autocast import NARROW
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.base.host_copies import HostCopies
from whale_train.runtime.comms.forward_agreement import ForwardAgreement
from whale_train.runtime.comms.process_groups import sums_of, two_level_sum
from whale_train.runtime.compile.blocks import compile_blocks
from whale_train.runtime.engines.deepspeed_zero3 import gather_whole
from whale_train.runtime.engines.make import make_engine
from whale_train.runtime.engines.rank_context import RankContext
from whale_train.runtime.engines.worker_sums import WorkerSums
from whale_train.runtime.graph.expert_loads import ExpertLoads
from whale_train.runtime.kernels.sync_batch_norm import synchronise_batch_norm
from whale_train.runtime.loss.global_mean import target_counter
from whale_train.runtime.state.worker_states import WorkerStates
from whale_train.runtime.train.step_programs import Program, WholeModel
from whale_train.runtime.train.worker_program import WorkerProgram
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.plan.training import bucket_elements


def assemble(
    request: Request,
    plan: Plan,
    module: LossModule,
    graph: fx.GraphModule | None,
    seat: RankContext,
) -> Program:
    """Return the program of `seat.rank`.

    module: the whole model, with weights in memory that the host's ranks share. The rank copies its
        part and does not touch the rest.
    graph: the graph exported in this process; None where the plan runs the model unchanged.

    Raises RuntimeError if `graph` is not the graph that the plan was made for.
    """
    if plan.rewrite is None:
        return _whole_model(request, plan, module, graph, seat)
    _refuse_other_graph(plan, graph)
    assert graph is not None
    return assemble_stages(request, plan, module, graph, seat)


def _refuse_other_graph(plan: Plan, graph: fx.GraphModule | None) -> None:
    """Raise RuntimeError if `graph` lacks an operation of the graph that the plan was made for.

    The model's forward then differs from process to process.
    """
    assert plan.rewrite is not None
    available = {node.name for node in graph.graph.nodes} if graph is not None else set()
    planned = (name for segment in plan.rewrite.segments for name in segment.operations)
    missing = next((name for name in planned if name not in available), "")
    if missing:
        rule = "the model's forward runs other operations in this process than it did when it was "
        rule += f"planned, which had {missing}: something that it reads is not the same everywhere"
        raise RuntimeError(f"{rule}, such as a random number drawn in Python, a time or a file")


def _whole_model(
    request: Request,
    plan: Plan,
    module: LossModule,
    graph: fx.GraphModule | None,
    seat: RankContext,
) -> Program:
    """Return the program of a rank that runs the unchanged model."""
    (task_graph,) = plan.task_graphs
    group = seat.groups[f"{task_graph.name}.data_parallel"]
    agreement = ForwardAgreement(group, seat.device) if plan.varies and group.size() > 1 else None
    logical = plan.logical_workers
    if request.model.sync_batchnorm and logical is None:
        synchronise_batch_norm(module, group, agreement)
    trained = set(task_graph.trained)
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and model_path(path) in trained)
    module.train()
    if request.model.quantize is not None:
        quantise_weights(module.model, seat.device)
    if plan.scaled_weights:
        scale_linear_layers(module.model, plan.scaled_weights)
    own_copy(module.buffers(), seat.device)  # ranks update them (BatchNorm's statistics)
    by_path = {model_path(path): parameter for path, parameter in module.named_parameters()}
    narrow = narrow_of(task_graph, by_path)
    if task_graph.zero != 3:  # ZeRO 3 reads its partition straight out of the shared copy
        frozen: dict[Tensor, torch.dtype] = {}
        frozen |= {x: NARROW[plan.precision] for x in narrow if not x.requires_grad}
        own_copy(module.parameters(), seat.device, frozen)
    compiled: list[nn.Module] = []
    if seat.compiler is not None:
        compiled = compile_blocks(module, seat.compiler)
        if task_graph.zero == 3 and not task_graph.state_parts:
            gather_whole(compiled)
    recompute_modules(module, plan.recomputed)
    if plan.offloaded:
        offload_modules(module, plan.offloaded, HostCopies(seat.device))
    copies = Copies(
        group,
        sums=seat.groups.get(sums_of(task_graph)),
        levels=two_level_sum(task_graph, seat.groups),
        narrow=narrow,
        reduce_dtype=NARROW.get(plan.reduce_dtype, torch.float32),
        bucket_elements=bucket_elements(request.train.bucket_mb),
    )
    may_skip = not plan.exported
    sums = None
    if logical is not None:
        trained_ones = [p for p in module.parameters() if p.requires_grad]
        sums = WorkerSums(
            trained_ones, copies.sums or group, logical.of_ranks, copies.bucket_elements
        )
    engine = make_engine(
        *(request, plan, task_graph, module, copies, seat, by_path),
        may_skip_parameters=may_skip,
        agreement=agreement,
        sums=sums,
        compiled=compiled,
    )
    sizes = [stop - start for start, stop in plan.ranks[seat.rank].samples]
    counter = None
    if len(sizes) > 1 or logical is not None:
        assert graph is not None
        counter = target_counter(module, graph, group, seat.device)
    # Compiled code calls no product that ExpertLoads could watch.
    is_seen = plan.mixtures and seat.compiler is None
    loads = ExpertLoads(plan.mixtures, seat.device) if is_seen else None
    if logical is not None:
        assert sums is not None
        assert counter is not None
        own = {model_path(path): buffer for path, buffer in module.named_buffers()}
        workers = logical.of_ranks[seat.rank]
        others = {path: x for path, x in own.items() if path not in logical.buffers}
        of_workers = {path: own[path] for path in logical.buffers}
        states = WorkerStates(workers, of_workers, others, request.seed)
        of_all = (group, copies.sums or group, workers, logical.count, sizes[0], plan.loss_weights)
        return WorkerProgram(engine, sums, states, *of_all, counter, loads)
    return WholeModel(engine, group, sizes, plan.loss_weights, counter, loads, agreement)
