"""Losses and models as users write them, for `model.loss._target_=own_losses....`."""

import torch
from torch import Tensor, nn


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    """The focal loss, a mean over samples."""
    of_label = torch.log_softmax(logits, -1).gather(1, labels[:, None]).squeeze(1)
    return (-((1 - of_label.exp()) ** gamma) * of_label).mean()


def rows(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[:, 0] - labels


class Net(nn.Module):
    """Logits of three classes; with `gamma`, the focal loss of its own instead."""

    def __init__(self, gamma: float | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)
        self.gamma = gamma

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.second(torch.relu(self.first(points)))
        if self.gamma is None or labels is None:
            return logits
        return focal(logits, labels, self.gamma)


class Value(nn.Module):
    """One value a sample; with `own`, its squared error instead."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 1)
        self.own = own

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Tensor:
        value: Tensor = self.second(torch.tanh(self.first(points))).squeeze(-1)
        return ((value - labels) ** 2).mean() if self.own else value


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits * self.weight).mean()
