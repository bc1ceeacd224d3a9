"""A step taken in several micro-batches computes what one taken at once does.

Each test is one job with `train.accumulate`, against `strategy=single` without it.
"""

import pytest
import torch
from tests.distributed.cases import (
    CLIPPED,
    EVALUATED,
    ONE,
    TOLERANCE,
    UNEVEN,
    Case,
    Run,
    zero_backbone,
)
from tests.distributed.equality import JobFailed, assert_equal
from tests.distributed.equality_table import fewest, shown_by
from tests.distributed.harness import run_ranks
from tests.distributed.test_loss_means import CrossEntropies, entropy_batch, part
from torch import Tensor, fx
from torch import distributed as dist

from whale_train.runtime.loss.global_mean import GlobalMeans, TargetCounter, Targets
from whale_train.runtime.loss.micro_batch_loss import MicroBatchLoss
from whale_train.strategies.plan.loss_weights import LossWeights

TWICE, THRICE = ("train.accumulate=2",), ("train.accumulate=3",)
STRATEGIES = ("dp", "zero1", "zero2", "zero3", "zero2_offload", "hybrid_split_dp")
# Micro-batches of every rank, as intervals of the global batch of 8.
MICRO_BATCHES = {
    ("single", 1, (), TWICE): [[[0, 4], [4, 8]]],
    ("single", 1, (), THRICE): [[[0, 3], [3, 6], [6, 8]]],
    ("", 2, UNEVEN, TWICE): [[[0, 3], [3, 5]], [[5, 7], [7, 8]]],
    ("", 2, UNEVEN, THRICE): [[[0, 2], [2, 4], [4, 5]], [[5, 6], [6, 7], [7, 8]]],
    ("", 2, (), TWICE): [[[0, 2], [2, 4]], [[4, 6], [6, 8]]],
    # Beside a split head both ranks share every micro-batch.
    ("hybrid_split_dp", 2, UNEVEN, TWICE): [[[0, 3], [4, 7]], [[3, 4], [7, 8]]],
    ("hybrid_split_dp", 2, UNEVEN, THRICE): [[[0, 2], [3, 5], [6, 7]], [[2, 3], [5, 6], [7, 8]]],
    ("hybrid_split_dp", 2, (), TWICE): [[[0, 2], [4, 6]], [[2, 4], [6, 8]]],
}
CASES = [
    # gpt's targets are as many in every sample; bert's are not, and its second half has them all.
    *(Case("gpt", s, 2, "momentum", UNEVEN, TWICE) for s in STRATEGIES),
    *(Case("gpt", s, 2, "adamw", UNEVEN, THRICE) for s in STRATEGIES),
    *(Case("bert", s, 2, "momentum", UNEVEN, THRICE) for s in STRATEGIES),
    *(Case("bert_some_without", s, 2, "sgd", (), TWICE) for s in STRATEGIES),
    *(Case("bert", "single", 1, "momentum", (), extra) for extra in (TWICE, THRICE)),
    # One weight as the embedding and the head; a parameter nothing reads.
    *(Case("gpt_tied", s, 2, "momentum", UNEVEN, TWICE) for s in ("dp", "hybrid_split_dp")),
    *(Case("own", s, 2, "momentum", UNEVEN, TWICE) for s in ("dp", "zero2", "hybrid_split_dp")),
    # A split head beside a partitioned backbone.
    *(
        Case("gpt", "hybrid_split_dp", 2, "sgd", UNEVEN, (*TWICE, *zero_backbone(stage)))
        for stage in (1, 2, 3)
    ),
    # A clip that bites, and held-back samples.
    *(Case("gpt", s, 2, "sgd", UNEVEN, (*TWICE, *CLIPPED)) for s in ("dp", "zero1", "zero3")),
    *(
        Case("bert", s, 2, "sgd", UNEVEN, (*TWICE, *EVALUATED))
        for s in ("dp", "zero3", "hybrid_split_dp")
    ),
]


@pytest.mark.parametrize("case", fewest(CASES, shown_by("test_accumulation")), ids=str)
def test_micro_batches_are_one_batch(run: Run, case: Case) -> None:
    pieces, rest = case.extra[:1], case.extra[1:]
    rest = tuple(x for x in rest if not x.startswith("strategy."))
    found = run(case)
    kind = case.strategy if case.strategy in ("single", "hybrid_split_dp") else ""
    expected = MICRO_BATCHES[kind, case.devices, case.speeds, pieces]
    assert [rank["samples"] for rank in found.plan["ranks"]] == expected
    assert {rank["micro_batches"] for rank in found.plan["ranks"]} == {len(expected[0])}
    assert_equal(found, run(Case(case.model, "single", 1, case.optimizer, (), rest)), TOLERANCE)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("dp", marks=pytest.mark.full),
        pytest.param("zero1", marks=pytest.mark.full),
        "hybrid_split_dp",
    ],
)
def test_bf16_in_micro_batches(run: Run, strategy: str) -> None:
    """To what rounding to 8 bits allows, over 5 steps."""
    extra = ("train.precision=bf16",)
    found = run(Case("gpt", strategy, 2, "sgd", UNEVEN, (*TWICE, *extra)))
    assert_equal(found, run(Case("gpt", "single", 1, "sgd", (), extra)), 2e-2)


REFUSED = [
    (
        Case("gpt", "dp", 2, "sgd", ONE, ("train.accumulate=5",)),
        "train.accumulate=5 cuts a device's share into micro-batches of none "
        "(train.global_batch=8 on 2 devices); use at most 4",
    ),
    (
        Case("image_classifier", "dp", 2, "sgd", (), TWICE),
        "(model.sync_batchnorm=true); use 1, or model.sync_batchnorm=false",
    ),
    (Case("own_branching", "dp", 2, "sgd", (), TWICE), "cannot be exported"),
    (
        Case("gpt", "pipeline", 2, "sgd", (), TWICE),
        "train.accumulate=2 cuts the batch of a strategy whose micro-batches are its pipeline's; "
        "use 1, and micro_batches in the strategy's pipeline",
    ),
]


@pytest.mark.parametrize(("case", "said"), REFUSED, ids=str)
def test_what_cannot_be_accumulated_is_refused(run: Run, case: Case, said: str) -> None:
    with pytest.raises(JobFailed) as failure:
        run(case)
    assert said in str(failure.value)


def test_a_slow_device_gets_a_sample_for_every_micro_batch(run: Run) -> None:
    """Of 8 at 7 to 1, one sample would be its share."""
    found = run(Case("gpt", "dp", 2, "sgd", ONE, THRICE))
    assert found.plan["task_graphs"][0]["shares"] == [5, 3]
    assert_equal(found, run(Case("gpt", "single", 1, "sgd")), TOLERANCE)


# --- Counting ------------------------------------------------------------------------------------


class _Counts(torch.nn.Module):
    """The targets of CrossEntropies' two losses, as `losses.targets_graph` would count them."""

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        counted = (first != -100, second != 1)
        return counted[0].sum(dtype=torch.float64), counted[1].sum(dtype=torch.float64)


def counting(names: tuple[str, ...]) -> fx.GraphModule:
    graph = fx.symbolic_trace(_Counts())
    graph.meta["losses"] = names
    return graph


def pieces_of_two_ranks(sizes: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    total = sum(map(sum, sizes))
    torch.manual_seed(0)
    model = CrossEntropies(torch.float64)
    start, batches = sum(map(sum, sizes[:rank])), []
    for size in sizes[rank]:
        batches.append(part(entropy_batch(total, torch.float64), start, size))
        start += size
    counter = TargetCounter(counting(("first", "second")), dist.group.WORLD)
    loss = torch.zeros((), dtype=torch.float64)
    for batch, size, targets in zip(batches, sizes[rank], counter.count(batches), strict=True):
        with GlobalMeans(dist.group.WORLD, size / total, targets):
            piece = model(**batch) * (size / total)
        piece.backward()
        loss += piece.detach()
    return float(loss), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "sizes",
    [pytest.param([[2, 2], [2, 2]], marks=pytest.mark.full), [[1, 3, 1], [2, 1, 1]]],
)
def test_two_losses_with_different_targets_in_every_micro_batch(sizes: list[list[int]]) -> None:
    torch.manual_seed(0)
    model = CrossEntropies(torch.float64)
    loss = model(**entropy_batch(sum(map(sum, sizes)), torch.float64))
    loss.backward()
    results = run_ranks(pieces_of_two_ranks, 2, sizes)
    assert sum(found for found, _ in results) == pytest.approx(loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        found = sum(gradients[name] for _, gradients in results)
        torch.testing.assert_close(found, parameter.grad)


def refusals() -> list[str]:
    """What is said when a model's losses are not those that were counted."""
    assert dist.group.WORLD is not None
    model, batch = CrossEntropies(torch.float64), entropy_batch(4, torch.float64)
    right = TargetCounter(counting(("first", "second")), dist.group.WORLD).count([batch])[0]
    said = []
    for mine in ([*right.mine, 1.0], right.mine[:1], [right.mine[0] + 1, right.mine[1]]):
        targets = torch.tensor([float(x) for x in mine], dtype=torch.float64)
        try:
            with GlobalMeans(dist.group.WORLD, 1.0, Targets(targets, targets)):
                model(**batch)
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    return said


def test_losses_that_were_not_counted_are_refused() -> None:
    (said,) = run_ranks(refusals, 1)
    assert said[0] == "3 losses were counted beforehand, 2 called"
    assert said[1] == "more than the 1 losses that were counted beforehand"
    assert said[2].endswith("a loss has other targets than were counted beforehand")


def scales() -> list[float]:
    assert dist.group.WORLD is not None
    counter = TargetCounter(counting(("first", "second")), dist.group.WORLD)
    cpu = torch.device("cpu")
    pieces = MicroBatchLoss(((0, 6), (6, 8)), LossWeights("mean", 8), counter, cpu)
    first = torch.tensor([0, 1, -100, 2, 2, 3, -100, -100])
    second = torch.tensor([0, 1, 1, 1, 2, 3, 0, 0])
    pieces.begin(
        [{"first": first[:6], "second": second[:6]}, {"first": first[6:], "second": second[6:]}]
    )
    found = []
    for number in range(2):
        pieces.enter(number)
        found += [
            pieces.weight(number),
            float(pieces.scale("first")),
            float(pieces.scale("second")),
        ]
    return found


def test_scales_of_a_rewritten_graphs_losses() -> None:
    """5 and 5 targets; the first micro-batch has 3/4 of the samples."""
    (found,) = run_ranks(scales, 1)
    assert found == pytest.approx([0.75, 1 / (5 * 0.75), 1 / (5 * 0.75), 0.25, 0.8, 0.8])
