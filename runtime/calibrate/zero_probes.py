"""What ZeRO does in a step beside computing, sending and updating, and how long that takes.

DeepSpeed copies gradients into buckets and out of them, and parameters likewise; under stage 3 it
stops before every module with parameters to bring these together, forward and backward. An engine
of many small modules shows what each costs, one of larger ones what their bytes do: of unlike
sizes, with values between them that stay for the backward, as what is gathered finds no memory of
its size then that another module has just left. What a plan counts anyway, by the link and by the
update's roofline, is taken off.
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

_Point = tuple[int, float, float]  # overheads, bytes, and the seconds they took
# The widths of what each module reads and the last one makes; and the rows of a batch, which are
# few, as what the modules compute is no part of what is looked for.
_SMALL = (8,) * 49, 8
_ON_CPU = (384, *(1536, 384, 384) * 6), 128
_ON_GPU = (2048, *(8192, 2048, 2048) * 6), 128
_STEPS, _WARM_UP = 7, 2
_LEAST_S = 1e-9  # where what is counted anyway is more than all that was measured


@dataclass(frozen=True)
class _Measured:
    """Seconds of a step's parts, of `modules` with parameters of `num_bytes` in fp32."""

    modules: int
    num_bytes: float
    forward_s: float
    backward_s: float
    update_s: float


def partition_kernels(
    device: torch.device, precision: str, link: Link, update: Roofline
) -> dict[KernelKind, Kernel]:
    """Measured together with all other ranks, which `link` joins: of Kind.PARTITION an overhead a
    step and the bytes of all gradients; of Kind.GATHER an overhead a module and the bytes of its
    parameters, in the forward and in the backward. `update` is an optimizer's roofline."""
    ranks = dist.get_world_size()
    partition, forward, backward = list[_Point](), list[_Point](), list[_Point]()
    for widths, rows in (_SMALL, _ON_GPU if device.type == "cuda" else _ON_CPU):
        # The modules alone first: what they leave free later would be room for the engine.
        alone = _measured(0, widths, rows, device, precision)
        modules, size = alone.modules, alone.num_bytes
        gathered = gather_time_s(size, ranks, link)
        updated = update.seconds(0.0, 4 * size / ranks)  # SGD has no states
        # Under stage 1 all that is sent is sent after the backward.
        after = _measured(1, widths, rows, device, precision).update_s - updated
        partition.append((1, size, after - all_reduce_time_s(size, ranks, link) - gathered))
        stops = _measured(3, widths, rows, device, precision)
        after = stops.backward_s - alone.backward_s + stops.update_s - updated
        forward.append((modules, size, stops.forward_s - alone.forward_s - gathered))
        backward.append((modules, size, after - 2 * gathered))
    whole = through(partition)
    return {
        KernelKind.PARTITION: Kernel(whole, whole),
        KernelKind.GATHER: Kernel(through(forward), through(backward)),
    }


def through(points: Sequence[_Point]) -> Roofline:
    """Return the roofline through two figures, of which the first has hardly any bytes."""
    (first, _, small_s), (count, num_bytes, large_s) = points
    overhead = max(small_s, _LEAST_S) / first
    left = large_s - count * overhead
    return Roofline(overhead, UNBOUND, num_bytes / left if left > 0 else UNBOUND)


def _measured(
    stage: int, widths: Sequence[int], rows: int, device: torch.device, precision: str
) -> _Measured:
    """Steps of an engine of that stage, at 0 of the modules alone. Like most, each module has a
    weight and a bias."""
    owned = nn.Sequential(*(nn.Linear(*each, device=device) for each in pairwise(widths)))
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
    """Return an engine with a learning rate of 0: where gradients have grown beyond numbers,
    DeepSpeed leaves out the update and all that follows it."""
    optimizer = deepspeed_optimizer("sgd", {"lr": 0.0}, offloaded=False)
    on_cpu = device.type == "cpu"
    config = deepspeed_config(Replicate("", zero=stage), rows, 0.0, optimizer, on_cpu)
    if config is not None:
        narrow = frozenset(owned.parameters()) if precision != "fp32" else frozenset[nn.Parameter]()
        copies = Copies(dist.group.WORLD, narrow=narrow)
        return DeepSpeedEngine(owned, copies, config, device, precision)
    make = make_optimizer("sgd", {"lr": 0.0})
    return TorchEngine(owned, Copies(None), make, precision, device, may_skip_parameters=False)
