"""Times of the operations between products, measured in a block as in a model.

In a block of a model an activation or a norm reads a value that a product has just written, and its
backward reads values that were written long before: products have filled the caches since. In a
chain of operations of one kind, an operation finds much of its data still in caches, and takes half
to two thirds of the time. So here every such operation stands between two products, and each is
timed by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whale_train.runtime.base.autocast import in_precision
from whale_train.runtime.calibrate.probes import Measured, Probe, elementwise
from whale_train.runtime.calibrate.timing import Moment, moment, seconds
from whale_train.strategies.cost.op_work import KernelKind


@dataclass(frozen=True)
class ProbedBlock:
    """The sizes of a block of operations of every kind.

    The operations work on [rows, wide] and on [rows, narrow] alternately, with products by weights
    of [wide, narrow] and [narrow, wide] between them.
    """

    rows: int
    narrow: int
    wide: int


# Sizes as in small transformers, and as in a convolutional net's first layers, which have few
# columns and many rows.
_ON_CPU = (ProbedBlock(480, 320, 960), ProbedBlock(1200, 128, 960))
_ON_GPU = (ProbedBlock(8192, 1024, 4096), ProbedBlock(16384, 256, 2048))
SMALLEST = ProbedBlock(2, 4, 4)  # all overhead


def blocks_for(device_type: str) -> Sequence[ProbedBlock]:
    """Return the blocks with which a type of device is probed."""
    return _ON_GPU if device_type == "cuda" else _ON_CPU


def run_block(block: ProbedBlock, device: torch.device, precision: str) -> list[Measured]:
    """Run one forward and backward of `block`, and return the seconds of all operations but the
    products."""
    value, stages = _made(block, device)
    passed: list[tuple[Tensor, Tensor]] = []
    forward, backward = list[_Span](), list[_Span]()
    for _, step in stages:
        with in_precision(precision, device):
            started = moment(device)
            result = step(value)
            forward.append((started, moment(device)))
        passed.append((value, result))
        value = result.detach().requires_grad_()
    gradient = torch.ones_like(value)
    while passed:
        value, result = passed.pop()
        started = moment(device)
        torch.autograd.backward([result], [gradient])
        backward.append((started, moment(device)))
        assert value.grad is not None
        gradient = value.grad
    return [
        Measured(probe, seconds(*ahead), seconds(*back))
        for (probe, _), ahead, back in zip(stages, forward, reversed(backward), strict=True)
        if probe is not None
    ]


_Span = tuple[Moment, Moment]
_Stage = tuple[Probe | None, Callable[[Tensor], Tensor]]  # None: a product


def _made(block: ProbedBlock, device: torch.device) -> tuple[Tensor, Sequence[_Stage]]:
    """Return the first value, [rows, narrow], and the operations on it, in order."""
    stages: list[_Stage] = []

    def between(probe: Probe, inside: int, outside: int) -> None:
        weight = torch.randn(outside, inside, device=device).mul_(inside**-0.5).requires_grad_()
        _, held = probe.make(1, device)
        stages.append((None, lambda value: functional.linear(value, weight)))
        stages.append((probe, lambda value: probe.step(value, 0, held)))

    wide, narrow = (
        [probe for probe in elementwise((block.rows, width)) if probe.kind is not KernelKind.VIEW]
        for width in (block.wide, block.narrow)
    )
    for in_wide, in_narrow in zip(wide, narrow, strict=True):
        between(in_wide, block.narrow, block.wide)
        between(in_narrow, block.wide, block.narrow)
    return torch.randn(block.rows, block.narrow, device=device, requires_grad=True), stages
