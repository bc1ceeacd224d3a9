"""A GPT whose blocks have a mixture of experts: the reference sparse model.

It knows nothing of whale-train. Every token goes to the `top_k` experts its router likes best,
and none is turned away: with a limit on an expert's tokens the samples of a batch would compete
for room. Nor is there a loss that balances the experts, whose product of means over the batch
lets samples meet as well.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whale_train.models.gpt import (
    Attention,
    Output,
    dropout_layer,
    next_token_loss,
    start_weights,
)
from whale_train.models.grouped_product import grouped_mm


class Router(nn.Module):
    """Which experts each of [tokens, width] goes to: weights and numbers, [tokens, top_k] each.

    The weights are the chosen experts' probabilities among all, as they are: even a single one
    has a gradient then.
    """

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} is not between 1 and experts={experts}")
        self.top_k = top_k
        self.score = nn.Linear(width, experts, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # In half precision neighbouring experts' probabilities would be equal.
        probabilities = torch.softmax(self.score(tokens).float(), dim=-1)
        weights, chosen = torch.topk(probabilities, self.top_k, dim=-1)
        return weights, chosen


class Experts(nn.Module):
    """GELU layers of two matrices, [experts, width, ffn] and [experts, ffn, width]."""

    def __init__(self, width: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.expand = nn.Parameter(torch.empty(experts, width, ffn))
        self.contract = nn.Parameter(torch.empty(experts, ffn, width))

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """`tokens` are [tokens, width], `weights` and `chosen` [tokens, top_k]."""
        # One row for each expert of each token, those of one expert next to each other: all
        # shapes are known beforehand, whatever the router says.
        expert, order = torch.sort(chosen.flatten(), stable=True)
        numbers = torch.arange(self.expand.shape[0], device=tokens.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        rows = tokens[order // chosen.shape[1]]
        rows = functional.gelu(grouped_mm(rows, self.expand, ends))
        rows = grouped_mm(rows, self.contract, ends)
        rows = rows * weights.flatten()[order].unsqueeze(-1).to(rows.dtype)
        summed: Tensor = rows[torch.argsort(order)].view(*chosen.shape, -1).sum(1)
        return summed


class Block(nn.Module):
    """Attention and a mixture of experts, each behind a norm and a residual."""

    def __init__(
        self, width: int, heads: int, ffn: int, experts: int, top_k: int, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.experts_norm = nn.LayerNorm(width)
        self.router = Router(width, experts, top_k)
        self.experts = Experts(width, ffn, experts)
        self.drop = dropout_layer(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden)))
        tokens = self.experts_norm(hidden).flatten(0, 1)
        mixed = self.experts(tokens, *self.router(tokens))
        added: Tensor = hidden + self.drop(mixed.view(hidden.shape))
        return added


class MoEGPT(nn.Module):
    """A decoder over `vocab_size` tokens for sequences of up to `sequence_length` of them.

    `width` is the hidden size (a multiple of `heads`, else ValueError), `depth` the number of
    blocks; each has `experts` layers of `ffn` hidden units, of which a token goes to `top_k`.
    Rows of `width` and `ffn` elements are multiples of 16 bytes, as grouped products want them.
    Weights start as GPT-2's do.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        sequence_length: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        ffn: int = 256,
        experts: int = 8,
        top_k: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(sequence_length, width)
        self.drop = dropout_layer(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, ffn, experts, top_k, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        start_weights(self, depth)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """`input_ids` and `labels` are [batch, sequence] of int64; the loss as in GPT."""
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.drop(self.token(input_ids) + self.position(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.lm_head(self.norm(hidden))
        return Output(None if labels is None else next_token_loss(logits, labels), logits)
