"""Batch norm over shared batches, against torch's own on the whole batch."""

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from whale_train.errors import ConfigError
from whale_train.runtime.kernels.sync_batch_norm import (
    GlobalBatchNorm,
    global_batch_norm,
    synchronise_batch_norm,
)

STEPS = 3


class WithBranch(nn.Module):
    """Batch norms of two kinds, one of them nested and one used under two names."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, **settings), nn.ReLU())
        self.norm = nn.BatchNorm1d(4, **settings)
        self.again = self.norm
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.first(x).mean((2, 3)))
        result: Tensor = self.head(self.again(features))
        return result


def built(settings: dict[str, object]) -> WithBranch:
    torch.manual_seed(0)
    model = WithBranch(**settings).double()
    for parameter in model.parameters():  # scales of 1 and shifts of 0 would hide faults
        nn.init.normal_(parameter, std=0.7)
    return model


def batch(step: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 2, 6, 5, generator=generator, dtype=torch.float64) * (step + 1) + 4


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_shared(sizes: tuple[int, ...], settings: dict[str, object]) -> dict[str, object]:
    rank = dist.get_rank()
    model = built(settings)
    before, names = dict(model.named_parameters()), list(model.state_dict())
    paths = synchronise_batch_norm(model, dist.group.WORLD)
    same_parameters = all(before[name] is p for name, p in model.named_parameters())
    assert same_parameters
    assert list(model.state_dict()) == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    input_grads = []
    for step in range(STEPS):
        x = batch(step, sum(sizes))[mine].requires_grad_()
        (model(x).pow(2).sum() / sum(sizes)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        input_grads.append(x.grad)
    model.eval()
    probe = batch(9, sum(sizes))[mine]
    return {
        "paths": paths,
        "state": state_of(model),
        "input_grads": input_grads,
        "evaluated": model(probe).detach(),
    }


SETTINGS: list[dict[str, object]] = [
    {},
    {"momentum": None},
    {"track_running_stats": False},
    {"affine": False, "eps": 0.1},
]


@pytest.mark.parametrize("sizes", [(4, 4), (6, 1), (3, 0, 2)])
@pytest.mark.parametrize("settings", SETTINGS)
def test_training_is_that_of_the_whole_batch(
    sizes: tuple[int, ...], settings: dict[str, object]
) -> None:
    model = built(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    input_grads = []
    for step in range(STEPS):
        x = batch(step, sum(sizes)).requires_grad_()
        (model(x).pow(2).sum() / sum(sizes)).backward()
        optimizer.step()
        optimizer.zero_grad()
        input_grads.append(x.grad)
    model.eval()
    evaluated = model(batch(9, sum(sizes)))
    for rank, result in enumerate(run_ranks(train_shared, len(sizes), sizes, settings)):
        assert sorted(result["paths"]) == ["again", "first.1", "norm"]
        torch.testing.assert_close(result["state"], dict(model.state_dict()))
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for found, wanted in zip(result["input_grads"], input_grads, strict=True):
            torch.testing.assert_close(found, wanted[mine])
        torch.testing.assert_close(result["evaluated"], evaluated[mine].detach())


def offset_values(dtype: torch.dtype, parameters: torch.dtype) -> list[Tensor]:
    """Values far from zero: squares of them would lose the variance."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    whole = (torch.randn(9, 3, 7, generator=generator) + 300).to(dtype)
    x = [whole[:7], whole[7:]][rank].clone().requires_grad_()
    weight = torch.tensor([1.0, 2.0, -1.0], dtype=parameters, requires_grad=True)
    bias = torch.tensor([0.0, 1.0, 2.0], dtype=parameters, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)
    group = dist.group.WORLD
    y = global_batch_norm(x, weight, bias, mean, var, True, 0.5, 1e-5, group)
    y.float().tanh().sum().backward()
    return [y.detach(), x.grad, weight.grad, bias.grad, mean, var]


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_far_from_zero(dtype: torch.dtype, parameters: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    rounded = (torch.randn(9, 3, 7, generator=generator) + 300).to(dtype)
    whole = rounded.double().requires_grad_()
    weight = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    y = functional.batch_norm(whole, mean, var, weight, bias, True, 0.5, 1e-5)
    y.tanh().sum().backward()
    first, second = run_ranks(offset_values, 2, dtype, parameters)
    # fp32 holds values near 300 to 3e-5.
    tolerance = (
        {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    found = [torch.cat([first[i], second[i]]) for i in (0, 1)]
    assert found[0].dtype == found[1].dtype == dtype
    torch.testing.assert_close(found[0].double(), y.detach(), **tolerance)
    torch.testing.assert_close(found[1].double(), whole.grad, **tolerance)
    assert first[2].dtype == parameters
    torch.testing.assert_close((first[2] + second[2]).double(), weight.grad, **tolerance)
    torch.testing.assert_close((first[3] + second[3]).double(), bias.grad, **tolerance)
    for rank in (first, second):
        torch.testing.assert_close(rank[4].double(), mean, rtol=1e-5, atol=0)
        torch.testing.assert_close(rank[5].double(), var, rtol=1e-5, atol=0)


class Activated(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def refusals() -> list[str]:
    messages = []
    for model in (nn.Sequential(Activated(2), nn.BatchNorm1d(2)), nn.BatchNorm1d(2)):
        try:
            synchronise_batch_norm(model, dist.group.WORLD)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def hooked() -> list[int]:
    """A hook the user put on the norm still runs, and so does a shared parent."""
    seen: list[int] = []
    block = nn.Sequential(nn.BatchNorm1d(2))
    block[0].register_forward_hook(lambda module, x, y: seen.append(len(y)))
    model = nn.Sequential(block, block)
    synchronise_batch_norm(model, dist.group.WORLD)
    assert isinstance(block[0], GlobalBatchNorm)
    model(torch.arange(6.0).view(3, 2))
    return seen


def test_what_cannot_be_swapped_is_refused_and_hooks_stay() -> None:
    (messages,) = run_ranks(refusals, 1)
    assert "in 0, and Activated has a forward of its own" in messages[0]
    assert "in the model, and BatchNorm1d is the whole model" in messages[1]
    assert all("model.sync_batchnorm=true" in message for message in messages)
    assert run_ranks(hooked, 2) == [[3, 3]] * 2
