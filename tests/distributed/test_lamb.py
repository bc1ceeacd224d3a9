"""LAMB against its formula written in NumPy, and every plan's against one device's."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.distributed.cases import (
    CLIPPED,
    TOLERANCE,
    UNEVEN,
    Case,
    Run,
    zero_backbone,
)
from tests.distributed.equality import JobFailed, assert_equal
from tests.distributed.equality_table import fewest, shown_by
from tests.distributed.harness import run_ranks
from torch import distributed as dist
from torch import nn

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.optim.lamb import Lamb
from whale_train.runtime.optim.optimizers import make_optimizer, skipping

OPTIONS = {"lr": 0.05, "betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.1}


def by_formula(
    weight: NDArray[np.float64], gradients: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Algorithm 2 of the paper in fp64, line by line."""
    (first, second), lr = OPTIONS["betas"], OPTIONS["lr"]  # type: ignore[misc]
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        m = first * m + (1 - first) * g
        v = second * v + (1 - second) * g**2
        r = (m / (1 - first**t)) / (np.sqrt(v / (1 - second**t)) + OPTIONS["eps"])
        update = r + OPTIONS["weight_decay"] * weight
        weight_norm, update_norm = np.sqrt((weight**2).sum()), np.sqrt((update**2).sum())
        trust = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        weight = weight - lr * trust * update
    return weight


def drawn(
    shape: tuple[int, ...], steps: int = 3
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    draw = np.random.default_rng(sum(shape))
    return draw.normal(size=shape), [draw.normal(size=shape) for _ in range(steps)]


@pytest.mark.parametrize("shape", [(7, 5), (3,), (), (40, 1000)])
def test_it_is_the_papers_algorithm(shape: tuple[int, ...]) -> None:
    weight, gradients = drawn(shape)
    parameter = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    optimizer = Lamb([parameter], **OPTIONS)  # type: ignore[arg-type]
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    np.testing.assert_allclose(
        parameter.detach().numpy(), by_formula(weight, gradients), rtol=2e-5, atol=2e-6
    )


def test_a_weight_of_zeros_has_a_trust_ratio_of_1() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1.0, -2.0, 3.0, 0.5])
    Lamb([parameter], lr=0.1, eps=0.0).step()
    # Adam's first step is the gradient's sign.
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.1, 0.1, -0.1, -0.1]))


def test_what_has_no_gradient_stays_put() -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    one.grad = torch.ones(3)
    Lamb([one, other], lr=0.1, weight_decay=0.5).step()
    assert other.tolist() == [1.0, 1.0, 1.0]
    assert one.tolist() != [1.0, 1.0, 1.0]


def test_a_step_that_is_skipped_changes_nothing() -> None:
    weight, gradients = drawn((7, 5))
    parameter = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    optimizer = Lamb([parameter], **OPTIONS)  # type: ignore[arg-type]
    for bad in (True, False, True, False, False):
        given = np.full((7, 5), np.inf) if bad else gradients.pop(0)
        parameter.grad = torch.tensor(given, dtype=torch.float32)
        with skipping(optimizer, torch.tensor(float(bad))) as steps:
            assert steps
            optimizer.step()
    expected = by_formula(*drawn((7, 5)))
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


def sharded(rows: list[tuple[int, int]]) -> tuple[list[list[float]], list[float], int]:
    """Two matrices cut by rows and one vector that is whole; the third step gives the second
    matrix no gradient."""
    start, stop = rows[dist.get_rank()]
    given = [drawn((6, 4)), drawn((6, 3)), drawn((5,))]
    tensors = [torch.tensor(weight, dtype=torch.float32) for weight, _ in given]
    parameters = [nn.Parameter(t[start:stop] if t.dim() == 2 else t) for t in tensors]
    copies = Copies(None, dist.group.WORLD, frozenset(parameters[:2]))
    optimizer = make_optimizer("lamb", OPTIONS)(parameters, copies)
    calls, original = [0], dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = counted  # type: ignore[assignment]
    for step in range(3):
        for number, (parameter, (_, gradients)) in enumerate(zip(parameters, given, strict=True)):
            gradient = torch.tensor(gradients[step], dtype=torch.float32)
            parameter.grad = gradient[start:stop] if gradient.dim() == 2 else gradient
            if (number, step) == (1, 2):
                parameter.grad = None
        optimizer.step()
    dist.all_reduce = original
    matrices = [parameter.detach().flatten().tolist() for parameter in parameters[:2]]
    return matrices, parameters[2].detach().tolist(), calls[0]


# Of unlike sizes, and with a rank that has nothing.
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 3), (3, 6)], marks=pytest.mark.full),
        [(0, 5), (5, 6)],
        [(0, 6), (6, 6)],
    ],
)
def test_shards_have_the_trust_ratio_of_the_whole(rows: list[tuple[int, int]]) -> None:
    results = run_ranks(sharded, 2, rows)
    for number, shape in enumerate([(6, 4), (6, 3)]):
        weight, gradients = drawn(shape)
        expected = by_formula(weight, gradients[: 3 - number])
        found = np.concatenate([np.array(matrices[number]) for matrices, _, _ in results])
        np.testing.assert_allclose(found, expected.flatten(), rtol=2e-5, atol=2e-6)
    weight, gradients = drawn((5,))
    for _, vector, calls in results:
        np.testing.assert_allclose(vector, by_formula(weight, gradients), rtol=2e-5, atol=2e-6)
        assert calls == 3  # one a step


# --- Jobs ----------------------------------------------------------------------------------------


_COPIES_OF_STAGES = (
    "strategy.graph={replicate: {degree: 2, of: {pipeline: {stages: 2, micro_batches: 2}}}}"
)
_3D = (
    "strategy.graph={replicate: {degree: 2, of: {pipeline: {micro_batches: 2, stages: "
    "[{split: {degree: 2}}, {split: {degree: 2}}]}}}}"
)
CASES = [
    *(
        Case(model, strategy, devices, "lamb", UNEVEN)
        for model in ("gpt", "gpt_tied", "image_classifier", "bert")
        for strategy in ("dp", "hybrid_split_dp")
        for devices in (2, 4)
    ),
    Case("class_head", "hybrid_split_dp", 2, "lamb"),
    # Uneven shards of every block; copies of stages with a tied embedding; both.
    Case("gpt", "split", 2, "lamb", UNEVEN),
    Case("gpt_tied", "pipeline", 4, "lamb", (), (_COPIES_OF_STAGES,)),
    Case("gpt", "3d", 8, "lamb", (), (_3D,)),
    Case("gpt", "dp", 2, "lamb", (), CLIPPED),
    Case("gpt", "hybrid_split_dp", 2, "lamb", UNEVEN, CLIPPED),
]


@pytest.mark.parametrize("case", fewest(CASES, shown_by("test_lamb")), ids=str)
def test_every_plan_is_one_device(run: Run, case: Case) -> None:
    extra = tuple(x for x in case.extra if not x.startswith("strategy."))
    single = Case(case.model, "single", 1, "lamb", (), extra)
    assert_equal(run(case), run(single), TOLERANCE)


def test_a_trust_ratio_of_each_shard_alone_would_be_seen(run: Run) -> None:
    """What the tolerance is worth: another weight decay moves the trust ratio a little."""
    everywhere = "optimizer.no_decay=null"
    one = Case("gpt", "single", 1, "lamb", (), (everywhere,))
    other = Case("gpt", "single", 1, "lamb", (), (everywhere, "optimizer.weight_decay=0.11"))
    with pytest.raises(AssertionError, match="off by"):
        assert_equal(run(other), run(one), TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "extra", "key"),
    [
        pytest.param("zero1", (), "strategy.graph.replicate.zero=1", marks=pytest.mark.full),
        pytest.param("zero3", (), "strategy.graph.replicate.zero=3", marks=pytest.mark.full),
        ("zero2_offload", (), "strategy.graph.replicate.zero=2"),
        ("hybrid_split_dp", zero_backbone(1), "strategy.graph[0].replicate.zero=1"),
    ],
)
def test_partitions_are_refused(run: Run, strategy: str, extra: tuple[str, ...], key: str) -> None:
    with pytest.raises(JobFailed) as failure:
        run(Case("gpt", strategy, 2, "lamb", (), extra))
    rule = "partitions parameters anywhere, and optimizer=lamb needs the norm of each"
    assert f"{key} {rule}; use zero: 0, or optimizer=adamw" in str(failure.value)
