"""Compute on shards by class or vocabulary: softmax cross-entropy, its top-1, and the embedding.

Logits are never gathered. The shards exchange only a row's maximum, its sum of exponentials and the
logit of its label (the "distributed softmax" of large classifiers). Every function takes the same
targets or ids on every shard, and numbers classes globally.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from whale_train.runtime.comms.layout_collectives import ShardGroup, all_gather_stack


def split_cross_entropy(
    logits: Tensor,
    target: Tensor,
    shards: ShardGroup,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    scale: Tensor | float | None = None,
) -> Tensor:
    """Return the softmax cross-entropy (a scalar) of classes that are sharded over a group.

    `logits` are [N, this rank's classes] and `target` is [N] int64, the same on each shard.
    `reduction` is `mean` (over the targets that are not `ignore_index`; NaN when there is none, as
    in torch) or `sum`; `scale` multiplies the loss. The loss of 16-bit logits is in fp32, as under
    autocast.

    The gradient is the gradient of the loss that all shards hold, not of its sum over the shards.
    It overwrites the exponentials that the forward saved, so a second backward through the same
    graph is refused. Raises RuntimeError for a target that is no class (a device-side assertion on
    CUDA).
    """
    if len(shards.sizes) == 1:
        unsharded = functional.cross_entropy(
            logits.to(_accumulator(logits)),
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        return unsharded if scale is None else unsharded * scale
    is_class = ((target >= 0) & (target < shards.total)) | (target == ignore_index)
    torch._assert_async(is_class.all(), "a target is not the number of a class")
    arguments = (logits, target, shards, ignore_index, label_smoothing, reduction == "mean", scale)
    loss: Tensor = _SplitCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class _SplitCrossEntropy(torch.autograd.Function):
    """The autograd function of `split_cross_entropy`, for more than one shard."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        shards: ShardGroup,
        ignore_index: int,
        label_smoothing: float,
        is_mean: bool,
        scale: Tensor | float | None,
    ) -> Tensor:
        counted = target != ignore_index
        column = target - shards.start
        is_local = counted & (column >= 0) & (column < shards.size)
        column = column.clamp(0, max(shards.size - 1, 0)).unsqueeze(1)

        highest = _row_maximum(logits)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shards.group)
        shifted = logits - highest.unsqueeze(1)  # fp32 for 16-bit logits: `highest` promotes them
        label = highest.new_zeros(len(target))
        if shards.size:
            label = torch.where(is_local, shifted.gather(1, column).squeeze(1), label)
        told = [label]
        if label_smoothing:
            told.append(shifted.sum(1))
        exponentials = shifted.exp_()
        told.append(exponentials.sum(1))
        sums = torch.stack(told)
        dist.all_reduce(sums, group=shards.group)

        label, total = sums[0], sums[-1]
        rows = total.log() - (1 - label_smoothing) * label
        if label_smoothing:
            rows -= label_smoothing / shards.total * sums[1]
        loss = rows.masked_fill_(~counted, 0).sum()
        row_scale = counted.to(rows.dtype)
        if is_mean:
            count = row_scale.sum()
            loss /= count
            row_scale /= count.clamp_(min=1)
        if scale is not None:
            factor = torch.as_tensor(scale, dtype=rows.dtype, device=rows.device)
            loss, row_scale = loss * factor, row_scale * factor
        ctx.save_for_backward(exponentials, total, column, is_local, row_scale)
        ctx.classes, ctx.label_smoothing, ctx.dtype = shards.total, label_smoothing, logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, column, is_local, row_scale = ctx.saved_tensors
        row_scale = row_scale * grads[0]
        grad = exponentials.mul_((row_scale / total).unsqueeze(1))
        if grad.shape[1]:
            at_label = (1 - ctx.label_smoothing) * (row_scale * is_local).unsqueeze(1)
            grad.scatter_(1, column, grad.gather(1, column) - at_label)
        if ctx.label_smoothing:
            grad -= (ctx.label_smoothing / ctx.classes * row_scale).unsqueeze(1)
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _accumulator(logits: Tensor) -> torch.dtype:
    """Return the dtype of sums over classes: fp32 for 16-bit logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def _row_maximum(logits: Tensor) -> Tensor:
    """Return each row's maximum [N], in fp32 for 16-bit logits; -inf if this rank has no
    classes."""
    dtype = _accumulator(logits)
    if logits.shape[1] == 0:
        return logits.new_full((len(logits),), -torch.inf, dtype=dtype)
    return logits.amax(1).to(dtype)


@torch.no_grad()
def split_top1(
    logits: Tensor,
    target: Tensor,
    shards: ShardGroup,
    ignore_index: int = -100,
    with_probability: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the predicted classes, the targets, the mask of targets that are not `ignore_index`,
    and the probabilities of the predicted classes.

    Each is [N], the same on each shard; the probabilities are None unless `with_probability`.
    `logits` are [N, this rank's classes] and `target` is [N]. Of equal logits the first class wins,
    as in `torch.argmax`.
    """
    rows = 3 if with_probability else 2
    best = logits.new_zeros(rows, len(logits), dtype=torch.float64)  # holds class numbers exactly
    best[0], best[1] = -torch.inf, shards.start
    if shards.size:
        value, index = logits.max(1)
        best[0], best[1] = value, index + shards.start
        if with_probability:
            best[2] = (logits.double() - best[0].unsqueeze(1)).exp().sum(1)
    gathered = all_gather_stack(best, shards.group)
    winner = gathered[:, 0].argmax(0, keepdim=True)
    predicted = gathered[:, 1].gather(0, winner).squeeze(0).long()
    probabilities = None
    if with_probability:
        highest = gathered[:, 0].amax(0)
        total = (gathered[:, 2] * (gathered[:, 0] - highest).exp()).sum(0)
        probabilities = total.reciprocal().float()
    return predicted, target, target != ignore_index, probabilities


def split_embedding(
    ids: Tensor, weight_shard: Tensor, shards: ShardGroup, padding_idx: int | None = None
) -> Tensor:
    """Return this rank's part [*ids, D] of the embedding of `ids`; rows of other shards are zero.

    The sum over the shards is the embedding. `weight_shard` is [this rank's vocabulary, D]. The row
    `padding_idx` gets no gradient; None or a negative number (ATen's default) means that every row
    has one. Raises RuntimeError for an id outside the vocabulary (an assertion on CUDA).
    """
    padding = None if padding_idx is None or padding_idx < 0 else padding_idx
    if len(shards.sizes) == 1:
        return functional.embedding(ids, weight_shard, padding)
    torch._assert_async(((ids >= 0) & (ids < shards.total)).all(), "an id is not in the vocabulary")
    if shards.size == 0:  # zeros that require a gradient, so that later casts run their backward
        return weight_shard.new_zeros(*ids.shape, weight_shard.shape[1]) + weight_shard.sum()
    local = ids - shards.start
    elsewhere = (local < 0) | (local >= shards.size)
    if padding is not None:
        padding -= shards.start
        padding = padding if 0 <= padding < shards.size else None
    rows = functional.embedding(local.masked_fill_(elsewhere, 0), weight_shard, padding)
    return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)  # the embedding's backward needs only ids
