"""Losses of shared batches, against the loss and gradients of the concatenated batch."""

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from whale_train.runtime.loss.global_mean import GlobalMeans

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
        return loss + functional.mse_loss(logits, torch.ones_like(logits))


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
    with GlobalMeans(dist.group.WORLD, sizes[rank] / total):
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
    with GlobalMeans(dist.group.WORLD, 3 / 6):
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


def evaluated() -> list[float]:
    model = built()
    mine = part(batch(9), [0, 4][dist.get_rank()], [4, 5][dist.get_rank()])
    with GlobalMeans(dist.group.WORLD, 4 / 9, accuracy=True) as means, torch.no_grad():
        model(**mine)
    return [float(means.correct), float(means.targets)]


def test_accuracy_counts_over_the_targets_that_are_not_ignored() -> None:
    model, whole = built(), batch(9)
    hidden = model.norm(model.embedding(whole["ids"])).tanh()
    pairs = []
    for sample, ids in enumerate(whole["ids"].tolist()):
        logits = model.tokens(hidden[sample])
        pairs += [(logits[i], ids[i + 1]) for i in range(LENGTH - 1) if ids[i + 1]]
        kind = int(whole["kind"][sample])
        if kind < 3:
            guess = model.kinds(hidden[sample].mean(0))
            pairs.append((guess, kind))
    results = run_ranks(evaluated, 2)
    totals = [sum(column) for column in zip(*results, strict=True)]
    assert totals[0] == sum(int(row.argmax()) == label for row, label in pairs)
    assert totals[1] == len(pairs)


def with_an_idle_rank() -> tuple[Tensor, dict[str, Tensor]]:
    """Everything on one rank, and nothing on the other."""
    rank = dist.get_rank()
    model = built()
    mine = batch(5) if rank == 0 else part(batch(5), 0, 0)
    with GlobalMeans(dist.group.WORLD, 1.0 if rank == 0 else 0.0):
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
