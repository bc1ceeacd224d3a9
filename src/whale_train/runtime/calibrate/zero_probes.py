"""Measure the overheads of ZeRO in a step, besides computing, sending and updating.

DeepSpeed copies gradients into buckets and out of them, and parameters likewise. Under stage 3 it
stops before every module with parameters to gather them, forward and backward. An engine of many
small modules shows the cost of each stop, and an engine of larger modules the cost of their bytes.
The larger modules are of different sizes, with values between them that are saved for the backward,
so that gathered weights find no memory of their size that another module has just released. The
costs that a plan counts separately, by the link and by the update's roofline, are subtracted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import distributed as dist
from torch import nn

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.calibrate.roofline_fit import UNBOUND
from whale_train.runtime.calibrate.timing import agreed, now, undisturbed
from whale_train.runtime.engines.ddp import TorchEngine
from whale_train.runtime.engines.deepspeed import DeepSpeedEngine
from whale_train.runtime.optim.optimizers import make_optimizer
from whale_train.strategies.cost.collectives import all_reduce_time_s, gather_time_s
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.hardware.cluster import Kernel, Link, Roofline
from whale_train.strategies.resolver.deepspeed_config import deepspeed_config, deepspeed_optimizer

_Point = tuple[int, float, float]  # the number of overheads, the bytes, and the seconds for both
# The input widths of the modules and the output width of the last; and the rows of a batch. There
# are few rows, as the modules' own computing is not measured here.
_SMALL = (8,) * 49, 8
_ON_CPU = (384, *(1536, 384, 384) * 6), 128
_ON_GPU = (2048, *(8192, 2048, 2048) * 6), 128
_STEPS, _WARM_UP = 7, 2
_LEAST_S = 1e-9  # the result where the subtracted costs exceed the measured time


@dataclass(frozen=True)
class _Measured:
    """The seconds of the parts of a step.

    modules: the number of modules with parameters.
    num_bytes: the bytes of their parameters in fp32.
    """

    modules: int
    num_bytes: float
    forward_s: float
    backward_s: float
    update_s: float


def partition_kernels(
    device: torch.device, precision: str, link: Link, update: Roofline
) -> dict[KernelKind, Kernel]:
    """Return the kernels of ZeRO's overheads, measured together with all other ranks.

    KernelKind.PARTITION has an overhead per step and a rate for the bytes of all gradients.
    KernelKind.GATHER has an overhead per module and a rate for the bytes of its parameters, forward
    and backward.

    link: the link between all ranks.
    update: the roofline of an optimizer's update.
    """
    ranks = dist.get_world_size()
    partition, forward, backward = list[_Point](), list[_Point](), list[_Point]()
    for widths, rows in (_SMALL, _ON_GPU if device.type == "cuda" else _ON_CPU):
        # The modules alone come first: if they came later, the engine would reuse memory that they
        # freed.
        alone = _measured(0, widths, rows, device, precision)
        modules, size = alone.modules, alone.num_bytes
        gathered = gather_time_s(size, ranks, link)
        updated = update.seconds(0.0, 4 * size / ranks)  # SGD has no states
        # Stage 1 sends everything after the backward.
        after = _measured(1, widths, rows, device, precision).update_s - updated
        partition.append((1, size, after - all_reduce_time_s(size, ranks, link) - gathered))
        stops = _measured(3, widths, rows, device, precision)
        after = stops.backward_s - alone.backward_s + stops.update_s - updated
        forward.append((modules, size, stops.forward_s - alone.forward_s - gathered))
        backward.append((modules, size, after - 2 * gathered))
    per_step = through(partition)
    return {
        KernelKind.PARTITION: Kernel(per_step, per_step),
        KernelKind.GATHER: Kernel(through(forward), through(backward)),
    }


def through(points: Sequence[_Point]) -> Roofline:
    """Return the roofline through two points (overheads, bytes, seconds), the first with hardly any
    bytes."""
    (first, _, small_s), (count, num_bytes, large_s) = points
    overhead = max(small_s, _LEAST_S) / first
    transfer_s = large_s - count * overhead
    return Roofline(overhead, UNBOUND, num_bytes / transfer_s if transfer_s > 0 else UNBOUND)


def _measured(
    stage: int, widths: Sequence[int], rows: int, device: torch.device, precision: str
) -> _Measured:
    """Return the seconds of a step of an engine of ZeRO `stage`; stage 0 is the modules alone.

    There is a linear module, with a weight and a bias, between every two neighbours in `widths`.
    The input is [rows, widths[0]].
    """
    owned = nn.Sequential(*(nn.Linear(*in_out, device=device) for in_out in pairwise(widths)))
    size = 4.0 * sum(parameter.numel() for parameter in owned.parameters())
    engine = _engine(stage, owned, rows, device, precision)
    value, taken = torch.randn(rows, widths[0], device=device), list[tuple[float, ...]]()
    for _ in range(_WARM_UP + _STEPS):
        dist.barrier()
        started = now(device)
        result = engine(value)
        forward = now(device)
        engine.backward([result], [torch.ones_like(result)])
        backward = now(device)
        if isinstance(engine, DeepSpeedEngine):
            engine.finish_backward()
            engine.step(lambda norm: norm)
        taken.append((forward - started, backward - forward, now(device) - backward))
        owned.zero_grad(set_to_none=True)
    parts = (undisturbed(part) for part in zip(*taken[_WARM_UP:], strict=True))
    return _Measured(len(widths) - 1, size, *(agreed(part) for part in parts))


def _engine(
    stage: int, owned: nn.Module, rows: int, device: torch.device, precision: str
) -> TorchEngine | DeepSpeedEngine:
    """Return an engine of ZeRO `stage` with a learning rate of 0.

    With a larger rate gradients might overflow, and DeepSpeed would skip the update and everything
    after it.
    """
    optimizer = deepspeed_optimizer("sgd", {"lr": 0.0}, offloaded=False)
    on_cpu = device.type == "cpu"
    config = deepspeed_config(Replicate("", zero=stage), rows, 0.0, optimizer, on_cpu)
    if config is not None:
        narrow = frozenset(owned.parameters()) if precision != "fp32" else frozenset[nn.Parameter]()
        copies = Copies(dist.group.WORLD, narrow=narrow)
        return DeepSpeedEngine(owned, copies, config, device, precision)
    make = make_optimizer("sgd", {"lr": 0.0})
    return TorchEngine(owned, Copies(None), make, precision, device, may_skip_parameters=False)
