"""Ordinary modules that do unusual things with the samples of a batch, with state and with losses.

Each is `forward(points, labels, ids, weights)` on `points` [B, 6, 8], `labels` [B] of 5 classes,
`ids` [B, 6] of 16 tokens and `weights` [B], positive; each returns its loss. Whatever a strategy
makes of one is what one process computes, or a refusal.
"""

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

CLASSES, TOKENS, WIDTH = 5, 16, 16


class Loss(NamedTuple):
    loss: Tensor


class Odd(nn.Module):
    """Two hidden layers over each place, a mean over places, a head; what is odd is `of`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def hidden(self, points: Tensor) -> Tensor:
        """[B, WIDTH]"""
        x = torch.tanh(self.inner(points))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.mean(1)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        z = self.hidden(points)
        return Loss(self.of(z, self.head(z), labels, ids, weights))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError


def each(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample, [B]"""
    return F.cross_entropy(logits, labels, reduction="none")


# --- Losses that look across the batch -----------------------------------------------------------


class MaxOverBatch(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return z.amax(0).square().sum() + F.cross_entropy(logits, labels)


class WorstSample(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return each(logits, labels).max()


class MedianSample(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return each(logits, labels).median()


class HardestThree(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return each(logits, labels).topk(3).values.mean()


class VarianceOverBatch(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + F.relu(1 - z.var(0)).mean()


class RootMeanSquare(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (logits - 1).square().mean().sqrt()


class LogOfMean(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.log(each(logits, labels).mean())


class Perplexity(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels).exp()


class FloodedLoss(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (F.cross_entropy(logits, labels) - 1.55).abs() + 1.55


class SoftmaxAlongBatch(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (logits.softmax(0) * logits).sum(0).mean()


class CumulativeOverBatch(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return z.cumsum(0).square().mean()


class MixedUp(Odd):
    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        logits = self.head(self.hidden(0.7 * points + 0.3 * points.flip(0)))
        mixed = 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(
            logits, labels.flip(0)
        )
        return Loss(mixed)


class RolledNegatives(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.triplet_margin_loss(z, z + 0.1, z.roll(1, 0)) + F.cross_entropy(logits, labels)


class AllPairs(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.cdist(z, z).mean() + F.cross_entropy(logits, labels)


class AllPairsByRepeating(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        n = len(z)
        return (z.repeat(n, 1) * z.repeat_interleave(n, 0)).sum(-1).exp().mean()


class HalvesContrasted(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        left, right = z[: len(z) // 2], z[len(z) // 2 :]
        return torch.logsumexp(left @ right.T, -1).mean()


class CrossCovariance(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        covariance = z.T @ z / len(z)
        return F.cross_entropy(logits, labels) + covariance.triu(1).square().mean()


class SecondMoment(Odd):
    """A mean over samples, written as a product of matrices."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + 0.1 * (z.T @ z / len(z)).trace()


class EntropyOfMean(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mean = logits.softmax(-1).mean(0)
        return F.cross_entropy(logits, labels) + (mean * mean.log()).sum()


class Centred(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z - z.mean(0)), labels)


class LessTheFirst(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z - z[0]), labels)


class NormalisedByFunction(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.batch_norm(z, None, None, training=True)), labels)


class AttendsOverBatch(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)  # takes dimension 0 for the sequence

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        x = self.inner(points)
        x = self.attention(x, x, x, need_weights=False)[0]
        return Loss(F.cross_entropy(self.head(x.mean(1)), labels))


class RecursOverBatch(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, WIDTH)  # as above

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.head(self.recurrent(points)[0].mean(1)), labels))


class Prototypes(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        chosen = F.one_hot(labels, CLASSES).float()
        means = chosen.T @ z / (chosen.sum(0).unsqueeze(1) + 1)
        return F.cross_entropy(-(z.unsqueeze(1) - means).square().sum(-1), labels)


class ByPlace(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        places = torch.arange(len(z), dtype=z.dtype, device=z.device)
        return (each(logits, labels) * places).mean()


class Broadcast(Odd):
    """[B, 1] against [B]: the classic mistake, which compares all pairs."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (z[:, :1] - weights).square().mean()


class Sorted(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (z[:, 0].sort().values - weights.sort().values).abs().mean()


# --- Integer statistics of the batch -------------------------------------------------------------


class UsageTimesGates(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gates = logits.softmax(-1)
        used = F.one_hot(gates.argmax(-1), CLASSES).float().mean(0)
        return F.cross_entropy(logits, labels) + (used * gates.mean(0)).sum()


class Bincount(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts = torch.bincount(labels, minlength=CLASSES).to(z.dtype)
        return (each(logits, labels) / counts[labels]).sum() / CLASSES


class Histogram(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        counts = torch.histc(labels.to(z.dtype), CLASSES, 0, CLASSES - 1)
        return F.cross_entropy(logits, labels) + (counts * logits.softmax(-1).mean(0)).sum() / 10


class Majority(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + logits[:, labels.mode().values].mean()


# --- Sums, weighted means, ratios ----------------------------------------------------------------


class SumOfSquares(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return 0.05 * F.mse_loss(logits, logits.detach() + 1, reduction="sum") + z.square().sum()


class SumOfEntropies(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return 0.1 * F.cross_entropy(logits, labels, reduction="sum")


class SumOverSize(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return each(logits, labels).sum() / len(labels)


class MeanTimesSize(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return 0.1 * F.cross_entropy(logits, labels) * labels.shape[0]


class MeanAndSum(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + 0.01 * z.square().sum()


class SumAndPenalty(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return 0.1 * each(logits, labels).sum() + self.inner.weight.square().sum()


class MeanAndPenalty(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(logits, labels) + 0.01 * penalty


class WeightedMean(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (weights * each(logits, labels)).sum() / weights.sum()


class MeanOfWeighted(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return (weights * each(logits, labels)).mean()


class MaskedMean(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        wanted = (labels > 1).to(z.dtype)
        return (wanted * each(logits, labels)).sum() / wanted.sum().clamp(min=1)


class BatchMeanDivergence(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        target = F.one_hot(labels, CLASSES).to(z.dtype) * 0.8 + 0.04
        return F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")


class SeveralLosses(Odd):
    """Targets that are ignored, class weights, smoothing, and two more losses."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        by_class = torch.linspace(0.5, 1.5, CLASSES, device=z.device)
        first = F.cross_entropy(logits, labels, by_class, ignore_index=0, label_smoothing=0.1)
        second = F.nll_loss(logits.log_softmax(-1), labels, ignore_index=1)
        return first + 0.5 * second + F.huber_loss(z[:, 0], weights)


class BinaryWithWeights(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        target = F.one_hot(labels, CLASSES).to(z.dtype)
        positive = torch.full((CLASSES,), 3.0, device=z.device)
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=positive)


class Margins(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        signs = torch.where(labels > 2, 1.0, -1.0).to(z.dtype)
        cosine = F.cosine_embedding_loss(z, torch.tanh(z + 1), signs)
        return F.multi_margin_loss(logits, labels) + cosine


class Alignment(Odd):
    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        logits = self.head(torch.tanh(self.inner(points))).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(labels),), 6, dtype=torch.long)
        targets = (labels % (CLASSES - 1) + 1).unsqueeze(1)
        return Loss(F.ctc_loss(logits, targets, lengths, torch.ones_like(lengths)))


# --- State that moves between calls --------------------------------------------------------------


class CountsCalls(Odd):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels) + z.square().mean() / self.calls


class CountsWithoutGradients(CountsCalls):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        return F.cross_entropy(logits, labels) + z.square().mean() / self.calls


class CountsInAPart(Odd):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.seen[1:].mul_(1.5)
        return F.cross_entropy(logits, labels) + z.square().mean() / self.seen.sum()


class CountsInPython(Odd):
    calls = 0

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels) + min(1.0, 0.3 * self.calls) * z.square().mean()


class FollowsTheBatch(Odd):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * z.mean(0))
        return F.cross_entropy(self.head(z - self.seen), labels)


class RemembersTheLast(Odd):
    last: Any = None

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        pull = z.mean() * 0 if self.last is None else (z.mean(0) * self.last).sum()
        self.last = z.detach().mean(0)
        return F.cross_entropy(logits, labels) + pull


class Collects(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.seen.append(len(z))
        return F.cross_entropy(logits, labels) + z.square().mean() / len(self.seen)


class DropsBlocksByPython(Odd):
    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points))
        for block in self.blocks:
            if random.random() < 2:
                x = x + random.choice([1.0, 1.0]) * torch.tanh(block(x))
        return x.mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class CountsIntoATensor(Odd):
    calls = 0

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(logits, labels) * torch.tensor(1.0 + self.calls)


class RunningInstanceNorm(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.head(self.hidden(self.norm(points))), labels))


# --- Branches on values --------------------------------------------------------------------------


class BranchesOnLoss(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        return loss * 2 if loss > 1.6 else loss


class BranchesOnInput(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        return loss + z.square().mean() if float(weights.mean()) > 1.0 else loss


class BranchesOnSize(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        return loss * 2 if len(z) > 9 else loss


class BranchesOnLargeSizes(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        return loss * 2 if logits.shape[0] > 9 else loss


class PicksByLabel(Odd):
    """Only some samples, by their labels: a sum over them."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = logits.sum() * 0
        for label in range(CLASSES):
            rows = (labels == label).nonzero().flatten()
            if len(rows):
                total = total + (label + 1) * each(logits[rows], labels[rows]).sum()
        return total / len(labels)


class MeanOfThoseMasked(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        kept = labels > 0
        return each(logits[kept], labels[kept]).mean()


class WhereNotBranch(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        loss = each(logits, labels)
        return torch.where(weights > 1, loss, loss.square()).mean()


# --- Layers --------------------------------------------------------------------------------------


class Recurrent(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, WIDTH, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.out(self.recurrent(points)[0][:, -1]), labels))


class RecurrentByCell(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, WIDTH)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        state = points.new_zeros(len(points), WIDTH)
        for place in range(points.shape[1]):
            state = self.cell(points[:, place], state)
        return Loss(F.cross_entropy(self.head(state), labels))


class Packed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(8, WIDTH, batch_first=True)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        lengths = labels.cpu() + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            points, lengths, batch_first=True, enforce_sorted=False
        )
        return Loss(F.cross_entropy(self.head(self.recurrent(packed)[1][0]), labels))


class SparseTable(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8, sparse=True)

    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        return Loss(F.cross_entropy(self.head(self.hidden(points + self.table(ids))), labels))


class BagOfTokens(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(TOKENS, WIDTH, mode="max")

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z + self.table(ids)), labels)


class TiedTable(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH, padding_idx=0)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.table(ids) + z.unsqueeze(1)
        scores = x @ self.table.weight.T
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


class Spectral(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.spectral_norm(nn.Linear(WIDTH, CLASSES))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class WeightNormed(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(8, WIDTH))
        self.blocks = nn.ModuleList(
            parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)) for _ in range(1)
        )

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Frozen(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)
        self.blocks[0].bias.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Teacher(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(z).softmax(-1)
        return F.cross_entropy(logits, wanted) + F.cross_entropy(logits, labels)


class OneLayerTwice(Odd):
    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points))
        for _ in range(3):
            x = x + torch.tanh(self.blocks[0](x))
        return self.blocks[1](x).mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Checkpointed(Odd):
    def hidden(self, points: Tensor) -> Tensor:
        x = torch.tanh(self.inner(points))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.mean(1)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Hypernetwork(Odd):
    """Every sample makes a weight of its own."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = torch.tanh(z).view(-1, 4, 4)
        mixed = torch.bmm(z.view(-1, 4, 4), own).flatten(1)
        return F.cross_entropy(self.head(mixed), labels)


class GroupedBySample(Odd):
    """Samples as groups of channels, as per-sample convolutions are written."""

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        n = len(z)
        made = F.conv1d(z.view(1, n * 4, 4), z.view(n * 4, 4, 1)[:, :4], groups=n)
        return F.cross_entropy(logits, labels) + made.square().mean()


class Spectrum(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + torch.fft.rfft(z, dim=-1).abs().mean()


class OuterByEinsum(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made = torch.einsum("bi,bj->bij", z, logits)
        return F.cross_entropy(logits, labels) + made.square().mean()


class Mapped(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        lengths = torch.vmap(lambda row: row.norm() + row.max())(z)
        return F.cross_entropy(logits, labels) + lengths.mean()


class GradientPenalty(Odd):
    def forward(self, points: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Loss:
        x = points.detach().requires_grad_()
        logits = self.head(self.hidden(x))
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return Loss(F.cross_entropy(logits, labels) + slope.square().sum((1, 2)).mean())


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.5 * grads[0]


class ReversedGradient(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        made: Tensor = self.head(_Reversed.apply(z))
        return F.cross_entropy(made, labels)


class ClampedGradient(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class ClampedInForward(Odd):
    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if z.requires_grad:
            z.register_hook(lambda grad: grad / (grad.norm() + 1e-6))
        return F.cross_entropy(self.head(z), labels)


class Normed(Odd):
    """BatchNorm of torch's own, which copies share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def of(self, z: Tensor, logits: Tensor, labels: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(z)), labels)


ODD = [
    made
    for made in list(globals().values())
    if isinstance(made, type) and issubclass(made, Odd) and made is not Odd
]
