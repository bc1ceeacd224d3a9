"""What ZeRO does in a step beside computing, sending and updating, and how long that takes.

DeepSpeed copies gradients into buckets and out of them, and parameters likewise; under stage 3 it
stops before every module with parameters to bring these together, forward and backward. An engine
of many small modules shows what each costs, one of larger ones what their bytes do: of unlike
sizes, with values between them that stay for the backward, as what is gathered finds no memory of
its size then that another module has just left. What a plan counts anyway, by the link and by the
update's roofline, is taken off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch import distributed as dist

from whale_train.runtime.clock import agreed, now, undisturbed
from whale_train.runtime.deepspeed_engine import DeepSpeedEngine
from whale_train.runtime.engine import Copies, autocast
from whale_train.strategies.cluster import Kernel, Link, Roofline
from whale_train.strategies.deepspeed_config import deepspeed_config, deepspeed_optimizer
from whale_train.strategies.grammar import Replicate
from whale_train.strategies.links import all_reduce_time_s, gather_time_s
from whale_train.strategies.work import Kind

# The widths of what each module reads and the last one makes; and of a batch's rows.
_SMALL = (8,) * 49, 8
_LARGE = (384, *(1536, 384, 384) * 6), 512
_STEPS, _WARM_UP = 5, 2
_LEAST_S = 1e-9  # where what is counted anyway is more than all that was measured
_UNBOUND = 1e30  # a rate whose limit nothing reached


@dataclass(frozen=True)
class _Measured:
    """Seconds of a step of modules with parameters of `num_bytes` in fp32, those of the same
    modules without an engine taken off."""

    num_bytes: float
    forward_s: float
    rest_s: float


def partition_kernels(
    device: torch.device, precision: str, link: Link, update: Roofline
) -> dict[Kind, Kernel]:
    """Measured together with all other ranks, which `link` joins: of Kind.PARTITION an overhead a
    step and the bytes of all gradients; of Kind.GATHER an overhead a module and the bytes of its
    parameters, in the forward and in the backward. `update` is an optimizer's roofline."""
    ranks = dist.get_world_size()

    def kernel(
        stage: int, moves: Callable[[float], tuple[float, float]], count: Callable[[int], int]
    ) -> Kernel:
        """`moves` says what sending so many bytes takes, in the forward and after it; `count` how
        many overheads there are of so many modules."""
        forward, rest = [], []
        for widths, rows in (_SMALL, _LARGE):
            found = _measured(stage, widths, rows, device, precision)
            modules, moved = len(widths) - 1, moves(found.num_bytes)
            updated = update.seconds(0.0, 4 * found.num_bytes / ranks)  # SGD has no states
            point = (count(modules), found.num_bytes)
            forward.append((*point, found.forward_s - moved[0]))
            rest.append((*point, found.rest_s - moved[1] - updated))
        return Kernel(through(forward), through(rest))

    def gathered(num_bytes: float) -> float:
        return gather_time_s(num_bytes, ranks, link)

    partition = kernel(
        1, lambda size: (0.0, all_reduce_time_s(size, ranks, link) + gathered(size)), lambda _: 1
    )
    gather = kernel(3, lambda size: (gathered(size), 2 * gathered(size)), lambda modules: modules)
    return {Kind.PARTITION: Kernel(partition.backward, partition.backward), Kind.GATHER: gather}


def through(points: Sequence[tuple[int, float, float]]) -> Roofline:
    """The roofline through (overheads, bytes, seconds) of two runs, of which the first has hardly
    any bytes."""
    (first, _, small_s), (count, num_bytes, large_s) = points
    overhead = max(small_s, _LEAST_S) / first
    left = large_s - count * overhead
    return Roofline(overhead, _UNBOUND, num_bytes / left if left > 0 else _UNBOUND)


def _measured(
    stage: int, widths: Sequence[int], rows: int, device: torch.device, precision: str
) -> _Measured:
    """An engine of that stage, and its modules alone, one after the other: what those leave free
    would be room for the engine. Like most, each module has a weight and a bias."""
    value = torch.randn(rows, widths[0], device=device)
    plain = _stack(widths, device)

    def forward(read: Tensor) -> Tensor:
        with autocast(precision, device):
            made: Tensor = plain(read)
        return made

    def backward(result: Tensor) -> None:
        torch.autograd.backward([result], [torch.ones_like(result)])
        plain.zero_grad(set_to_none=True)

    alone = _steps(forward, value, backward, device)
    owned = _stack(widths, device)
    size = 4.0 * sum(parameter.numel() for parameter in owned.parameters())
    optimizer = deepspeed_optimizer("sgd", {"lr": 1e-3}, offloaded=False)
    node, on_cpu = Replicate("", zero=stage), device.type == "cpu"
    config = deepspeed_config(node, rows, precision, 0.0, optimizer, on_cpu)
    assert config is not None
    engine = DeepSpeedEngine(owned, Copies(dist.group.WORLD), config, device, precision)

    def backward_and_update(result: Tensor) -> None:
        engine.backward([result], [torch.ones_like(result)])
        engine.finish_backward()
        engine.step(lambda norm: norm)

    beside = _steps(engine, value, backward_and_update, device)
    return _Measured(size, beside[0] - alone[0], beside[1] - alone[1])


def _steps(
    forward: Callable[[Tensor], Tensor],
    value: Tensor,
    after: Callable[[Tensor], None],
    device: torch.device,
) -> tuple[float, float]:
    """Seconds of a forward, and of what comes `after` it, as all ranks have them."""
    taken = list[tuple[float, float]]()
    for _ in range(_WARM_UP + _STEPS):
        dist.barrier()
        started = now(device)
        result = forward(value)
        between = now(device)
        after(result)
        taken.append((between - started, now(device) - between))
    first, second = (
        agreed(undisturbed(each[part] for each in taken[_WARM_UP:])) for part in range(2)
    )
    return first, second


def _stack(widths: Sequence[int], device: torch.device) -> nn.Module:
    return nn.Sequential(*(nn.Linear(read, made, device=device) for read, made in pairwise(widths)))
