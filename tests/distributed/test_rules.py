"""Rule by rule against dense execution: values and gradients, on two members and on three unlike.

Each case is a small module around one operation, with weights on both sides of it, split by the
patterns it names; everything in fp64, so that a wrong element cannot hide in rounding.
"""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.distributed.harness import run_ranks
from tests.distributed.splitting import Outcome, Split, assert_equal, compare, exported
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch.nn import functional

BATCH, TOKENS, WIDTH = 4, 3, 12
TOLERANCE = 1e-9


class Around(nn.Module):
    """in -> `middle` -> out, and a number: the sum of squares weighted by position."""

    def __init__(
        self,
        middle: Callable[..., Tensor],
        inner: int = WIDTH,
        out: int | None = WIDTH,
        **more: Any,
    ) -> None:
        super().__init__()
        self.into = nn.Linear(8, inner)
        self.out = nn.Linear(out, 5) if out else None
        self.more = nn.ModuleDict({k: v for k, v in more.items() if isinstance(v, nn.Module)})
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        y = self.middle(self, y)
        if self.out is not None:
            y = self.out(y)
        position = torch.arange(1, y.shape[-1] + 1, dtype=y.dtype)
        return (y.pow(2) * position).sum() / 100


def around(middle: Callable[..., Tensor], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Around(middle, **options)


class Images(nn.Module):
    """Convolutions [N, 4, 6, 6] through `middle` to a number."""

    def __init__(self, *layers: nn.Module, channels: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, channels, 3, padding=1)
        self.layers = nn.Sequential(*layers)
        self.last = nn.Conv2d(channels, 6, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.layers(self.first(images)).tanh()).pow(2).mean()


def images(*layers: Callable[[], nn.Module], channels: int = 12) -> Callable[[], nn.Module]:
    return lambda: Images(*(layer() for layer in layers), channels=channels)


class Tables(nn.Module):
    """A table, a product, and a loss over classes."""

    def __init__(self, padding: int | None, **loss: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(14, 8, padding_idx=padding)
        self.head = nn.Linear(8, 10)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(ids).tanh()).flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), **self.loss)


def heads(y: Tensor, count: int) -> Tensor:
    return y.unflatten(-1, (count, -1)).transpose(1, 2)


def merged(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def fused_attention(module: Around, y: Tensor) -> Tensor:
    q, k, v = (heads(part, 4) for part in y.chunk(3, -1))
    return merged(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def grouped_attention(module: Around, y: Tensor) -> Tensor:
    """16 of queries, 8 of keys, 8 of values: 8 heads on 4."""
    q, k, v = y.split((16, 8, 8), -1)
    q, k, v = heads(q, 8), heads(k, 4), heads(v, 4)
    return merged(functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def repeated_attention(module: Around, y: Tensor) -> Tensor:
    q, k, v = y[..., :16], y[..., 16:24], y[..., 24:]
    q, k, v = heads(q, 8), heads(k, 4), heads(v, 4)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    bias = torch.arange(8, dtype=y.dtype).view(8, 1, 1).expand(8, TOKENS, TOKENS) / 10
    return merged(functional.scaled_dot_product_attention(q, k, v, attn_mask=bias))


def written_attention(module: Around, y: Tensor) -> Tensor:
    q, k, v = y.view(-1, TOKENS, 4, 3, 3).unbind(-2)
    q, k, v = (x.transpose(1, 2).reshape(-1, TOKENS, 3) for x in (q, k, v))
    bias = torch.zeros(1, TOKENS, TOKENS, dtype=y.dtype)
    scores = torch.baddbmm(bias.expand(q.shape[0], -1, -1), q, k.transpose(1, 2), alpha=0.5)
    mixed = torch.bmm(scores.softmax(-1), v)
    return mixed.view(-1, 4, TOKENS, 3).permute(0, 2, 1, 3).reshape(-1, TOKENS, 12)


def einsum_attention(module: Around, y: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (4, 3)) for part in y.chunk(3, -1))
    scores = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", scores, v).flatten(2)


def column_then_row(name: str = "out") -> tuple[tuple[str, str], ...]:
    return (("into", "column"), (name, "row"))


BY_HEAD = column_then_row()
COLUMN = (("into", "column"), ("out", "replicate"))
NUMBERS = {"x": (BATCH, TOKENS, 8)}
PIXELS = {"images": (BATCH, 4, 6, 6)}

# name: what to build, its inputs, patterns by hand, and the operations that may be gathered
CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[tuple[str, str], ...], int]] = {
    "column_row": (around(lambda m, y: y.relu()), NUMBERS, BY_HEAD, 0),
    "row_first": (around(lambda m, y: y.tanh()), NUMBERS,
                  (("into", "replicate"), ("out", "row")), 0),
    "column_column": (around(lambda m, y: y), NUMBERS, (("into", "column"), ("out", "column")), 0),
    "gelu_gate": (
        around(lambda m, y: functional.gelu(y) * torch.where(y > 0, y, -y)),
        NUMBERS, BY_HEAD, 0,
    ),
    "broadcast": (
        around(lambda m, y: (y * y.mean(1, keepdim=True) + torch.arange(12.0)).masked_fill(
            torch.arange(12) % 5 == 0, 0.5)), NUMBERS, BY_HEAD, 0,
    ),
    "powers": (around(lambda m, y: (y.pow(2) + 1).rsqrt() * y.exp().log1p()), NUMBERS, BY_HEAD, 0),
    "where": (around(lambda m, y: torch.where(y > 0, y, 0.1 * y)), NUMBERS, BY_HEAD, 0),
    "chunk": (around(lambda m, y: (lambda a, b: a.sigmoid() * b)(*y.chunk(2, -1)), inner=24),
              NUMBERS, BY_HEAD, 0),
    "fused_attention": (around(fused_attention, inner=36), NUMBERS, BY_HEAD, 0),
    "grouped_attention": (around(grouped_attention, inner=32, out=16), NUMBERS, BY_HEAD, 0),
    "repeated_attention": (around(repeated_attention, inner=32, out=16), NUMBERS, BY_HEAD, 0),
    "written_attention": (around(written_attention, inner=36), NUMBERS, BY_HEAD, 0),
    "einsum_attention": (around(einsum_attention, inner=36), NUMBERS, BY_HEAD, 0),
    "softmax_over_tokens": (around(lambda m, y: y.softmax(1) + y.cumsum(1)), NUMBERS, BY_HEAD, 0),
    "softmax_over_the_cut": (around(lambda m, y: y.softmax(-1)), NUMBERS, BY_HEAD, 1),
    "norm_over_the_cut": (around(lambda m, y: m.more["norm"](y), norm=nn.LayerNorm(12)),
                          NUMBERS, BY_HEAD, 1),
    "norm_of_heads": (
        around(lambda m, y: m.more["norm"](y.unflatten(-1, (4, 3))).flatten(2),
               norm=nn.LayerNorm(3)),
        NUMBERS, BY_HEAD, 0,
    ),
    "rms_norm_of_heads": (
        around(lambda m, y: m.more["norm"](y.unflatten(-1, (4, 3))).flatten(2), norm=nn.RMSNorm(3)),
        NUMBERS, BY_HEAD, 0,
    ),
    "sum_over_the_cut": (around(lambda m, y: y.sum(-1), out=TOKENS), NUMBERS, COLUMN, 0),
    "mean_over_the_cut": (around(lambda m, y: y.mean(-1), out=TOKENS), NUMBERS, COLUMN, 0),
    "reductions": (
        around(lambda m, y: y.amax(1) + y.mean(1) + y.sum(1) + y.var(1) + y.logsumexp(1)
               + y.norm(dim=1)), NUMBERS, BY_HEAD, 0,
    ),
    "stack_and_select": (
        around(lambda m, y: torch.stack([y, y.tanh()], 1).select(1, 1) + y[:, :1].expand_as(y)),
        NUMBERS, BY_HEAD, 0,
    ),
    "cat_of_tokens": (around(lambda m, y: torch.cat([y, -y], 1).flip(1)), NUMBERS, BY_HEAD, 0),
    "cat_of_the_cut": (
        around(lambda m, y: torch.cat([y.relu(), y.tanh()], -1), out=24), NUMBERS, BY_HEAD, 0,
    ),
    "repeat": (around(lambda m, y: y.repeat(1, 2, 2), out=24), NUMBERS, BY_HEAD, 0),
    "squeeze": (
        around(lambda m, y: y.unsqueeze(0).unflatten(-1, (4, 3)).squeeze().flatten(2)),
        NUMBERS, BY_HEAD, 0,
    ),
    "transposes": (
        around(lambda m, y: y.permute(2, 0, 1).mT.movedim(0, -1).transpose(0, 1).contiguous()),
        NUMBERS, BY_HEAD, 0,
    ),
    "index": (
        around(lambda m, y: y[:, torch.tensor([2, 0])] + y.index_select(1, torch.tensor([0, 1]))),
        NUMBERS, BY_HEAD, 0,
    ),
    "topk": (around(lambda m, y: y.topk(2, 1).values + y.sort(1).values[:, :2]),
             NUMBERS, BY_HEAD, 0),
    "pad": (around(lambda m, y: functional.pad(y, (0, 0, 1, 1))), NUMBERS, BY_HEAD, 0),
    "in_place": (around(lambda m, y: (y * 2).mul_(3).relu_()), NUMBERS, BY_HEAD, 0),
    "two_partial_sums": (
        around(lambda m, y: m.more["a"](y) + m.more["b"](y) * 0.5,
               a=nn.Linear(12, 12), b=nn.Linear(12, 12)),
        NUMBERS, (("into", "column"), ("more.*", "row"), ("out", "column")), 0,
    ),
    "conv_column_row": (images(), PIXELS, (("first", "column"), ("last", "row")), 0),
    "conv_batch_norm": (
        images(lambda: nn.BatchNorm2d(12), nn.ReLU, lambda: nn.MaxPool2d(2)), PIXELS,
        (("first", "column"), ("last", "row")), 0,
    ),
    "conv_group_norm": (
        images(lambda: nn.GroupNorm(6, 12), lambda: nn.AvgPool2d(2)), PIXELS,
        (("first", "column"), ("last", "row")), 0,
    ),
    "conv_depthwise": (
        images(lambda: nn.Conv2d(12, 24, 3, groups=12), lambda: nn.Conv2d(24, 12, 1, groups=4)),
        PIXELS, (("first", "column"), ("layers.*", "column"), ("last", "row")), 0,
    ),
    "conv_transposed": (
        images(lambda: nn.ConvTranspose2d(12, 12, 2, stride=2)), PIXELS,
        (("first", "column"), ("layers.*", "row"), ("last", "column")), 0,
    ),
    "conv_upsampled": (
        images(lambda: nn.Upsample(scale_factor=2), lambda: nn.AdaptiveAvgPool2d(3)), PIXELS,
        (("first", "column"), ("last", "row")), 0,
    ),
    "vocabulary": (lambda: Tables(None), "ids", (("*", "vocabulary"),), 0),
    "padded_vocabulary": (lambda: Tables(3, ignore_index=2), "ids", (("*", "vocabulary"),), 0),
    "smoothed": (lambda: Tables(None, label_smoothing=0.1), "ids", (("*", "vocabulary"),), 0),
    "hidden": (lambda: Tables(None), "ids", (("table", "column"), ("head", "row")), 0),
}  # fmt: skip
UNEVEN, EVEN = (2.0, 1.0, 1.0), (1.0, 1.0)
BOTH = ("column_row", "fused_attention", "written_attention", "conv_batch_norm", "vocabulary")


def batch_of(kind: Any) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    if kind == "ids":
        ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS)
        return {"ids": ids % 14, "labels": ids * 3 % 10}
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in kind.items()
    }


Graph = fx.GraphModule | str


def graphs_of(names: tuple[str, ...]) -> dict[str, Graph]:
    """The graph of every case, or what its export raised."""
    found: dict[str, Graph] = {}
    for name in names:
        build, inputs, _, _ = CASES[name]
        try:
            found[name] = exported(build, batch_of(inputs), dtype=torch.float64)
        except Exception:
            found[name] = traceback.format_exc()
    return found


Outcomes = dict[tuple[str, int], Outcome | str]


def outcomes_of(graphs: dict[str, Graph], names: tuple[str, ...]) -> Outcomes:
    """The outcome of every case by its name and how many members there are, or what it raised:
    the same on all members."""
    found: Outcomes = {}
    two = dist.new_group([0, 1])
    for name in names:
        build, inputs, by_hand, _ = CASES[name]
        graph = graphs[name]
        for speeds in (UNEVEN, EVEN) if name in BOTH else (UNEVEN,):
            if isinstance(graph, str):
                found[name, len(speeds)] = graph
                continue
            if dist.get_rank() >= len(speeds):
                continue
            group = two if speeds == EVEN else dist.group.WORLD
            split, batch = Split(speeds, by_hand), batch_of(inputs)
            try:
                found[name, len(speeds)] = compare(
                    build, batch, split, dtype=torch.float64, graph=graph, group=group
                )
            except Exception:
                found[name, len(speeds)] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[Outcomes]:
    """What each of three ranks found."""
    return run_ranks(outcomes_of, len(UNEVEN), tuple(CASES), prepare=graphs_of)


def check(name: str, members: int, outcomes: list[Outcomes]) -> None:
    mine = []
    for outcome in outcomes[:members]:
        found = outcome[name, members]
        assert isinstance(found, Outcome), found
        mine.append(found)
    assert_equal(mine, TOLERANCE)
    assert len(mine[0].gathered) == CASES[name][3], mine[0].gathered
    assert mine[0].casts  # something was split


@pytest.mark.parametrize("name", CASES)
def test_split_over_three_members_is_equal_to_whole(name: str, outcomes: list[Outcomes]) -> None:
    check(name, 3, outcomes)


@pytest.mark.parametrize("name", BOTH)
def test_split_over_two_members_is_equal_to_whole(name: str, outcomes: list[Outcomes]) -> None:
    check(name, 2, outcomes)
