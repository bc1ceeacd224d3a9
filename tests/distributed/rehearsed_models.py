"""Models with what only a GPU would stumble over."""

import torch
from torch import Tensor, nn


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, 11)

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.first(points.mean(1))))
        return logits


class OnTheHost(Body):
    """A weight of features that is made anew, on the CPU."""

    def forward(self, points: Tensor) -> Tensor:
        return super().forward(points * torch.linspace(1, 2, 32))


class Reads(Body):
    """Looks at a value, and goes on as it is."""

    def forward(self, points: Tensor) -> Tensor:
        if (points.abs() < 1e6).all():
            points = points * 2
        return super().forward(points)


class Counts(Body):
    """Takes rows by their values."""

    def forward(self, points: Tensor) -> Tensor:
        rows = (points[:, 0, 0] > -1e6).nonzero().flatten()
        return super().forward(points[rows])
