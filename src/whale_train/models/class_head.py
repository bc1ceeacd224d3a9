"""A small backbone under a head of any number of classes: the case where splitting the head pays.

It knows nothing of whale-train. The shape is that of large-scale classification (faces, products),
where the head holds nearly all parameters.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional


class Output(NamedTuple):
    """Result of a forward.

    loss: scalar; None without labels.
    logits: [batch, num_classes].
    """

    loss: Tensor | None
    logits: Tensor


class ClassHead(nn.Module):
    """Linear layers `num_features` -> 1024 -> 512, ReLU after each, and a head to `num_classes`."""

    def __init__(self, num_classes: int = 1000, num_features: int = 256) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(num_features, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU()
        )
        self.head = nn.Linear(512, num_classes)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Output:
        """Return the logits, and the mean cross-entropy where `labels` are given.

        `features` are [batch, num_features], `labels` int64 [batch].
        """
        logits = self.head(self.backbone(features))
        if labels is None:
            return Output(None, logits)
        # In half precision a loss keeps three digits.
        return Output(functional.cross_entropy(logits.float(), labels), logits)
