"""What is split by class or by vocabulary, against the same program on whole tensors."""

import pytest
import torch
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.test_casts import drawn, shard, shard_group
from torch import Tensor
from torch.nn import functional

from whale_train.runtime.comms import layout_collectives as casts
from whale_train.runtime.kernels.vocab_parallel import (
    split_cross_entropy,
    split_embedding,
    split_top1,
)

CLASSES = [(5, 5), (7, 3), (4, 0, 6)]
ROWS = 8


def class_problem(classes: int, ignored: bool) -> tuple[Tensor, Tensor]:
    logits = 3 * drawn(20, ROWS, classes)
    logits[2, :4] = -torch.inf  # masked classes, of a whole shard even
    target = torch.arange(ROWS) * 3 % classes
    target[2] = 7
    if ignored:
        target[torch.tensor([1, 4])] = -100
    return logits, target


def split_loss(
    sizes: tuple[int, ...], ignored: bool, smoothing: float, reduction: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shards = shard_group(sizes)
    logits, target = class_problem(sum(sizes), ignored)
    mine = shard(logits.to(dtype), 1, 1, sizes, shards.rank).requires_grad_()
    loss = split_cross_entropy(mine, target, shards, label_smoothing=smoothing, reduction=reduction)
    (2 * loss).backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("sizes", CLASSES)
@pytest.mark.parametrize(
    ("ignored", "smoothing", "reduction", "dtype"),
    [
        (False, 0.0, "mean", torch.float64),
        (True, 0.0, "mean", torch.float64),
        (True, 0.0, "sum", torch.float64),
        (True, 0.0, "mean", torch.bfloat16),
    ],
)
def test_split_cross_entropy(
    sizes: tuple[int, ...], ignored: bool, smoothing: float, reduction: str, dtype: torch.dtype
) -> None:
    logits, target = class_problem(sum(sizes), ignored)
    whole = logits.to(dtype).double().requires_grad_()
    loss = functional.cross_entropy(whole, target, reduction=reduction)
    (2 * loss).backward()
    arguments = (sizes, ignored, smoothing, reduction, dtype)
    tolerance = {} if dtype == torch.float64 else {"rtol": 2**-8, "atol": 1e-4}
    for rank, (found, grad) in enumerate(run_ranks(split_loss, len(sizes), *arguments)):
        wide = torch.promote_types(dtype, torch.float32)  # as autocast has a loss
        torch.testing.assert_close(found, loss.detach().to(wide), **tolerance)
        wanted = shard(whole.grad, 1, 1, sizes, rank).to(dtype)
        torch.testing.assert_close(grad, wanted, **tolerance)


def not_finite(sizes: tuple[int, ...], where: int, value: float) -> tuple[Tensor, ...]:
    shards = shard_group(sizes)
    logits, target = class_problem(sum(sizes), False)
    logits[0, where] = value
    mine = shard(logits, 1, 1, sizes, shards.rank).requires_grad_()
    loss = split_cross_entropy(mine, target, shards)
    loss.backward()
    predicted, _, counted, _ = split_top1(mine.detach(), target, shards)
    return loss.detach(), mine.grad, ((predicted == target) & counted).sum()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [1, 6, 9])  # of ranks 0, 1 and 2
def test_a_number_that_is_none_is_none_on_every_rank(where: int, value: float) -> None:
    """gloo's maximum keeps a NaN of rank 0 alone: whether a row has one must not hang on that."""
    sizes = (4, 3, 3)
    logits, target = class_problem(sum(sizes), False)
    logits[0, where] = value
    whole = logits.requires_grad_()
    functional.cross_entropy(whole, target).backward()
    for rank, (loss, grad, right) in enumerate(run_ranks(not_finite, 3, sizes, where, value)):
        assert loss.isnan()
        torch.testing.assert_close(grad, shard(whole.grad, 1, 1, sizes, rank), equal_nan=True)
        assert right == (whole.argmax(1) == target).sum()


def smoothed(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    shards = shard_group(sizes)
    mine = shard(drawn(21, ROWS, sum(sizes)), 1, 1, sizes, shards.rank).requires_grad_()
    _, target = class_problem(sum(sizes), True)
    loss = split_cross_entropy(mine, target, shards, label_smoothing=0.1)
    loss.backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("sizes", CLASSES)
def test_split_cross_entropy_with_label_smoothing(sizes: tuple[int, ...]) -> None:
    whole = drawn(21, ROWS, sum(sizes)).requires_grad_()
    _, target = class_problem(sum(sizes), True)
    loss = functional.cross_entropy(whole, target, label_smoothing=0.1)
    loss.backward()
    for rank, (found, grad) in enumerate(run_ranks(smoothed, len(sizes), sizes)):
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(grad, shard(whole.grad, 1, 1, sizes, rank))


def nothing_to_count(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    shards = shard_group(sizes)
    mine = torch.ones(ROWS, shards.size, requires_grad=True)
    loss = split_cross_entropy(mine, torch.full((ROWS,), -100), shards)
    loss.backward()
    empty = split_cross_entropy(mine[:0], torch.empty(0, dtype=torch.long), shards)
    return loss.detach(), mine.grad, empty.detach()


def test_split_cross_entropy_of_no_target_is_nan_with_no_gradient() -> None:
    for loss, grad, empty in run_ranks(nothing_to_count, 2, (2, 3)):
        assert loss.isnan()
        assert grad.count_nonzero() == 0
        assert empty.isnan()


def backward_twice() -> None:
    shards = shard_group((2, 3))
    mine = torch.ones(4, shards.size, requires_grad=True)
    loss = split_cross_entropy(mine, torch.arange(4), shards)
    loss.backward(retain_graph=True)
    loss.backward()


def no_class() -> None:
    shards = shard_group((2, 3))
    split_cross_entropy(torch.ones(1, shards.size), torch.tensor([5]), shards)


def test_split_cross_entropy_refuses_a_second_backward_and_a_target_that_is_no_class() -> None:
    with pytest.raises(RankError, match="modified by an inplace operation"):
        run_ranks(backward_twice, 2)
    with pytest.raises(RankError, match="a target is not the number of a class"):
        run_ranks(no_class, 2)


def hits(sizes: tuple[int, ...], logits: Tensor, target: Tensor) -> tuple[int, int, Tensor]:
    shards = shard_group(sizes)
    mine = shard(logits, 1, 1, sizes, shards.rank)
    predicted, _, counted, sure = split_top1(mine, target, shards, with_probability=True)
    correct, targets = ((predicted == target) & counted).sum(), counted.sum()
    assert sure is not None
    return int(correct), int(targets), sure


@pytest.mark.parametrize("sizes", CLASSES)
def test_split_top1(sizes: tuple[int, ...]) -> None:
    """With few distinct logits, so that the largest is often in several shards."""
    logits = drawn(22, 40, sum(sizes)).round()
    target = logits.argmax(1)
    target[::3] = (target[::3] + 1) % sum(sizes)
    target[::4] = -100
    correct = sum(
        row.index(max(row)) == label
        for row, label in zip(logits.tolist(), target.tolist(), strict=True)
    )
    assert 0 < correct < 30
    highest = logits.softmax(1).amax(1)
    for *counts, sure in run_ranks(hits, len(sizes), sizes, logits, target):
        assert counts == [correct, 30]
        torch.testing.assert_close(sure, highest.float())


def embedded(sizes: tuple[int, ...], padding_idx: int | None) -> tuple[Tensor, Tensor]:
    shards = shard_group(sizes)
    mine = shard(drawn(23, sum(sizes), 4), 0, 1, sizes, shards.rank).requires_grad_()
    ids = torch.arange(12).view(3, 4) % sum(sizes)
    rows = casts.reduce(split_embedding(ids, mine, shards, padding_idx), shards.group)
    (rows.pow(2) * drawn(24, 3, 4, 4)).sum().backward()
    return rows.detach(), mine.grad


@pytest.mark.parametrize("sizes", CLASSES)
@pytest.mark.parametrize("padding_idx", [None, 0, 8, -1])
def test_split_embedding(sizes: tuple[int, ...], padding_idx: int | None) -> None:
    whole = drawn(23, sum(sizes), 4).requires_grad_()
    ids = torch.arange(12).view(3, 4) % sum(sizes)
    padding = None if padding_idx == -1 else padding_idx
    rows = functional.embedding(ids, whole, padding)
    (rows.pow(2) * drawn(24, 3, 4, 4)).sum().backward()
    for rank, (found, grad) in enumerate(run_ranks(embedded, len(sizes), sizes, padding_idx)):
        assert torch.equal(found, rows)
        torch.testing.assert_close(grad, shard(whole.grad, 0, 1, sizes, rank))
