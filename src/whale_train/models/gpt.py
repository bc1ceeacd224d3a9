"""A small GPT: the reference language model, written in the way a user would write one.

It knows nothing of whale-train. A pre-norm decoder (GPT-2, Radford et al. 2019) with learned
positions and fused causal attention.
"""

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED_LABEL = -100  # labels that cross-entropy ignores, as in torch and transformers


class Output(NamedTuple):
    """Result of a forward.

    loss: scalar; None without labels.
    logits: [batch, sequence, vocabulary].
    """

    loss: Tensor | None
    logits: Tensor


def dropout_layer(probability: float) -> nn.Module:
    """Return a dropout of `probability`, or an identity where it is 0."""
    # Dropout of 0 is an operation all the same; leaving it out keeps the traced graph small.
    return nn.Dropout(probability) if probability else nn.Identity()


def start_weights(model: nn.Module, depth: int) -> None:
    """Initialise a decoder of `depth` blocks as GPT-2 is initialised.

    Weights are normal with deviation 0.02, biases 0. The 2 x depth projections back into the
    residual stream are divided by sqrt(2 x depth). Weights are drawn from torch's global generator,
    so that the same seed gives the same weights.
    """
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight").endswith(("projection", "contract")):
            nn.init.normal_(parameter, std=0.02 / sqrt(2 * depth))
        elif parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of `logits` for the next tokens, an fp32 scalar.

    `logits` are [batch, sequence, vocabulary], `labels` int64 [batch, sequence]. The target of a
    position is the label of the next position. Labels of -100 do not count.
    """
    # Shifting the labels instead of the logits leaves the large tensor uncopied.
    following = functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),  # a half-precision loss keeps three digits
        following.flatten(),
        ignore_index=IGNORED_LABEL,
    )


class Attention(nn.Module):
    """Self-attention over [batch, sequence, width], with one weight for query, key and value.

    It is causal, unless a mask says which positions each position attends to. Raises ValueError for
    a width that `heads` does not divide.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} does not divide into heads={heads}")
        self.width, self.heads, self.dropout = width, heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mixed hidden states. `mask` is bool [batch, 1, sequence, sequence], true where
        a position (third) attends to another (last)."""
        batch, sequence, _ = hidden.shape
        query, key, value = (
            part.view(batch, sequence, self.heads, self.width // self.heads).transpose(1, 2)
            for part in self.qkv(hidden).split(self.width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        joined: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, sequence, self.width))
        return joined


class Block(nn.Module):
    """Attention and a GELU layer of four times the width, each with a norm before it and a residual
    around it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.drop = dropout_layer(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden)))
        expanded = functional.gelu(self.expand(self.mlp_norm(hidden)))
        added: Tensor = hidden + self.drop(self.contract(expanded))
        return added


class GPT(nn.Module):
    """A decoder over `vocab_size` tokens, with GPT-2's initial weights (`start_weights`).

    vocab_size: number of different tokens.
    sequence_length: largest number of tokens of a sequence.
    width: hidden size, a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads of a block.
    dropout: probability that an element is dropped; 0 for no dropout.
    tied: whether `lm_head` shares the token embedding's weight.

    Raises ValueError for a width that `heads` does not divide.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        sequence_length: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(sequence_length, width)
        self.drop = dropout_layer(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.token.weight
        start_weights(self, depth)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Return the logits, and the loss where `labels` are given.

        `input_ids` and `labels` are int64 [batch, sequence]. The label of a position is its own
        token; the loss shifts the labels by one. The loss is the mean over the labels that are not
        -100.
        """
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.drop(self.token(input_ids) + self.position(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.lm_head(self.norm(hidden))
        if labels is None:
            return Output(None, logits)
        return Output(next_token_loss(logits, labels), logits)
