"""Models whose losses are means of several kinds, over samples and over targets."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Tagger(nn.Module):
    """A class for every position of a sequence, some without a label; `loss_of` says which means.

    `pure` is their cross-entropy alone, `mixed` another one of what a sequence is, with weights of
    classes, and a mean over samples beside it, `squares` only that. `branch` keeps it from being
    exported.
    """

    def __init__(self, loss_of: str = "pure", branch: bool = False) -> None:
        super().__init__()
        self.loss_of, self.branch = loss_of, branch
        self.embedding = nn.Embedding(17, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.kind = nn.Linear(16, 5)
        self.value = nn.Linear(16, 1)
        self.head = nn.Linear(16, 17)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5]))

    def forward(self, input_ids: Tensor, labels: Tensor, kinds: Tensor, values: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        if self.branch and not hidden.is_meta and bool(hidden.isnan().any()):
            raise ValueError("not a number")
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(self.drop(hidden)))
        pooled = hidden.mean(1)
        squares = 3 * (self.value(pooled).squeeze(1) - values).square().mean()
        if self.loss_of == "squares":
            return squares
        tags = functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        if self.loss_of == "pure":
            return tags
        of_kinds = functional.cross_entropy(
            self.kind(pooled), kinds, weight=self.weights, ignore_index=-1
        )
        return tags + 0.5 * of_kinds + squares


class Taught(nn.Module):
    """Its targets are what another part of it, that learns as well, takes for the likeliest; it
    ignores those that are the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        self.teacher, self.head = nn.Linear(16, 17), nn.Linear(16, 17)

    def forward(self, input_ids: Tensor, labels: Tensor, kinds: Tensor, values: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        taught = self.teacher(hidden)
        targets = torch.where(taught.argmax(-1) < 4, -100, taught.argmax(-1))
        tags = functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
        return tags + taught.square().mean()
