"""A GPT whose blocks have a mixture of experts: the reference sparse model.

It knows nothing of whale-train. Every token goes to the `top_k` experts with the best scores of its
router; or, with expert prototyping, to the `top_k` best of every group of experts (M6-T, Yang et
al. 2021, arXiv 2105.15082). The means of balancing the load are off by default:

- capacity (GShard, Lepikhin et al. 2020, arXiv 2006.16668): an expert takes a limited number of
  tokens of a sequence, the first ones that choose it; the other tokens skip it. Sequences do not
  compete for room: a dropped token depends on no other sample, nor on a later token.
- an auxiliary loss that balances experts (Switch Transformer, Fedus et al. 2021, arXiv 2101.03961),
  over the batch or over every sequence.
- an auxiliary loss that keeps the router's logits small (ST-MoE, Zoph et al. 2022, arXiv
  2202.08906).
- a bias on the scores by which experts are chosen, which moves against the load after every step
  (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3).
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

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


@dataclass(frozen=True)
class Routing:
    """Choice of experts by tokens, in `prototypes` groups of as many experts each.

    experts: number of experts.
    top_k: number of experts of each group that a token goes to.
    prototypes: number of groups, which divides `experts`.
    capacity_factor: capacity of an expert, relative to its tokens under a uniform load; None for no
        limit.
    balance: factor of the loss that balances experts.
    balance_over: whether the load is counted over the whole `batch` or over every `sequence`.
    z_loss: factor of the loss that keeps the router's logits small.
    bias_rate: amount by which a step moves the bias; 0 for no bias.

    Raises ValueError for values that contradict each other.
    """

    experts: int
    top_k: int
    prototypes: int = 1
    capacity_factor: float | None = None
    balance: float = 0.0
    balance_over: str = "batch"
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.prototypes < 1 or self.experts % self.prototypes:
            raise ValueError(
                f"experts={self.experts} do not divide into prototypes={self.prototypes}"
            )
        if not 1 <= self.top_k <= self.group:
            among = f"experts={self.experts}"
            if self.prototypes > 1:
                among = f"the {self.group} experts of each of prototypes={self.prototypes}"
            raise ValueError(f"top_k={self.top_k} is not between 1 and {among}")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor={self.capacity_factor} is not above 0")
        if self.balance_over not in ("batch", "sequence"):
            raise ValueError(f"balance_over={self.balance_over} is neither batch nor sequence")
        for name in ("balance", "z_loss", "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is below 0")

    @property
    def group(self) -> int:
        """Return the number of experts of one prototype."""
        return self.experts // self.prototypes

    @property
    def slots(self) -> int:
        """Return the number of experts that a token goes to."""
        return self.prototypes * self.top_k

    def capacity(self, tokens: int) -> int | None:
        """Return the capacity of an expert for a sequence of `tokens` tokens, in tokens, or None
        without a limit."""
        if self.capacity_factor is None:
            return None
        return ceil(self.capacity_factor * tokens * self.slots / self.experts)


class Choice(NamedTuple):
    """Experts that tokens go to.

    weights: weights of the chosen experts, fp32 [tokens, slots].
    chosen: numbers of the chosen experts, int64 [tokens, slots]; `experts` stands for an expert
        without room.
    auxiliary: auxiliary losses of the samples, fp32 [batch]; None where the router has none.
    """

    weights: Tensor
    chosen: Tensor
    auxiliary: Tensor | None


class Router(nn.Module):
    """Router of the tokens in [batch, sequence, width] to experts.

    The weights are the chosen experts' probabilities among all experts of their prototype, not
    renormalised, so that even a single chosen expert has a gradient.
    """

    bias: Tensor

    def __init__(self, width: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.score = nn.Linear(width, routing.experts, bias=False)
        if routing.bias_rate:
            self.register_buffer("bias", torch.zeros(routing.experts))

    def forward(self, hidden: Tensor) -> Choice:
        """Return the experts of every token of `hidden`, [batch, sequence, width].

        In training mode the bias, if there is one, is updated.
        """
        routing, (batch, sequence, _) = self.routing, hidden.shape
        # In half precision neighbouring experts' probabilities would be equal.
        logits = self.score(hidden.flatten(0, 1)).float()
        if routing.prototypes > 1:
            logits = logits.unflatten(1, (routing.prototypes, routing.group))
        probabilities = torch.softmax(logits, dim=-1)
        weights, chosen = self._best(probabilities)
        if routing.prototypes > 1:
            first = torch.arange(routing.prototypes, device=chosen.device) * routing.group
            weights, chosen = weights.flatten(1), (chosen + first.unsqueeze(-1)).flatten(1)
        auxiliary = None
        room = routing.capacity(sequence)
        if room is not None or routing.balance or routing.bias_rate:
            wanted = chosen.view(batch, sequence * routing.slots)
            counts = torch.zeros(batch, routing.experts, dtype=torch.int64, device=wanted.device)
            counts = counts.scatter_add(1, wanted, torch.ones_like(wanted))
            if room is not None:
                has_room = _has_room(wanted, counts, room).view(chosen.shape)
                chosen = torch.where(has_room, chosen, routing.experts)
            if routing.balance:
                auxiliary = routing.balance * self._unbalance(probabilities, counts)
            if routing.bias_rate and self.training:
                self._move_bias(counts)
        if routing.z_loss:
            large = torch.logsumexp(logits, dim=-1).square().view(batch, -1).mean(1)
            auxiliary = routing.z_loss * large + (0.0 if auxiliary is None else auxiliary)
        return Choice(weights, chosen, auxiliary)

    def _best(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of every prototype's best experts.

        `probabilities` are [tokens, experts], or [tokens, prototypes, group] with several
        prototypes. The last dimension of both results has size `top_k`.
        """
        if not self.routing.bias_rate:
            weights, chosen = torch.topk(probabilities, self.routing.top_k, dim=-1)
            return weights, chosen
        bias = self.bias.view(probabilities.shape[1:])
        chosen = torch.topk(probabilities + bias, self.routing.top_k, dim=-1).indices
        return probabilities.gather(-1, chosen), chosen

    def _unbalance(self, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Return each sample's part of the loss that balances experts, fp32 [batch].

        For a prototype of `group` experts it is `group` times the sum over experts of the fraction
        of slots that choose an expert, times the expert's mean probability; 1 under a uniform load.
        The result is the mean over prototypes. `counts`, int64 [batch, experts], are the slots that
        choose each expert: exact whole numbers without a gradient.
        """
        batch, shape = counts.shape[0], (self.routing.prototypes, self.routing.group)
        if self.routing.balance_over == "batch":
            counts = counts.sum(0, keepdim=True)
        asking = counts.view(-1, *shape)
        part = asking.float() / asking.sum(2, keepdim=True).float()
        likely = probabilities.view(batch, -1, *shape).mean(1)
        return (part * likely).sum((1, 2)) * self.routing.group / self.routing.prototypes

    def _move_bias(self, counts: Tensor) -> None:
        """Lower the bias of experts with more than the mean load, and raise the bias of those with
        less.

        `counts`, int64 [batch, experts], are the slots that choose each expert.
        """
        load = counts.sum(0).view(self.routing.prototypes, self.routing.group)
        # Both sides are multiplied by the number of experts, as a mean is no whole number.
        above = torch.sign(load * self.routing.group - load.sum(1, keepdim=True))
        self.bias.sub_(self.routing.bias_rate * above.flatten().float())


def _has_room(wanted: Tensor, counts: Tensor, room: int) -> Tensor:
    """Return whether each slot of a sequence is among the first `room` slots that choose its
    expert.

    wanted: expert of each slot, int64 [batch, slots of a sequence].
    counts: number of slots that choose each expert, int64 [batch, experts].

    The result is bool [batch, slots of a sequence].
    """
    expert, order = torch.sort(wanted, dim=1, stable=True)
    first = counts.cumsum(1) - counts
    place = torch.arange(wanted.shape[1], device=wanted.device) - first.gather(1, expert)
    return torch.zeros_like(wanted).scatter(1, order, (place < room).long()).bool()


class Experts(nn.Module):
    """GELU layers of all experts, each of two matrices.

    `expand` is [experts, width, ffn], `contract` [experts, ffn, width].
    """

    def __init__(self, width: int, ffn: int, routing: Routing) -> None:
        super().__init__()
        self.expand = nn.Parameter(torch.empty(routing.experts, width, ffn))
        self.contract = nn.Parameter(torch.empty(routing.experts, ffn, width))
        self.limited = routing.capacity_factor is not None

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sums of the results of each token's experts, [tokens, width].

        `tokens` are [tokens, width], `weights` and `chosen` [tokens, slots].
        """
        # There is one row for each slot, sorted by expert, so that shapes do not depend on the
        # router's choice. Rows without an expert are last.
        expert, order = torch.sort(chosen.flatten(), stable=True)
        numbers = torch.arange(self.expand.shape[0], device=tokens.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        rows = self._of_experts(tokens[order // chosen.shape[1]], expert)
        rows = functional.gelu(grouped_mm(rows, self.expand, ends))
        rows = self._of_experts(grouped_mm(rows, self.contract, ends), expert)
        rows = rows * weights.flatten()[order].unsqueeze(-1).to(rows.dtype)
        summed: Tensor = rows[torch.argsort(order)].view(*chosen.shape, -1).sum(1)
        return summed

    def _of_experts(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Return `rows`, [rows, ...], with zeros and zero gradients in rows without an expert.

        `expert`, int64 [rows], is the expert of each row. Grouped products leave such rows
        uninitialised.
        """
        if not self.limited:
            return rows
        return torch.where((expert < self.expand.shape[0]).unsqueeze(-1), rows, 0.0)


class Block(nn.Module):
    """Attention and a mixture of experts, each with a norm before it and a residual around it."""

    def __init__(self, width: int, heads: int, ffn: int, routing: Routing, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.experts_norm = nn.LayerNorm(width)
        self.router = Router(width, routing)
        self.experts = Experts(width, ffn, routing)
        self.drop = dropout_layer(dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the new hidden states, [batch, sequence, width], and the auxiliary losses.

        `mask` is the attention's; None is causal. The auxiliary losses of the samples are fp32
        [batch], or None where the router has none.
        """
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden), mask))
        normed = self.experts_norm(hidden)
        weights, chosen, auxiliary = self.router(normed)
        mixed = self.experts(normed.flatten(0, 1), weights, chosen)
        return hidden + self.drop(mixed.view(hidden.shape)), auxiliary


class MoEGPT(nn.Module):
    """A decoder over `vocab_size` tokens with a mixture of experts in every block.

    vocab_size: number of different tokens.
    sequence_length: largest number of tokens of a sequence.
    width: hidden size, a multiple of `heads`.
    depth: number of blocks.
    heads: attention heads of a block.
    ffn: hidden units of an expert.
    experts: number of experts of a block.
    top_k: experts of a block that a token goes to; with several prototypes, of each prototype.
    dropout: probability that an element is dropped; 0 for no dropout.

    The other arguments are those of `Routing`. The routers' losses are averaged over samples,
    summed over blocks, and added to the model's loss. A row of `width` or of `ffn` elements must be
    a multiple of 16 bytes, which grouped products require. The initial weights are GPT-2's. Raises
    ValueError for a width that `heads` does not divide, and where `Routing` raises.
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
        prototypes: int = 1,
        capacity_factor: float | None = None,
        balance: float = 0.0,
        balance_over: str = "batch",
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        super().__init__()
        limits = (capacity_factor, balance, balance_over, z_loss, bias_rate)
        routing = Routing(experts, top_k, prototypes, *limits)
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(sequence_length, width)
        self.drop = dropout_layer(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, ffn, routing, dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        start_weights(self, depth)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Return the logits, and the loss where `labels` are given.

        `input_ids` and `labels` are int64 [batch, sequence]. The loss is GPT's, plus the mean over
        samples of the auxiliary losses.
        """
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.drop(self.token(input_ids) + self.position(positions))
        losses = []
        for block in self.blocks:
            hidden, auxiliary = block(hidden)
            if auxiliary is not None:
                losses.append(auxiliary)
        logits = self.lm_head(self.norm(hidden))
        if labels is None:
            return Output(None, logits)
        loss = next_token_loss(logits, labels)
        if losses:
            loss = loss + sum(losses[1:], losses[0]).mean()
        return Output(loss, logits)
