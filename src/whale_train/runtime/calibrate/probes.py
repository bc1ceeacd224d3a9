"""The operations whose times measure the speed of a device: chains of one kind of operation each.

As in training, every operation reads the result that the previous operation has just written and
saves it for the backward, so that caches and fresh memory are in the same state as in training.
This file owns the chains, their FLOPs and bytes; `roofline_fit.py` times them. For operations
between products the chains measure the overhead only; `block_probes.py` measures the rate at which
these move their bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from whale_train.strategies.cost.op_work import KernelKind

_LONGEST = 24  # the most operations of a chain


@dataclass(frozen=True)
class Sizes:
    """The sizes of a type of device's probes, besides the smallest probe of each kind.

    They are sizes of models for such devices, large enough to keep the device busy.

    chain_bytes: the bytes of results that a chain saves, more than caches hold.
    products: (rows, inside, outside).
    attentions: (batch, heads, tokens).
    convolutions: (batch, channels, side).
    losses: (rows, classes).
    lookups: (rows, table, width).
    """

    chain_bytes: float
    products: Sequence[tuple[int, int, int]]
    attentions: Sequence[tuple[int, int, int]]
    convolutions: Sequence[tuple[int, int, int]]
    losses: Sequence[tuple[int, int]]
    lookups: Sequence[tuple[int, int, int]]


# Products are as in blocks, with a weight larger than its input, and as in a head of many classes.
_ON_CPU = Sizes(
    48e6,
    (
        (512, 256, 256), (512, 512, 512), (512, 256, 1024), (256, 1024, 1024), (2048, 256, 256),
        (8, 512, 2048), (64, 1024, 4096), (64, 512, 16384),
    ),
    ((8, 4, 64), (8, 8, 64), (4, 8, 256)),
    ((8, 32, 32), (8, 64, 16), (8, 256, 8), (8, 512, 2)),
    ((512, 256), (512, 4096), (256, 32000)),
    ((512, 256, 256), (1024, 8192, 256), (512, 32000, 512)),
)  # fmt: skip
# A B200 has 126 MB of cache, and over a hundred multiprocessors to fill.
_ON_GPU = Sizes(
    1e9,
    (
        (4096, 1024, 1024), (4096, 4096, 4096), (8192, 1024, 4096), (2048, 4096, 4096),
        (64, 4096, 16384), (1024, 4096, 32000),
    ),
    ((8, 16, 512), (4, 16, 2048), (1, 32, 4096)),
    ((32, 64, 56), (64, 128, 28), (64, 256, 14), (64, 512, 7)),
    ((4096, 1024), (4096, 32000), (4096, 50257)),
    ((8192, 32000, 1024), (16384, 32000, 4096), (16384, 50257, 1024)),
)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """A chain of operations of one kind.

    The FLOPs and bytes are those of one operation, counted as in `op_work.py`.

    kind: the kind of operation.
    flops: the FLOPs of the forward.
    num_bytes: the bytes that the forward moves.
    backward_bytes: the bytes that the backward moves.
    length: the number of operations.
    make: returns, for a length and a device, the first value and the other tensors that the
        operations use.
    step: runs one operation, given the value before it, its index and these tensors; returns the
        next value.
    """

    kind: KernelKind
    flops: float
    num_bytes: float
    backward_bytes: float
    length: int
    make: Callable[[int, torch.device], tuple[Tensor, Sequence[Tensor]]]
    step: Callable[[Tensor, int, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Measured:
    """The seconds of one operation of a probe, forward and backward."""

    probe: Probe
    forward_s: float
    backward_s: float


def probes(device_type: str) -> Iterator[Probe]:
    """Yield the probes of all kinds of operations for a type of device.

    The first probe of each kind is so small that its time is all overhead.
    """
    sizes = _ON_GPU if device_type == "cuda" else _ON_CPU
    yield from elementwise((2, 4))
    for rows, inside, outside in ((2, 2, 2), *sizes.products):
        yield _product(rows, inside, outside, sizes.chain_bytes)
    for batch, heads, tokens in ((1, 1, 8), *sizes.attentions):
        yield _attention(batch, heads, tokens, 64)
    for batch, channels, side in ((1, 1, 4), *sizes.convolutions):
        yield _convolution(batch, channels, side)
    for rows, classes in ((2, 2), *sizes.losses):
        yield _loss(rows, classes)
    for rows, table, width in ((2, 2, 4), *sizes.lookups):
        yield _lookup(rows, table, width)


def elementwise(shape: tuple[int, int]) -> Iterator[Probe]:
    """Yield a probe for every kind of operation between products, from `shape` to the same
    shape."""
    size = 4.0 * shape[0] * shape[1]
    length = max(4, min(_LONGEST, int(_ON_CPU.chain_bytes / size)))
    width = shape[1]

    def alone(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        return torch.randn(shape, device=device, requires_grad=True), ()

    def with_other(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        others = [torch.randn(shape, device=device) for _ in range(length)]
        return alone(length, device)[0], others

    def with_scale(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        ones = [torch.ones(width, device=device, requires_grad=True) for _ in range(2 * length)]
        return alone(length, device)[0], ones

    def norm(value: Tensor, i: int, held: Sequence[Tensor]) -> Tensor:
        return functional.layer_norm(value, (width,), held[2 * i], held[2 * i + 1])

    def turned(value: Tensor, i: int, held: Sequence[Tensor]) -> Tensor:
        head = min(width, 64)
        parts = value.view(shape[0] // 2, 2, width // head, head).transpose(1, 2)
        return parts.reshape(shape)

    def one(kind: KernelKind, moved: float, back: float, step: Callable[[Tensor], Tensor]) -> Probe:
        return Probe(kind, 0.0, moved, back, length, alone, lambda value, i, held: step(value))

    yield Probe(
        KernelKind.POINTWISE, 0.0, 3 * size, 3 * size, length, with_other,
        lambda value, i, held: value * held[i],
    )  # fmt: skip
    yield Probe(KernelKind.NORM, 0.0, 2 * size, 2 * size, length, with_scale, norm)
    yield Probe(KernelKind.COPY, 0.0, 2 * size, 2 * size, length, alone, turned)
    yield one(KernelKind.FUNCTION, 2 * size, 2 * size, functional.silu)
    yield one(KernelKind.GELU, 2 * size, 2 * size, functional.gelu)
    yield one(KernelKind.TANH, 2 * size, 2 * size, torch.tanh)
    yield one(KernelKind.RANDOM, 2 * size, 2 * size, lambda value: functional.dropout(value, 0.1))
    yield one(KernelKind.SOFTMAX, 2 * size, 2 * size, lambda value: value.softmax(-1))
    yield Probe(
        KernelKind.SUM, 0.0, size, size, length, alone,
        lambda value, i, held: _keeping(value, value.mean(-1)),
    )  # fmt: skip
    if size < 100:
        yield one(KernelKind.VIEW, 0.0, 0.0, lambda value: value.transpose(0, 1))


def _keeping(value: Tensor, total: Tensor) -> Tensor:
    """Expand `total`, [rows], to the shape of `value`, as the next operation's input."""
    return total.unsqueeze(-1).expand(value.shape)


def _product(rows: int, inside: int, outside: int, chain_bytes: float) -> Probe:
    """Return a chain of linear maps of [rows, inside] to [rows, outside] and back."""

    def make(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        shapes = [(outside, inside) if i % 2 == 0 else (inside, outside) for i in range(length)]
        weights = [torch.randn(s, device=device).mul_(s[1] ** -0.5) for s in shapes]
        first = torch.randn(rows, inside, device=device, requires_grad=True)
        return first, [w.requires_grad_() for w in weights]

    flops = 2.0 * rows * inside * outside
    moved = 4.0 * (rows * inside + inside * outside + rows * outside)
    length = max(4, min(_LONGEST, int(chain_bytes / moved)))
    return Probe(
        KernelKind.PRODUCT, flops, moved, moved, length, make,
        lambda value, i, held: functional.linear(value, held[i]),
    )  # fmt: skip


def _attention(batch: int, heads: int, tokens: int, width: int) -> Probe:
    """Return a chain of causal attentions on [batch, heads, tokens, width]."""
    shape = (batch, heads, tokens, width)

    def make(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        operands = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
        return operands[0], operands[1:]

    def step(value: Tensor, i: int, held: Sequence[Tensor]) -> Tensor:
        return functional.scaled_dot_product_attention(value, held[0], held[1], is_causal=True)

    flops = 4.0 * batch * heads * tokens * tokens * width
    moved = 16.0 * batch * heads * tokens * width
    return Probe(KernelKind.ATTENTION, flops, moved, moved, 6, make, step)


def _convolution(batch: int, channels: int, side: int) -> Probe:
    """Return a chain of 3 x 3 convolutions on [batch, channels, side, side]."""

    def make(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        first = torch.randn(batch, channels, side, side, device=device, requires_grad=True)
        weights = [torch.randn(channels, channels, 3, 3, device=device) for _ in range(length)]
        return first, [w.mul_(channels**-0.5 / 3).requires_grad_() for w in weights]

    flops = 2.0 * 9 * batch * channels * channels * side * side
    moved = 4.0 * (2 * batch * channels * side * side + 9 * channels * channels)
    return Probe(
        KernelKind.CONVOLUTION, flops, moved, moved, 6, make,
        lambda value, i, held: functional.conv2d(value, held[i], padding=1),
    )  # fmt: skip


def _loss(rows: int, classes: int) -> Probe:
    """Return one cross-entropy of [rows, classes]."""

    def make(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        targets = torch.randint(0, classes, (rows,), device=device)
        return torch.randn(rows, classes, device=device, requires_grad=True), [targets]

    moved = 4.0 * rows * classes
    return Probe(
        KernelKind.LOSS, 0.0, moved, moved, 1, make,
        lambda value, i, held: functional.cross_entropy(value, held[0]),
    )  # fmt: skip


def _lookup(rows: int, table: int, width: int) -> Probe:
    """Return one lookup of `rows` rows in a table [table, width]."""

    def make(length: int, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        weight = nn.Parameter(torch.randn(table, width, device=device))
        return weight, [torch.randint(0, table, (rows,), device=device)]

    moved = 8.0 * rows * width
    return Probe(
        KernelKind.LOOKUP, 0.0, moved, moved + 4.0 * table * width, 1, make,
        lambda value, i, held: functional.embedding(held[0], value),
    )  # fmt: skip
