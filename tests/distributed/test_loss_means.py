"""Losses of shared batches, against the loss and gradients of the concatenated batch."""

from collections.abc import Sequence

import pytest
import torch
from tests.distributed.harness import RankError, run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from whale_train.runtime.casts import ShardGroup
from whale_train.runtime.cross_entropy import split_cross_entropy
from whale_train.runtime.loss_means import GlobalMeans, count_targets

VOCABULARY, LENGTH = 11, 6


class TwoHeads(nn.Module):
    """Two masked cross-entropies and a mean square: a shift as language models have, a move to
    where the logits are, and class weights in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.norm = nn.LayerNorm(8)
        self.tokens = nn.Linear(8, VOCABULARY)
        self.kinds = nn.Linear(8, 3)
        self.register_buffer("importance", torch.tensor([1.0, 0.0, 2.5]))

    def forward(self, ids: Tensor, kind: Tensor) -> Tensor:
        hidden = functional.dropout(self.norm(self.embedding(ids)), p=0.0).tanh()
        logits = self.tokens(hidden)
        if torch.arange(LENGTH, device=logits.device).sum() != sum(range(LENGTH)):
            raise ValueError("models look at values that depend on no parameter")
        shifted = functional.pad(ids, (0, 1), value=-100)[:, 1:].to(logits.device)
        shifted = shifted.masked_fill(shifted == 0, -100)
        loss = functional.cross_entropy(logits.transpose(1, 2), shifted)
        guessed = self.kinds(hidden.mean(1)).log_softmax(-1)
        loss = loss + 0.7 * nn.NLLLoss(weight=self.importance, ignore_index=3)(guessed, kind)
        return loss + 0.3 * functional.mse_loss(hidden.sum(-1), ids.to(hidden.dtype))


def built() -> TwoHeads:
    torch.manual_seed(0)
    return TwoHeads().double()


def batch(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)
    kind = torch.randint(0, 3, (size,), generator=generator)
    for sample in range(size):  # from all masked to none masked
        ids[sample, : sample % LENGTH + 1] = 0
    ids[0], kind[0], kind[1] = 0, 3, 3
    return {"ids": ids, "kind": kind}


def part(whole: dict[str, Tensor], start: int, size: int) -> dict[str, Tensor]:
    return {name: value[start : start + size] for name, value in whole.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


class CrossEntropies(nn.Module):
    """Only terms that add up, so that the shares' losses add up to the whole loss."""

    def __init__(self, dtype: torch.dtype, **options: object) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4, dtype=dtype)
        self.options = options

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        logits = self.linear(x)
        options = dict(self.options)
        if "weight" in options:
            options["weight"] = torch.tensor(options["weight"], dtype=x.dtype)
        loss = functional.cross_entropy(logits, first, **options)
        loss = loss + 0.5 * nn.CrossEntropyLoss(ignore_index=1)(logits.pow(2), second)
        exported = torch.ops.aten.cross_entropy_loss.default(logits, second, None, 1, 2)
        return loss + exported + functional.mse_loss(logits, torch.ones_like(logits))


def entropy_batch(size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.randint(0, 4, (size,), generator=generator) for _ in range(2))
    first[:3] = -100  # all of the first replica's, where it has no more than three
    return {
        "x": torch.randn(size, 5, generator=generator).to(dtype),
        "first": first,
        "second": second,
    }


def entropies(
    sizes: tuple[int, ...], dtype: torch.dtype, options: dict[str, object]
) -> tuple[Tensor, dict[str, Tensor]]:
    rank, total = dist.get_rank(), sum(sizes)
    torch.manual_seed(0)
    model = CrossEntropies(dtype, **options)
    mine = part(entropy_batch(total, dtype), sum(sizes[:rank]), sizes[rank])
    with GlobalMeans(dist.group.WORLD, sizes[rank], total):
        loss = model(**mine)
    (loss * (sizes[rank] / total)).backward()
    return loss.detach() * (sizes[rank] / total), gradients(model)


@pytest.mark.parametrize("sizes", [(4, 4), (3, 6), (2, 1, 5)])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {}),
        (torch.float64, {"weight": [1.0, 0.5, 0.0, 3.0]}),
        (torch.float64, {"label_smoothing": 0.2}),
        (torch.float64, {"size_average": True}),
        (torch.bfloat16, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average")
def test_shares_add_up_to_the_loss_of_the_global_batch(
    sizes: tuple[int, ...], dtype: torch.dtype, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    model = CrossEntropies(dtype, **options)
    loss = model(**entropy_batch(sum(sizes), dtype))
    loss.backward()
    results = run_ranks(entropies, len(sizes), sizes, dtype, options)
    tolerance = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {}
    assert results[0][0].dtype == dtype
    torch.testing.assert_close(sum(part for part, _ in results), loss.detach(), **tolerance)
    for name, parameter in model.named_parameters():
        found = sum(grads[name] for _, grads in results)
        torch.testing.assert_close(found, parameter.grad, **tolerance)


def other_reductions() -> list[bool]:
    """Sums, unreduced losses and probabilities as targets: the last are one a row."""
    rank = dist.get_rank()
    x, target = torch.randn(3, 4), torch.tensor([0, 1, -100])
    plain = [
        functional.cross_entropy(x, target, reduction="sum"),
        functional.cross_entropy(x, target, reduction="none"),
        functional.cross_entropy(x, target, reduce=False),
    ]
    probable = functional.cross_entropy(x, x.softmax(1))
    with GlobalMeans(dist.group.WORLD, 3, 6):
        same = [
            functional.cross_entropy(x, target, reduction="sum"),
            functional.cross_entropy(x, target, reduction="none"),
            functional.cross_entropy(x, target, reduce=False),
        ]
        mean = functional.cross_entropy(x, x.softmax(1))
        # All targets on one rank: the other's term is 0, and belongs to a graph.
        y = x.clone().requires_grad_()
        lonely = functional.cross_entropy(y, torch.full((3,), -100 if rank else 2))
        lonely.backward()
    wanted = 0.0 if rank else 2 * functional.cross_entropy(x, torch.full((3,), 2)).item()
    equal = [torch.equal(a, b) for a, b in zip(plain, same, strict=True)]
    near = [torch.allclose(mean, probable), abs(lonely.item() - wanted) < 1e-5]
    return [*equal, *near, bool(y.grad.isfinite().all()), bool(y.grad.any()) == (rank == 0)]


@pytest.mark.filterwarnings("ignore:size_average")
def test_what_is_not_a_mean_over_targets_is_left_alone() -> None:
    assert run_ranks(other_reductions, 2) == [[True] * 7] * 2


def split_head(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Two replicas, each of two ranks that share the classes: a mesh of 2 x 2."""
    rank = dist.get_rank()
    replica, index = divmod(rank, 2)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    logits, target = head_problem(sum(sizes))
    rows = slice(sum(sizes[:replica]), sum(sizes[: replica + 1]))
    columns = [slice(0, 3), slice(3, 5)][index]
    mine = logits[rows, columns].clone().requires_grad_()
    with GlobalMeans(across[index], sizes[replica], sum(sizes), accuracy=True) as means:
        shards = ShardGroup(pairs[replica], (3, 2), index)
        loss = split_cross_entropy(mine, target[rows], shards)
    (loss * sizes[replica] / sum(sizes)).backward()
    return mine.grad, torch.tensor([means.correct, means.targets, means.loss_sum])


def head_problem(size: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(size, 5, generator=torch.Generator().manual_seed(3)).double()
    target = logits.argmax(1)
    target[::3] = 0
    target[:3] = -100
    return logits, target


def test_a_loss_split_by_class_and_shared_by_replicas() -> None:
    sizes = (3, 6)
    logits, target = head_problem(9)
    logits.requires_grad_()
    functional.cross_entropy(logits, target).backward()
    results = run_ranks(split_head, 4, sizes)
    grad = torch.cat([torch.cat([results[i][0], results[i + 1][0]], 1) for i in (0, 2)])
    torch.testing.assert_close(grad, logits.grad)
    counted = target != -100
    correct = int((logits.argmax(1) == target)[counted].sum())
    loss_sum = functional.cross_entropy(logits, target, reduction="sum").item()
    for replica in (0, 2):
        wanted = [correct, 6, loss_sum] if replica else [0, 0, 0.0]
        for rank in (replica, replica + 1):
            torch.testing.assert_close(results[rank][1], torch.tensor(wanted).double())


def on_meta(model: nn.Module) -> nn.Module:
    """Parameters on the meta device, buffers (the class weights) as they are."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta")))
    return model


def accumulated(cut: Sequence[Sequence[int]]) -> tuple[dict[str, Tensor], bool]:
    """`cut` lists each rank's micro-batch sizes."""
    rank, total = dist.get_rank(), sum(map(sum, cut))
    starts, start = [], sum(map(sum, cut[:rank]))
    for size in cut[rank]:
        starts.append(start)
        start += size
    whole = batch(total)
    mine = [part(whole, start, size) for start, size in zip(starts, cut[rank], strict=True)]
    torch.manual_seed(4)
    counts = count_targets(on_meta(built()), mine, dist.group.WORLD)
    torch.manual_seed(4)
    drawn = torch.rand(1)
    torch.manual_seed(4)
    count_targets(on_meta(built()), mine, dist.group.WORLD)
    torch.manual_seed(4)
    kept = torch.equal(torch.rand(1), drawn)
    model = built()
    for micro_batch, size, targets in zip(mine, cut[rank], counts, strict=True):
        means = GlobalMeans(
            dist.group.WORLD, size, total, micro_batches=len(cut[rank]), targets=targets
        )
        with means:
            loss = model(**micro_batch)
        (loss * (size / total)).backward()
    return gradients(model), kept


@pytest.mark.parametrize("cut", [[[4, 4], [4, 4]], [[1, 1, 5], [2, 3, 1]], [[3], [4, 1], [1, 2]]])
def test_micro_batches_add_up_to_the_gradient_of_the_global_batch(cut: list[list[int]]) -> None:
    model = built()
    model(**batch(sum(map(sum, cut)))).backward()
    results = run_ranks(accumulated, len(cut), cut)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(sum(grads[name] for grads, _ in results), grad)


def unknown_counts(masked: bool) -> Tensor:
    x = torch.eye(4)[dist.get_rank() :].clone()
    target = torch.zeros(len(x), dtype=torch.long)
    if masked:
        target[0] = -100
    with GlobalMeans(dist.group.WORLD, len(x), 14, micro_batches=2):
        return functional.cross_entropy(x, target)


def test_micro_batches_that_were_not_counted_must_be_unmasked() -> None:
    for rank, loss in enumerate(run_ranks(unknown_counts, 2, False)):
        x = torch.eye(4)[rank:]
        wanted = torch.stack([row.logsumexp(0) - row[0] for row in x]).mean()
        torch.testing.assert_close(loss, wanted)
    with pytest.raises(RankError, match=r"train.global_batch=14 is run in 2 micro-batches"):
        run_ranks(unknown_counts, 2, True)


def counted_otherwise(fewer: bool) -> None:
    mine = part(batch(8), 4 * dist.get_rank(), 4)
    (targets,) = count_targets(on_meta(built()), [mine], dist.group.WORLD)
    mine["ids"][-1] = 0
    with GlobalMeans(dist.group.WORLD, 4, 8, micro_batches=2, targets=targets):
        if not fewer:
            built()(**mine)


def of_parameters() -> None:
    linear = nn.Linear(3, 3, device="meta")

    def distilled(x: Tensor) -> Tensor:
        return functional.cross_entropy(linear(x), linear(x).argmax(1))

    count_targets(distilled, [{"x": torch.ones(2, 3)}], dist.group.WORLD)


def test_counts_that_do_not_hold_are_refused() -> None:
    with pytest.raises(RankError, match="other targets than were counted"):
        run_ranks(counted_otherwise, 2, False)
    with pytest.raises(RankError, match="2 losses were counted beforehand, 0 called"):
        run_ranks(counted_otherwise, 2, True)
    with pytest.raises(RankError, match="depend on more than the batch"):
        run_ranks(of_parameters, 1)


def evaluated() -> list[float]:
    model = built()
    mine = part(batch(9), [0, 4][dist.get_rank()], [4, 5][dist.get_rank()])
    with GlobalMeans(dist.group.WORLD, 4, 9, accuracy=True) as means, torch.no_grad():
        model(**mine)
    return [float(means.correct), float(means.targets), float(means.loss_sum)]


def test_accuracy_counts_over_the_targets_that_are_not_ignored() -> None:
    model, whole = built(), batch(9)
    hidden = model.norm(model.embedding(whole["ids"])).tanh()
    pairs = []
    for sample, ids in enumerate(whole["ids"].tolist()):
        logits = model.tokens(hidden[sample])
        pairs += [(logits[i], ids[i + 1], 1.0) for i in range(LENGTH - 1) if ids[i + 1]]
        kind = int(whole["kind"][sample])
        if kind < 3:
            guess = model.kinds(hidden[sample].mean(0))
            pairs.append((guess, kind, float(model.importance[kind])))
    results = run_ranks(evaluated, 2)
    totals = [sum(column) for column in zip(*results, strict=True)]
    assert totals[0] == sum(int(row.argmax()) == label for row, label, _ in pairs)
    assert totals[1] == len(pairs)
    loss_sum = sum(w * (row.logsumexp(0) - row[label]).item() for row, label, w in pairs)
    assert totals[2] == pytest.approx(loss_sum)


def with_an_idle_rank() -> tuple[Tensor, dict[str, Tensor]]:
    """Everything on one rank, and nothing on the other."""
    rank = dist.get_rank()
    model = built()
    mine = batch(5) if rank == 0 else part(batch(5), 0, 0)
    with GlobalMeans(dist.group.WORLD, 5 if rank == 0 else 0, 5):
        logits = model.tokens(model.embedding(mine["ids"])).transpose(1, 2)
        target = mine["ids"].masked_fill(mine["ids"] == 0, -100)
        loss = functional.cross_entropy(logits, target)
    loss.backward()
    return loss.detach(), {"tokens": model.tokens.weight.grad}


def test_a_replica_without_samples() -> None:
    model, whole = built(), batch(5)
    logits = model.tokens(model.embedding(whole["ids"])).transpose(1, 2)
    target = whole["ids"].masked_fill(whole["ids"] == 0, -100)
    loss = functional.cross_entropy(logits, target)
    loss.backward()
    (found, grads), (nothing, no_grads) = run_ranks(with_an_idle_rank, 2)
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(grads["tokens"], model.tokens.weight.grad)
    assert nothing == 0
    assert no_grads["tokens"].count_nonzero() == 0
