"""Models such as users of torch.nn bring."""

import torch
from torch import Tensor, nn


class Transformer(nn.Module):
    """torch's own encoder, then a classifier."""

    def __init__(self, classes: int = 11) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, classes)

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.encoder(points)).mean(1))
        return logits


class Picks(nn.Module):
    """Constants in its forward: columns it picks, and weights of its own for them."""

    def __init__(self, classes: int = 11) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 24), nn.Linear(6, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, classes)

    def forward(self, points: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(points.mean(1)))[:, [0, 3, 23, 7, 5, 11]]
        hidden = torch.relu(self.second(hidden * torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0, 0.1])))
        logits: Tensor = self.head(torch.relu(self.third(hidden)))
        return logits


class Contrastive(nn.Module):
    """Its loss compares every sample with every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        left, right = self.first(points[:, 0]), self.second(points[:, 1])
        likeness = left @ right.t()
        targets = torch.arange(points.shape[0], device=points.device)
        return nn.functional.cross_entropy(likeness, targets)


class Balanced(nn.Module):
    """Its loss has a product of two means over the batch, as that of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 8), nn.Linear(8, 11)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        gates = torch.softmax(self.first(points.mean(1)), -1)
        used = nn.functional.one_hot(gates.argmax(-1), 8).float().mean(0)
        loss = nn.functional.cross_entropy(self.head(gates), labels)
        return loss + (used * gates.mean(0)).sum()


class InPlace(nn.Module):
    """What changes values where they are: activations, residuals, a part of a value."""

    def __init__(self, classes: int = 11) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.position = nn.Parameter(torch.linspace(-1, 1, 6 * 32).view(6, 32))
        self.blocks = nn.ModuleList(ChangingBlock() for _ in range(4))
        self.head = nn.Linear(32, classes)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.first(points)
        hidden += self.position
        for block in self.blocks:
            hidden = block(hidden)
        hidden[:, 0].mul_(0.5)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


class ChangingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32)
        self.gate = nn.Linear(32, 48, bias=False)
        self.activation = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.activation(self.into(normed))
        hidden = hidden.mul_(self.gate(normed).relu_()).add_(0.1)
        out: Tensor = self.out(hidden)
        out += x
        return out.clamp_(-3, 3)


class Segmentation(nn.Module):
    """Logits [batch, classes, *places] of convolutions over one, two or three dimensions, the last
    of which may be a projection (`projects`)."""

    def __init__(self, classes: int = 5, dims: int = 2, projects: bool = False) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.first = convolution(3, 8, 3, padding=1)
        self.second = convolution(8, 8, 1)
        self.projects = projects
        self.head = nn.Linear(8, classes) if projects else convolution(8, classes, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(pictures))))
        if self.projects:
            return self.head(hidden.movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]
        logits: Tensor = self.head(hidden)
        return logits
