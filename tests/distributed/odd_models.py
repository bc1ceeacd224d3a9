"""Ordinary modules that do unusual things with the samples of a batch, with state and with losses.

Each is `forward(points, labels, ids, weights)` on `points` [B, 6, 8], `labels` [B] of 5 classes,
`ids` [B, 6] of 16 tokens and `weights` [B], positive; each returns its loss. Whatever a strategy
makes of one is what one process computes, or a refusal.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


ODD = [
    made
    for made in list(globals().values())
    if isinstance(made, type) and issubclass(made, Odd) and made is not Odd
]
