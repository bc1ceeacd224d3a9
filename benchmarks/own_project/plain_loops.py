"""Plain torch loops that `every_plan.py` compares plans with: one process, a whole batch a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from kinds import Batch, Kind, Numbers
from torch import Tensor, nn
from torch.optim import Optimizer

from whale_train.data.order import indices_from
from whale_train.data.random_bits import random_bits, stream_key

SEED = 0
Make = Callable[[nn.Module], Sequence[Optimizer]]
_HALF_A_DIGIT = 2.0**-24  # of fp32: the largest relative error of a rounding
# What an element of a parameter counts as at least where differences are relative: a key's bias is
# 0 but for rounding.
_FLOOR = 5e-4


@dataclass(frozen=True)
class Trained:
    """Result of a plain loop.

    losses: loss of every step.
    model: the model after the last step.
    """

    losses: list[float]
    model: nn.Module


def train_plainly(
    build: Callable[[], nn.Module],
    optimizers: Make,
    batches: Iterable[Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
) -> Trained:
    """Return the losses of a step on each of `batches`, and the trained model."""
    torch.manual_seed(SEED)
    model, losses = build(), []
    updating = optimizers(model)
    for batch in batches:
        loss = loss_of(model, batch)
        model.zero_grad()
        loss.backward()
        for optimizer in updating:
            optimizer.step()
        losses.append(loss.item())
    return Trained(losses, model)


def rounded_otherwise(optimizers: Make, draw: int) -> Make:
    """Return `optimizers` on gradients whose elements are off by a rounding, drawn by `draw`."""
    generator = torch.Generator().manual_seed(draw)

    def rounded(gradient: Tensor) -> Tensor:
        return gradient * (1 + _HALF_A_DIGIT * torch.randn(gradient.shape, generator=generator))

    def make(model: nn.Module) -> Sequence[Optimizer]:
        for parameter in model.parameters():
            parameter.register_hook(rounded)
        return optimizers(model)

    return make


def value_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a parameter, by its L2 norm, relative to that expected."""
    with torch.no_grad():
        return max(
            float((values[name] - x).norm() / (x.norm() + _FLOOR * x.numel() ** 0.5))
            for name, x in expected.items()
        )


def batches_of(kind: Kind, steps: int, batch: int) -> list[Batch]:
    """Return the global batches of a run's first steps, read by the samples' numbers.

    Raises ValueError where an epoch that is over has not every sample once.
    """
    num_samples, read = kind.samples(kind.overrides)
    order = indices_from(0, num_samples, steps * batch, SEED, True)
    for start in range(0, len(order) - num_samples + 1, num_samples):
        if (np.sort(order[start : start + num_samples]) != np.arange(num_samples)).any():
            raise ValueError(f"the order from {start} on has not every sample once")
    # What is random in a sample, as the tokens that are masked, is that of its place in the run.
    bits = random_bits(stream_key("draws", SEED), np.arange(steps * batch))
    draws = (bits >> np.uint64(1)).astype(np.int64)
    cuts = range(0, steps * batch, batch)
    return [_tensors(read, order[at : at + batch], draws[at : at + batch]) for at in cuts]


def _tensors(read: Callable[[Numbers, Numbers], dict], numbers: Numbers, draws: Numbers) -> Batch:
    return {name: torch.from_numpy(x) for name, x in read(numbers, draws).items()}
