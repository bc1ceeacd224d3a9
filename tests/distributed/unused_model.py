"""A model with parameters and a buffer that its forward does not reach, and a frozen layer."""

import torch
from torch import Tensor, nn

CLASSES = 10


class Unreached(nn.Module):
    """`forward(features)` on `features` [B, 256]; the logits of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 16)
        self.fixed = nn.Linear(16, 16).requires_grad_(False)
        self.middle = nn.Linear(16, 16)
        self.spare = nn.Linear(16, 3)
        self.register_buffer("spare_rates", torch.arange(4.0))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = torch.tanh(self.fixed(torch.tanh(self.inner(features))))
        logits: Tensor = self.head(torch.tanh(self.middle(x)))
        return logits
