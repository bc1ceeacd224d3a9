"""What members of a split draw, and what their losses are means over."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.distributed.harness import run_ranks
from tests.distributed.splitting import Split, write
from tests.distributed.test_rules import Tables, batch_of
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from whale_train.models.export.export import export
from whale_train.runtime.graph.segment import Counts
from whale_train.runtime.loss.graph_losses import targets_graph


def exponential(x: Tensor) -> Tensor:
    """Zeros and twos, by an operation that fills a tensor in place."""
    return x * 2 * (torch.empty_like(x).exponential_() < math.log(2))


def without_gradients(x: Tensor) -> Tensor:
    """Zeros and twos, from a graph inside the graph."""
    with torch.no_grad():
        mask = torch.rand(x.shape) < 0.5
    return x * 2 * mask


DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": functional.dropout,
    "exponential_": exponential,
    "a graph inside": without_gradients,
}


class Drawn(nn.Module):
    """The mask of a dropout, read as a binary number: twelve ones times powers of two."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.into = nn.Linear(8, 12)
        nn.init.zeros_(self.into.weight)
        nn.init.ones_(self.into.bias)
        self.drop = DROPS[by]

    def forward(self, x: Tensor) -> Tensor:
        kept = self.drop(self.into(x)) / 2
        return (kept[0] * 2 ** torch.arange(12, dtype=x.dtype)).sum()


def masks(
    pattern: str, seeds: tuple[int, ...], by: str = "dropout"
) -> tuple[list[int], dict[str, str], bool]:
    """Three masks in a row as each member has them, `seeds` those of the default generators."""
    split = Split((1.0, 1.0), (("into", pattern),))
    batch = {"x": torch.zeros(2, 8)}
    written = write(lambda: Drawn(by), batch, split, seed=7)
    torch.manual_seed(seeds[dist.get_rank()])
    before = torch.get_rng_state()
    found = [int(written.segment(batch["x"])[0].detach()) for _ in range(3)]
    untouched = torch.equal(before, torch.get_rng_state())
    return found, written.sharded.assignment.random, untouched


@pytest.mark.parametrize("by", DROPS)
def test_members_drop_alike_what_they_hold_alike(by: str) -> None:
    (first, random, untouched), (second, _, _) = run_ranks(masks, 2, "replicate", (1, 2), by)
    assert list(random.values()) == ["shared"]
    assert first == second
    assert len(set(first)) == 3
    assert untouched  # the rank's own generator


def test_members_drop_their_own_of_what_is_cut() -> None:
    (alike, random, _), _ = run_ranks(masks, 2, "column", (1, 1))
    assert random == {"dropout": "own"}
    assert all(mask & 63 == mask >> 6 for mask in alike)  # halves drawn from equal generators
    (unlike, _, _), (second, _, _) = run_ranks(masks, 2, "column", (1, 2))
    assert unlike == second  # gathered: all members see both halves
    assert any(mask & 63 != mask >> 6 for mask in unlike)


def scaled(pattern: str, evaluated: bool) -> tuple[float, Tensor, tuple[float, float]]:
    """A loss whose sum is scaled by 1/40, its head's gradient on this member, and what an
    evaluation counts."""
    counts = Counts() if evaluated else None
    batch = batch_of("ids")
    written = write(
        lambda: Tables(None, ignore_index=2), batch, Split((1.0, 1.0), (("*", pattern),)),
        counts=counts, loss_scale=lambda name: torch.tensor(1 / 40, dtype=torch.float64),
    )  # fmt: skip
    (loss,) = written.segment(*(batch[name] for name in written.segment.inputs))
    head = written.segment.get_parameter("head__weight")
    loss.backward()
    assert head.grad is not None
    return float(loss.detach()), head.grad, counts.take() if counts else (0.0, 0.0)


@pytest.mark.parametrize("pattern", ["vocabulary", "replicate"])
# An evaluation has the same loss, and counts besides.
@pytest.mark.parametrize("evaluated", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_mean_over_targets_is_a_sum_times_its_scale(pattern: str, evaluated: bool) -> None:
    torch.manual_seed(0)
    model, batch = Tables(None, ignore_index=2), batch_of("ids")
    logits = model.head(model.table(batch["ids"]).tanh()).flatten(0, 1)
    labels = batch["labels"].flatten()
    loss = functional.cross_entropy(logits, labels, ignore_index=2, reduction="sum") / 40
    loss.backward()
    counted = labels != 2
    right = float(((logits.argmax(1) == labels) & counted).sum())
    results = run_ranks(scaled, 2, pattern, evaluated)
    for rank, (found, grad, counts) in enumerate(results):
        assert found == pytest.approx(float(loss.detach()), rel=1e-6)
        whole = model.head.weight.grad
        assert whole is not None
        mine = whole[5 * rank : 5 * rank + 5] if pattern == "vocabulary" else whole
        torch.testing.assert_close(grad, mine)
        if evaluated:
            assert counts == (right, float(counted.sum()))


class Shifted(nn.Module):
    """A loss on labels moved by one, written into a new tensor in place, and one on weighted
    classes."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)
        self.offset = nn.Parameter(torch.zeros(())) if learned else None
        self.register_buffer("weights", torch.arange(6.0))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x).flatten(0, 1)
        moved = torch.full_like(labels, -100)
        moved[:, :-1] = labels[:, 1:]
        if self.offset is not None:
            moved = moved + self.offset.long()
        first = functional.cross_entropy(logits, moved.flatten())
        weights = self.weights
        assert isinstance(weights, Tensor)
        second = functional.nll_loss(logits.log_softmax(1), labels.flatten(), weights)
        return first + second


def test_targets_are_counted_before_the_first_forward() -> None:
    x, labels = torch.randn(3, 5, 4), torch.arange(15).view(3, 5) % 6
    labels[0, 2] = -100
    graph, error = export(Shifted(learned=False), {"x": x, "labels": labels})
    assert graph is not None, error
    counting = targets_graph(graph)
    assert counting is not None
    assert [n.target for n in counting.graph.nodes if n.op == "placeholder"] == ["labels"]
    first, second = counting(labels)
    assert (first.dtype, float(first)) == (torch.float64, 3 * 4 - 1)
    assert float(second) == float(labels[labels >= 0].sum())  # class i weighs i
    assert len(counting.meta["losses"]) == 2
    graph, _ = export(Shifted(learned=True), {"x": x, "labels": labels})
    assert graph is not None
    assert targets_graph(graph) is None


class Distilled(nn.Module):
    """Its targets are probabilities that parameters have a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.inner(x).transpose(1, 2)
        return functional.cross_entropy(logits, logits.detach().softmax(1))


def test_of_probabilities_the_rows_are_counted_whoever_computes_them() -> None:
    graph, error = export(Distilled(), {"x": torch.randn(3, 5, 4)})
    assert graph is not None, error
    counting = targets_graph(graph)
    assert counting is not None
    assert [float(count) for count in counting(torch.randn(7, 5, 4))] == [7 * 5]
