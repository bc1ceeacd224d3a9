"""LARS against its formula written in NumPy, and every plan's against one device's."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.distributed.cases import CLIPPED, TOLERANCE, UNEVEN, Case, Run
from tests.distributed.equality import JobFailed, assert_equal
from tests.distributed.equality_table import fewest, shown_by
from tests.distributed.harness import run_ranks
from torch import distributed as dist
from torch import nn

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.ddp import TorchEngine
from whale_train.runtime.optim.lars import Lars
from whale_train.runtime.optim.optimizers import make_optimizer, skipping
from whale_train.runtime.train.optimizer_step import update

OPTIONS = {
    "lr": 2.0, "momentum": 0.8, "weight_decay": 0.1, "trust_coefficient": 0.02, "eps": 1e-4
}  # fmt: skip


def by_formula(
    weight: NDArray[np.float64],
    gradients: Sequence[NDArray[np.float64]],
    trusts: bool = True,
) -> NDArray[np.float64]:
    """Algorithm 1 of the paper in fp64, line by line."""
    lr, momentum, decay, trust, eps = OPTIONS.values()
    v = np.zeros_like(weight)
    for g in gradients:
        weight_norm, gradient_norm = np.sqrt((weight**2).sum()), np.sqrt((g**2).sum())
        local = trust * weight_norm / (gradient_norm + decay * weight_norm + eps)
        v = momentum * v + lr * (local if trusts else 1.0) * (g + decay * weight)
        weight = weight - v
    return weight


def drawn(
    shape: tuple[int, ...], steps: int = 3
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    draw = np.random.default_rng(sum(shape))
    return draw.normal(size=shape), [draw.normal(size=shape) for _ in range(steps)]


def tensor(value: NDArray[np.float64]) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def assert_near(found: torch.Tensor, expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(7, 5), (3,), (), (40, 1000)])
@pytest.mark.parametrize("trusts", [True, False])
def test_it_is_the_papers_algorithm(shape: tuple[int, ...], trusts: bool) -> None:
    weight, gradients = drawn(shape)
    parameter = nn.Parameter(tensor(weight))
    optimizer = Lars([{"params": [parameter], "trust_ratio": trusts}], **OPTIONS)
    for gradient in gradients:
        parameter.grad = tensor(gradient)
        optimizer.step()
    assert_near(parameter, by_formula(weight, gradients, trusts))


def test_the_rate_is_within_the_momentum() -> None:
    """What an earlier step left is not scaled by a later rate, as torch's SGD would."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = Lars([parameter], lr=1.0, momentum=0.5, trust_coefficient=0.1, eps=1e-30)
    parameter.grad = torch.ones(1)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.9]))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.85]))


def test_without_momentum_no_state_is_kept() -> None:
    weight, gradients = drawn((7, 5))
    parameter = nn.Parameter(tensor(weight))
    optimizer = Lars([parameter], **{**OPTIONS, "momentum": 0.0})
    parameter.grad = tensor(gradients[0])
    optimizer.step()
    assert not optimizer.state
    assert_near(parameter, by_formula(weight, gradients[:1]))


def test_a_weight_of_zeros_has_a_trust_ratio_of_1() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1.0, -2.0, 3.0, 0.5])
    Lars([parameter], lr=0.1).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.1, 0.2, -0.3, -0.05]))


def test_a_step_that_is_skipped_changes_nothing() -> None:
    weight, gradients = drawn((7, 5))
    parameter = nn.Parameter(tensor(weight))
    optimizer = Lars([parameter], **OPTIONS)
    for bad in (True, False, True, False, False):
        parameter.grad = tensor(np.full((7, 5), np.inf) if bad else gradients.pop(0))
        with skipping(optimizer, torch.tensor(float(bad))) as steps:
            assert steps
            optimizer.step()
    assert_near(parameter, by_formula(*drawn((7, 5))))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norms_are_of_fp32_weights_and_unscaled_gradients(precision: str) -> None:
    """A weight whose norm no 16-bit type can hold, and a loss scale that would divide the ratio."""
    module = nn.Linear(3, 1, bias=False)
    weight = torch.tensor([[1e-9, 2e-9, -1e-9]])
    module.weight.data.copy_(weight)
    options = {**OPTIONS, "eps": 1e-30, "weight_decay": 0.0}
    engine = TorchEngine(
        module, Copies(None), make_optimizer("lars", options), precision, torch.device("cpu"),
        may_skip_parameters=False,
    )  # fmt: skip
    scale = torch.tensor(1024.0) if precision == "fp16" else None
    output = engine(torch.tensor([[1.0, 2.0, 2.0]]))
    factor = torch.ones(1, 1) if scale is None else scale.reshape(1, 1)
    engine.backward([output], [factor])
    update([engine], 0.0, False, None, scale)
    gradient = torch.tensor([[1.0, 2.0, 2.0]])
    ratio = OPTIONS["trust_coefficient"] * weight.norm() / gradient.norm()
    expected = weight - OPTIONS["lr"] * ratio * gradient
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-5, atol=0.0)


def sharded(rows: list[tuple[int, int]]) -> tuple[list[list[float]], list[float], int]:
    """Two matrices cut by rows and one vector that is whole; the third step gives the second
    matrix no gradient."""
    start, stop = rows[dist.get_rank()]
    given = [drawn((6, 4)), drawn((6, 3)), drawn((5,))]
    tensors = [tensor(weight) for weight, _ in given]
    parameters = [nn.Parameter(t[start:stop] if t.dim() == 2 else t) for t in tensors]
    copies = Copies(None, dist.group.WORLD, frozenset(parameters[:2]))
    own = {parameters[1]: {"trust_ratio": False}}
    optimizer = make_optimizer("lars", OPTIONS, own)(parameters, copies)
    calls, original = [0], dist.all_reduce

    def counted(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        return original(*args, **kwargs)  # type: ignore[arg-type]

    dist.all_reduce = counted  # type: ignore[assignment]
    for step in range(3):
        for number, (parameter, (_, gradients)) in enumerate(zip(parameters, given, strict=True)):
            gradient = tensor(gradients[step])
            parameter.grad = gradient[start:stop] if gradient.dim() == 2 else gradient
            if (number, step) == (1, 2):
                parameter.grad = None
        optimizer.step()
    dist.all_reduce = original
    matrices = [parameter.detach().flatten().tolist() for parameter in parameters[:2]]
    return matrices, parameters[2].detach().tolist(), calls[0]


# Of unlike sizes, and with a rank that has nothing.
@pytest.mark.parametrize("rows", [[(0, 5), (5, 6)], [(0, 6), (6, 6)]])
def test_shards_have_the_trust_ratio_of_the_whole(rows: list[tuple[int, int]]) -> None:
    results = run_ranks(sharded, 2, rows)
    for number, (shape, trusts) in enumerate([((6, 4), True), ((6, 3), False)]):
        weight, gradients = drawn(shape)
        expected = by_formula(weight, gradients[: 3 - number], trusts)
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
_GROUPS = ('optimizer.groups=[{match: token, lr_scale: 0.5}, {match: "*.expand*", trust_ratio: '
           'false, lr_scale: 0.01}]')  # fmt: skip
CASES = [
    Case("gpt", "dp", 2, "lars", UNEVEN, CLIPPED),
    Case("image_classifier", "dp", 2, "lars", UNEVEN),
    Case("gpt", "split", 2, "lars", UNEVEN, (_GROUPS,)),
    Case("gpt_tied", "pipeline", 4, "lars", (), (_COPIES_OF_STAGES,)),
    Case("gpt", "hybrid_split_dp", 2, "lars", UNEVEN, CLIPPED),
]


@pytest.mark.parametrize("case", fewest(CASES, shown_by("test_lars")), ids=str)
def test_every_plan_is_one_device(run: Run, case: Case) -> None:
    extra = tuple(x for x in case.extra if not x.startswith("strategy."))
    single = Case(case.model, "single", 1, "lars", (), extra)
    assert_equal(run(case), run(single), TOLERANCE)


def test_partitions_are_refused(run: Run) -> None:
    with pytest.raises(JobFailed) as failure:
        run(Case("gpt", "zero1", 2, "lars"))
    rule = "partitions parameters anywhere, and optimizer=lars needs the norm of each"
    key = "strategy.graph.replicate.zero=1"
    assert f"{key} {rule}; use zero: 0, or optimizer=sgd" in str(failure.value)
