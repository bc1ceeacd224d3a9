"""Define a user's model, datasets and optimizer for `every_plan.py`, without whale-train code."""

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset


class Layers(nn.Module):
    """Residual layers over the numbers of a sample, with a head of 10 classes and no loss."""

    def __init__(self, inputs: int = 64, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits, [batch, 10], of `pixel_values`, [batch, ...]."""
        hidden = self.enter(pixel_values.flatten(1))
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        logits: Tensor = self.head(hidden)
        return logits


class Counting(Dataset[dict[str, list[int]]]):
    """Twenty rows of 2 to 10 numbers, each counting up with a step that depends on the row."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        row = [(number + place * (1 + number % 5)) % 30 for place in range(2 + number * 7 % 9)]
        return {"input_ids": row, "labels": row}


class Noisy(Dataset[tuple[Tensor, int]]):
    """Twenty rows of 64 numbers and a class. Noise is drawn each time that a row is read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        row = torch.cos(torch.arange(64.0) * (1 + number))
        return row * (1 + random.random()) + 0.3 * torch.randn(64), number % 10


class Lars(Optimizer):
    """LARS: SGD with momentum and layer-wise rates (You, Gitman and Ginsburg 2017, arXiv
    1708.03888)."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = parameter.grad + group["weight_decay"] * parameter
                weight, length = parameter.norm(), direction.norm()
                if weight > 0 and length > 0:
                    direction *= group["trust"] * weight / length
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(direction, alpha=group["lr"])
                parameter.sub_(velocity)
