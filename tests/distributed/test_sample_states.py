"""What is said of a value's samples is so: computed from a batch, and from its parts.

Each function is exported, the state of its result is found on the graph, and the result itself is
computed in torch: the whole batch's must follow from the parts' as the state says, and must not
where samples are said to meet.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from whale_train.models.export.export import flat_module
from whale_train.models.export.to_operation_graph import operation_graph
from whale_train.strategies.independence.judge import states_of
from whale_train.strategies.independence.states import (
    CrossSample,
    Fixed,
    PerSample,
    Reduced,
    Unknown,
)

PARTS = (2, 4)
WIDTH, LENGTH, CLASSES = 6, 4, 5

Function = Callable[..., Tensor]

# y [B, LENGTH, WIDTH], labels [B], w [WIDTH, WIDTH]
PER_SAMPLE: dict[str, Function] = {
    "linear": lambda y, labels, w: F.linear(y, w),
    "tanh": lambda y, labels, w: torch.tanh(y) + 1,
    "flattened": lambda y, labels, w: (y @ w).flatten(0, 1).softmax(-1),
    "to and fro": lambda y, labels, w: y.transpose(0, 1).reshape(LENGTH, -1, 2, 3).mT,
    "batch inside": lambda y, labels, w: y.transpose(0, 1).flatten(0, 1).exp(),
    "attention": lambda y, labels, w: F.scaled_dot_product_attention(y, y, y, is_causal=True),
    "own scores": lambda y, labels, w: (y @ y.transpose(1, 2)).softmax(-1) @ y,
    "looked up": lambda y, labels, w: F.embedding(labels, w[:CLASSES]) * y[:, 0],
    "one each": lambda y, labels, w: y[torch.arange(y.shape[0]), labels % LENGTH],
    "gathered": lambda y, labels, w: y[:, 0].gather(1, labels.unsqueeze(1)),
    "cat of halves": lambda y, labels, w: torch.cat([y, 2 * y]).square(),
    "cat and apart": lambda y, labels, w: torch.cat([y, 2 * y]).tanh()[: y.shape[0]],
    "repeated": lambda y, labels, w: y.repeat(3, 1, 1) * 2,
    "interleaved": lambda y, labels, w: y.repeat_interleave(3, 0) * 2,
    "stacked": lambda y, labels, w: torch.stack([y, y + 1], 1)[:, 1],
    "normed": lambda y, labels, w: F.layer_norm(y, (WIDTH,)),
    "group norm": lambda y, labels, w: F.group_norm(y, 2),
    "convolved": lambda y, labels, w: F.conv1d(y, w[:, :LENGTH, None]),
    "padded": lambda y, labels, w: F.pad(y, (1, 1)),
    "padded places": lambda y, labels, w: F.pad(y, (0, 0, 1, 0))[:, :-1],
    "sorted places": lambda y, labels, w: y.sort(1).values,
    "top of each": lambda y, labels, w: y.topk(2, -1).values,
    "max of each": lambda y, labels, w: y.max(1).values,
    "einsum": lambda y, labels, w: torch.einsum("btc,bsc->bts", y, y),
    "bmm": lambda y, labels, w: torch.bmm(y, y.transpose(1, 2)),
    "zeros with": lambda y, labels, w: torch.zeros(y.shape[0], WIDTH) + y.sum(1),
    "token": lambda y, labels, w: torch.cat([w[:1].expand(y.shape[0], 1, WIDTH), y], 1),
    "where": lambda y, labels, w: torch.where(labels[:, None] > 2, y[:, 0], w[0]),
    "each loss": lambda y, labels, w: F.cross_entropy(y[:, 0], labels, reduction="none"),
    "diagonal": lambda y, labels, w: torch.einsum("bii->bi", y @ y.transpose(1, 2)),
    "split in places": lambda y, labels, w: torch.cat(y.split([1, 3], 1)[::-1], 1),
    "scattered": lambda y, labels, w: y[:, 0].scatter(1, labels.unsqueeze(1), 0.0),
    "masked": lambda y, labels, w: y.masked_fill((labels > 2)[:, None, None], 0.0),
    "outer": lambda y, labels, w: torch.einsum("bc,bd->bcd", y[:, 0], y[:, 1]),
    "gru": lambda y, labels, w: _gru(y, w),
    "norm of each": lambda y, labels, w: y.norm(dim=-1) / (y.norm(dim=(1, 2))[:, None] + 1),
    "experts": lambda y, labels, w: _by_expert(y.flatten(0, 1), labels.repeat_interleave(LENGTH)),
    "table repeated": lambda y, labels, w: (
        y[:, 0].repeat_interleave(6, 0) + w.repeat(y.shape[0], 1)
    ),
    "rows repeated": lambda y, labels, w: y[:, 0].repeat(6, 1) + w.repeat_interleave(y.shape[0], 0),
    "places flattened": lambda y, labels, w: y.flatten(0, 1) + _places(y, w).flatten(0, 1),
    "row to columns": lambda y, labels, w: (
        w[:1].expand(y.shape[0], 6).view(-1, 2, 3) * y[:, :2, :3]
    ),
    "ones and zeros": lambda y, labels, w: torch.cat([y, -y]) * _ones_and_zeros(y),
    "every other": lambda y, labels, w: y.flatten(0, 1)[::2],
    "every other of a stack": lambda y, labels, w: torch.stack([y, y.exp()], 1).flatten(0, 1)[1::2],
    "filled by size": lambda y, labels, w: y * torch.full((y.shape[0], 1, 1), 1 / y.shape[0]),
}  # fmt: skip

POOLED: dict[str, Function] = {
    "mean": lambda y, labels, w: y.mean(),
    "sum": lambda y, labels, w: y.square().sum(0),
    "sum over size": lambda y, labels, w: y.square().sum() / y.shape[0],
    "over size, then sum": lambda y, labels, w: (y.square() / y.shape[0]).sum(),
    "second moment": lambda y, labels, w: y[:, 0].T @ y[:, 1],
    "weighted": lambda y, labels, w: y[:, 0].T @ labels.to(y.dtype),
    "by einsum": lambda y, labels, w: torch.einsum("btc,btd->cd", y, y),
    "counts": lambda y, labels, w: torch.histc(labels.to(y.dtype), CLASSES, 0, CLASSES - 1),
    "counts of ones": lambda y, labels, w: F.one_hot(labels, CLASSES).sum(0),
    "linear of a mean": lambda y, labels, w: F.linear(y.mean((0, 1)), w, w[0]),
    "mean twice": lambda y, labels, w: y.mean(0).mean(),
    "mean of a sum": lambda y, labels, w: y.sum(1).mean(0).cumsum(0).flip(0),
    "mse": lambda y, labels, w: F.mse_loss(y, torch.ones_like(y)),
    "mse, summed": lambda y, labels, w: F.mse_loss(y, y.detach() + 1, reduction="sum"),
    "binary": lambda y, labels, w: F.binary_cross_entropy_with_logits(y[:, 0, 0], labels / CLASSES),
    "divergence": lambda y, labels, w: F.kl_div(y, y.softmax(-1), reduction="batchmean"),
    "entropies, summed": lambda y, labels, w: F.cross_entropy(y[:, 0], labels, reduction="sum"),
    "mean and constant": lambda y, labels, w: y.mean() + w.square().sum(),
    "sums beside": lambda y, labels, w: torch.stack([y.sum(), y.exp().sum()]),
    "a loop of sums": lambda y, labels, w: sum((y[:, i].mean() for i in range(3)), torch.zeros(())),
    "margin": lambda y, labels, w: F.triplet_margin_loss(y[:, 0], y[:, 1], y[:, 2]),
    "over a full size": lambda y, labels, w: y.sum() / torch.full((), y.shape[0], dtype=y.dtype),
}

MEET: dict[str, Function] = {
    "max": lambda y, labels, w: y.amax(0),
    "max of all": lambda y, labels, w: y.max(),
    "variance": lambda y, labels, w: y.var(0),
    "norm": lambda y, labels, w: y.norm(),
    "log-sum-exp": lambda y, labels, w: y.logsumexp(0),
    "softmax": lambda y, labels, w: y.softmax(0),
    "cumulative": lambda y, labels, w: y.cumsum(0),
    "flipped": lambda y, labels, w: y + y.flip(0),
    "rolled": lambda y, labels, w: y * y.roll(1, 0),
    "sorted": lambda y, labels, w: y[:, 0, 0].sort().values,
    "centred": lambda y, labels, w: y - y.mean(0),
    "scores of all": lambda y, labels, w: y[:, 0] @ y[:, 0].T,
    "one of all": lambda y, labels, w: y[0],
    "some of all": lambda y, labels, w: y.select_scatter(y[0].exp(), 0, 0).sum(),
    "squared mean": lambda y, labels, w: y.mean(0).square(),
    "clamped mean": lambda y, labels, w: y.mean(0).clamp(max=0.05),
    "rounded mean": lambda y, labels, w: (100 * y.mean(0)).long(),
    "product of means": lambda y, labels, w: y.mean() * y.exp().mean(),
    "ratio": lambda y, labels, w: y.sum() / labels.sum(),
    "mean and sum": lambda y, labels, w: y.mean() + y.sum(),
    "sum and constant": lambda y, labels, w: y.sum() + w.sum(),
    "broadcast": lambda y, labels, w: (y[:, 0, :1] - labels).square(),
    "attends": lambda y, labels, w: F.scaled_dot_product_attention(*[y.transpose(0, 1)] * 3),
    "batch norm": lambda y, labels, w: F.batch_norm(y, None, None, training=True),
    "compared": lambda y, labels, w: F.mse_loss(y[:, 0, :1], labels.to(y.dtype)),
    "top samples": lambda y, labels, w: y[:, 0, 0].topk(2).values.sum(),
    "taken along": lambda y, labels, w: y[:, 0].gather(0, (labels[:, None] * 0).expand(-1, 2)),
    "pattern of cat": lambda y, labels, w: torch.cat([y[:, 0]] * 6) * w.repeat(y.shape[0], 1),
    "rows of rows": lambda y, labels, w: (
        y[:, 0].repeat_interleave(6, 0) * w.repeat_interleave(y.shape[0], 0)
    ),
    "places of cat": lambda y, labels, w: (
        torch.cat([y[:, 0]] * LENGTH) * _places(y, w).flatten(0, 1)
    ),
    "other ones": lambda y, labels, w: torch.stack([y, -y], 1).flatten(0, 1) * _ones_and_zeros(y),
    "every other of cat": lambda y, labels, w: torch.cat([y, y.exp()])[::2],
    "first of flattened": lambda y, labels, w: y.flatten(0, 1).gather(1, labels.unsqueeze(1)),
    "classes of the batch": lambda y, labels, w: F.cross_entropy(
        y[:, 0], labels, F.one_hot(labels, WIDTH).float().mean(0)
    ),
    "by place": lambda y, labels, w: F.mse_loss(y[:, 0] @ y[:, 1].T, torch.eye(y.shape[0])),
}


def _by_expert(rows: Tensor, experts: Tensor) -> Tensor:
    """Rows sorted by expert and back, as mixtures do."""
    order = experts.argsort()
    made = rows[order].tanh()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return made[back]


def _places(y: Tensor, w: Tensor) -> Tensor:
    """A row of `w` for every place, the same in every sample: [B, LENGTH, WIDTH]"""
    return w[:LENGTH].expand(y.shape[0], LENGTH, WIDTH)


def _ones_and_zeros(y: Tensor) -> Tensor:
    """[2 B, 1, 1], for what is real and for what is not"""
    ones = torch.ones(y.shape[0], 1, 1)
    return torch.cat([ones, torch.zeros_like(ones)])


def _gru(y: Tensor, w: Tensor) -> Tensor:
    into, state = torch.cat([w, w, w]), y.new_zeros(1, y.shape[0], WIDTH)
    found: Tensor = torch.gru(y, state, [into, -into], False, 1, 0.0, True, False, True)[0]
    return found


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).cos())

    def forward(self, y: Tensor, labels: Tensor) -> Tensor:
        return self.function(y, labels, self.w)


def _state(function: Function) -> Any:
    module, samples = _Module(function), Dim("batch")
    program = torch.export.export(
        module, (), _batch(3), dynamic_shapes={"y": {0: samples}, "labels": {0: samples}},
        strict=False,
    )  # fmt: skip
    graph = operation_graph(flat_module(program), {}, {}, {})
    return states_of(graph)[graph.operations[-1].inputs[0]]


def _batch(samples: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    y = torch.randn(sum(PARTS), LENGTH, WIDTH, generator=draw)
    labels = torch.tensor([1, 4, 0, 3, 3, 1])
    return {"y": y[:samples], "labels": labels[:samples]}


def _follows(function: Function, state: Any) -> bool:
    """Whether the whole batch's value follows from the parts' as `state` says."""
    module, whole = _Module(function), _batch(sum(PARTS))
    value = module(**whole).double()
    parts, start = [], 0
    for size in PARTS:
        part = {name: x[start : start + size] for name, x in whole.items()}
        parts.append(module(**part).double())
        start += size
    n = sum(PARTS)
    if isinstance(state, Fixed):
        made = n**state.degree * parts[0] / PARTS[0] ** state.degree
    elif isinstance(state, Reduced):
        scaled = (x / size**state.degree for x, size in zip(parts, PARTS, strict=True))
        made = n**state.degree * sum(scaled)  # type: ignore[assignment]
    else:
        assert isinstance(state, PerSample)
        apart = []
        for x, size in zip(parts, PARTS, strict=True):
            extent = x.shape[state.dim] // (state.before * size)
            sizes = (state.before, size, extent)
            apart.append(x.unflatten(state.dim, sizes) / size**state.degree)
        made = n**state.degree * torch.cat(apart, state.dim + 1).flatten(state.dim, state.dim + 2)
    return made.shape == value.shape and torch.allclose(made, value, 1e-5, 1e-6)


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_rows_of_each_sample(name: str) -> None:
    state = _state(PER_SAMPLE[name])
    assert isinstance(state, PerSample)
    assert _follows(PER_SAMPLE[name], state)


@pytest.mark.parametrize("name", POOLED)
def test_sums_and_means_over_samples(name: str) -> None:
    state = _state(POOLED[name])
    assert isinstance(state, Reduced)
    assert _follows(POOLED[name], state)


@pytest.mark.parametrize("name", MEET)
def test_where_samples_meet(name: str) -> None:
    state = _state(MEET[name])
    assert isinstance(state, CrossSample)
    for other in (Reduced(0), Reduced(-1), *(PerSample(dim) for dim in range(2))):
        try:
            assert not _follows(MEET[name], other)
        except (RuntimeError, IndexError):
            continue  # nor has it the shape for it


UNKNOWN: dict[str, Function] = {
    "exponential of matrices": lambda y, labels, w: torch.linalg.matrix_exp(y @ y.mT),
    "sorted, in groups": lambda y, labels, w: (
        labels.repeat_interleave(LENGTH).sort().values.view(-1, LENGTH).amax(1)
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_nobody_has_thought_about_is_unknown(name: str) -> None:
    assert isinstance(_state(UNKNOWN[name]), Unknown)


def test_a_gradient_that_follows_how_often_rows_are_looked_up_meets() -> None:
    state = _state(lambda y, labels, w: F.embedding(labels, w, scale_grad_by_freq=True))
    assert isinstance(state, CrossSample)
