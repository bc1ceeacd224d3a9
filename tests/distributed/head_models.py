"""Models of a user's own that do more with the weight of their output projection than project, or
more with the logits than compare them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS, WIDTH = 37, 16


class Tied(nn.Module):
    """A projection by the embedding's weight, after a batch norm over all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        inner = torch.tanh(self.inner(self.embedding(ids)))
        normed = self.norm(inner.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(normed).flatten(0, 1), labels.flatten())


class Centred(nn.Module):
    """Features are moved by the mean of the projection's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        inner = torch.tanh(self.inner(self.embedding(ids))) - self.head.weight.mean(0)
        return F.cross_entropy(self.head(inner).flatten(0, 1), labels.flatten())


class Late(nn.Module):
    """The tied embedding is looked up again after the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        inner = torch.tanh(self.inner(self.embedding(ids)))
        inner = inner + self.embedding(labels.clamp(min=0)).roll(1, 1)
        return F.cross_entropy((inner @ self.embedding.weight.t()).flatten(0, 1), labels.flatten())


class Tempered(nn.Module):
    """A learned temperature, and a scale of each class; the weight's norm is a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.temperature = nn.Parameter(torch.tensor([0.7]))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, TOKENS))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.inner(self.embedding(ids))))
        logits = logits * self.temperature * self.scale
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + 0.01 * self.head.weight.square().sum()


class Squares(nn.Module):
    """A loss that is no cross-entropy: the classes are the columns of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        shares = torch.softmax(self.head(torch.tanh(self.inner(self.embedding(ids)))), -1)
        return (shares - F.one_hot(labels, TOKENS)).square().sum(-1).mean()


class Alone(nn.Module):
    """Whose only weights are the projection's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(TOKENS, TOKENS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(F.one_hot(ids, TOKENS).float())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
