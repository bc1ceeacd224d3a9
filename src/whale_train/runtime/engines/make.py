"""Choose the engine of a TaskGraph on a rank."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from whale_train.config import Request
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.comms.forward_agreement import ForwardAgreement
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.ddp import StreamedEngine, TorchEngine
from whale_train.runtime.engines.deepspeed import DeepSpeedEngine
from whale_train.runtime.engines.grad_reduce import GradientSums
from whale_train.runtime.engines.rank_context import RankContext
from whale_train.runtime.engines.reached_alike import ReachedAlike
from whale_train.runtime.engines.uneven.engine import UnevenEngine
from whale_train.runtime.kernels.streamed_weights import StreamedWeights
from whale_train.runtime.optim.optimizers import (
    make_optimizer,
    make_together,
    of_classes,
    options_of,
)
from whale_train.strategies.plan.plan import Plan, TaskGraph


def make_engine(
    request: Request,
    plan: Plan,
    task_graph: TaskGraph,
    module: nn.Module,
    copies: Copies,
    seat: RankContext,
    by_path: Mapping[str, Tensor],
    *,
    may_skip_parameters: bool = False,
    overlap: bool = True,
    excess: int | None = None,
    streamed: StreamedWeights | None = None,
    agreement: ForwardAgreement | None = None,
    sums: GradientSums | None = None,
    compiled: Sequence[nn.Module] = (),
) -> Engine:
    """Return the engine of `module`, the part of `task_graph` that `seat.rank` holds.

    It is an UnevenEngine where the plan partitions state unequally, a DeepSpeedEngine where the
    plan has a DeepSpeed configuration and several copies to partition among, a StreamedEngine where
    `task_graph` streams its weights, and a TorchEngine otherwise.

    by_path: the rank's tensors by their paths in the model.
    streamed: copies weights from the host; required where `task_graph` streams them.
    agreement: given where copies may reach different parameters.
    sums: given where copies run logical workers.
    compiled: modules of `module` that run compiled code.

    The other parameters are TorchEngine's.
    """
    config = plan.ranks[seat.rank].deepspeed[str(task_graph.id)]
    own = options_of(plan.parameter_groups, by_path)
    if plan.optimizers:
        of_own = partial(of_classes, plan.optimizers)
    else:
        of_own = partial(make_optimizer, request.optimizer.name, request.optimizer.arguments())
    if task_graph.state_parts and copies.group is not None:
        return UnevenEngine(
            *(module, copies, task_graph.state_parts, task_graph.zero, of_own, own),
            *(request.train.grad_clip or 0.0, plan.precision, seat.device),
            overlap=overlap,
            compiled=compiled,
            gathers=None if seat.stand_ins is None else seat.stand_ins.gathers,
        )
    optimizer = of_own(own)
    if config is not None and copies.group is not None:
        if seat.stand_ins is not None:
            return seat.stand_ins.zero(
                module, copies, config, optimizer, seat.device, plan.precision
            )
        reached = None
        if agreement is not None:
            reached = ReachedAlike(module, copies, agreement, task_graph.zero)
        return DeepSpeedEngine(
            *(module, copies, config, seat.device, plan.precision, excess, reached),
            own,
            make_together(plan.optimizers) if plan.optimizers else None,
        )
    torchs: Callable[..., Engine] = TorchEngine
    if task_graph.streams:
        assert streamed is not None
        engine_class = StreamedEngine if seat.stand_ins is None else seat.stand_ins.streamed
        torchs = partial(engine_class, streamed=streamed)
    return torchs(
        module,
        copies,
        optimizer,
        plan.precision,
        seat.device,
        may_skip_parameters=may_skip_parameters,
        overlap=overlap,
        excess=excess or 1,
        sums=sums,
        buckets=None if seat.stand_ins is None else seat.stand_ins.buckets,
    )
