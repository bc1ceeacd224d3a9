"""Models that number rows and classes by the data in ways of their own."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """Logits of three classes; one that looks at values has no graph."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.looks = looks
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        if self.looks and bool(logits.isnan().any()):
            raise ValueError("not a number")
        return logits


class OwnLoss(nn.Module):
    """Its own cross-entropy of three classes, which leaves out labels of `ignored`; `casts` says
    whether it makes whole numbers of the labels."""

    def __init__(self, ignored: int = -100, casts: bool = False) -> None:
        super().__init__()
        self.ignored, self.casts = ignored, casts
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        labels = labels.long() if self.casts else labels
        logits = self.layer(x)
        return SimpleNamespace(
            loss=functional.cross_entropy(logits, labels, ignore_index=self.ignored)
        )


class Packed(nn.Module):
    """Numbers of two tables and one that is no row of any, in one field."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Embedding(3, 4), nn.Embedding(50, 4)
        self.layer = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.small(ids[:, 0]) + self.large(ids[:, 1])
        logits: Tensor = self.layer(rows + torch.tanh(ids[:, 2:].float()))
        return logits
