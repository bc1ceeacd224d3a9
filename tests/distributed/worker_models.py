"""A model whose steps change with everything that logical workers must have of their own."""

import torch
from torch import Tensor, nn

TOKENS, LENGTH, CLASSES = 24, 6, 5


class Worked(nn.Module):
    """An embedding, attention with dropout, a batch norm, and dropout: masks, random states and
    statistics of each worker's own. Its evaluations draw numbers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits, [samples, CLASSES], for `input_ids`, int64 [samples, LENGTH]."""
        embedded = self.table(input_ids)
        attended = self.attention(embedded, embedded, embedded, need_weights=False)[0]
        mixed = self.convolution((embedded + attended).transpose(1, 2))
        features = self.dropout(self.norm(mixed).relu()).mean(2)
        if not self.training:
            features = features + 0.1 * torch.randn_like(features)
        logits: Tensor = self.head(features)
        return logits


def samples(count: int) -> dict[str, Tensor]:
    """Return `count` samples, by the names of the model's inputs."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(TOKENS, (count, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.sum(1) % CLASSES}
