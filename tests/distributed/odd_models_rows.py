"""Modules whose rows lie otherwise than they look, or whose tables the batch acts upon."""

import torch
from tests.distributed.odd_models import TOKENS, WIDTH, Loss, Odd, each
from torch import Tensor, nn
from torch.nn import functional as F


class EveryOtherOfCat(Odd):
    """Two views of each sample laid end to end, and every other row taken."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        both = torch.cat([z, torch.tanh(z)])
        return self.head(both[::2]).square().mean() + F.cross_entropy(logits, labels)


class EveryOtherOfPairs(Odd):
    """The same with the views of a sample beside each other, which is a mean over samples."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        both = torch.stack([z, torch.tanh(z)], 1).flatten(0, 1)
        return self.head(both[1::2]).square().mean() + F.cross_entropy(logits, labels)


class PairsAgainstHalves(Odd):
    """Views of a sample beside each other, and labels of what is real end to end."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        pairs = torch.stack([z, torch.tanh(z + 1)], 1).flatten(0, 1)
        real = z.new_ones(z.shape[0])
        halves = torch.cat([real, torch.zeros_like(real)])
        found = F.binary_cross_entropy_with_logits(self.head(pairs)[:, 0], halves)
        return found + F.cross_entropy(logits, labels)


class FirstRowsOfAll(Odd):
    """A gather of as many rows as there are samples, among the rows of all places."""

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        rows = self.head(torch.tanh(self.inner(points))).flatten(0, 1).log_softmax(-1)
        return Loss(-rows.gather(1, labels.unsqueeze(1)).mean())


class SortedInGroups(Odd):
    """All tokens of the batch sorted, then taken for samples again."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        largest = ids.flatten().sort().values.view(-1, 6).amax(1).to(z.dtype)
        return F.cross_entropy(logits, labels) + largest.mean() * self.head.weight.square().mean()


class FilledWithTheSize(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        share = torch.full((z.shape[0],), 1 / z.shape[0])
        return (share * each(logits, labels)).sum()


class ScaledByFrequency(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8, scale_grad_by_freq=True)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.head(self.hidden(points + self.table(ids))), labels))


class RenormedTable(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH, max_norm=1.0)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z + self.table(ids[:, 0])), labels)


ODD_ROWS = [
    made
    for made in list(globals().values())
    if isinstance(made, type) and issubclass(made, Odd) and made is not Odd
]
