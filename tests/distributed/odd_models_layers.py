"""Modules whose layers, parameters or backward are unusual."""

from typing import Any

import torch
from tests.distributed.odd_models import CLASSES, TOKENS, WIDTH, Loss, Odd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Recurrent(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, WIDTH, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.out(self.recurrent(points)[0][:, -1]), labels))


class RecurrentByCell(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, WIDTH)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        state = points.new_zeros(len(points), WIDTH)
        for place in range(points.shape[1]):
            state = self.cell(points[:, place], state)
        return Loss(F.cross_entropy(self.head(state), labels))


class Packed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, WIDTH, batch_first=True)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        lengths = labels.cpu() + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            points, lengths, batch_first=True, enforce_sorted=False
        )
        return Loss(F.cross_entropy(self.head(self.recurrent(packed)[1][0]), labels))


class SparseTable(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8, sparse=True)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.head(self.hidden(points + self.table(ids))), labels))


class BagOfTokens(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(TOKENS, WIDTH, mode="max")

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z + self.table(ids)), labels)


class TiedTable(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH, padding_idx=0)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.table(ids) + z.unsqueeze(1)
        scores = x @ self.table.weight.T
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


class Spectral(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.spectral_norm(nn.Linear(WIDTH, CLASSES))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class WeightNormed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(8, WIDTH))
        self.blocks = nn.ModuleList(
            parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)) for _ in range(1)
        )

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Frozen(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)
        self.blocks[0].bias.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Teacher(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(z).softmax(-1)
        return F.cross_entropy(logits, wanted) + F.cross_entropy(logits, labels)


class OneLayerTwice(Odd):
    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points))
        for _ in range(3):
            x = x + torch.tanh(self.blocks[0](x))
        return self.blocks[1](x).mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Checkpointed(Odd):
    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Hypernetwork(Odd):
    """Every sample makes a weight of its own."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = torch.tanh(z).view(-1, 4, 4)
        mixed = torch.bmm(z.view(-1, 4, 4), own).flatten(1)
        return F.cross_entropy(self.head(mixed), labels)


class GroupedBySample(Odd):
    """Samples as groups of channels, as per-sample convolutions are written."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        n = len(z)
        made = F.conv1d(z.view(1, n * 4, 4), z.view(n * 4, 4, 1)[:, :4], groups=n)
        return F.cross_entropy(logits, labels) + made.square().mean()


class Spectrum(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + torch.fft.rfft(z, dim=-1).abs().mean()


class OuterByEinsum(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made = torch.einsum("bi,bj->bij", z, logits)
        return F.cross_entropy(logits, labels) + made.square().mean()


class Mapped(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        lengths = torch.vmap(lambda row: row.norm() + row.max())(z)
        return F.cross_entropy(logits, labels) + lengths.mean()


class GradientPenalty(Odd):
    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        x = points.detach().requires_grad_()
        logits = self.head(self.hidden(x))
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return Loss(F.cross_entropy(logits, labels) + slope.square().sum((1, 2)).mean())


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.5 * grads[0]


class ReversedGradient(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = self.head(_Reversed.apply(z))
        return F.cross_entropy(made, labels)


class ClampedGradient(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class ClampedInForward(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if z.requires_grad:
            z.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
        return F.cross_entropy(self.head(z), labels)


class Normed(Odd):
    """BatchNorm of torch's own, which copies share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(z)), labels)


ODD_LAYERS = [
    made
    for made in list(globals().values())
    if isinstance(made, type) and issubclass(made, Odd) and made is not Odd
]
