"""Train with plain torch loops, in one process on whole batches, as the reference for
`every_plan.py`."""

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
_HALF_A_DIGIT = 2.0**-24  # the largest relative error of rounding to fp32
# The smallest reference value of a relative difference, for each element of a parameter. A key's
# bias, for example, is 0 except for rounding.
_FLOOR = 5e-4


@dataclass(frozen=True)
class Trained:
    """The result of a plain loop.

    losses: the loss of every step.
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
    """Train a model with one step on each batch, and return the losses and the model.

    build: creates the model.
    optimizers: creates the optimizers for the model.
    loss_of: computes the loss of a batch.
    """
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
    """Return `optimizers`, changed so that every element of a gradient has a random rounding error.

    draw: the seed of the errors.
    """
    generator = torch.Generator().manual_seed(draw)

    def rounded(gradient: Tensor) -> Tensor:
        return gradient * (1 + _HALF_A_DIGIT * torch.randn(gradient.shape, generator=generator))

    def make(model: nn.Module) -> Sequence[Optimizer]:
        for parameter in model.parameters():
            parameter.register_hook(rounded)
        return optimizers(model)

    return make


def value_difference(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest relative difference of a parameter, measured by L2 norms.

    values: the parameters, by path.
    expected: the reference values, by path.
    """
    with torch.no_grad():
        return max(
            float((values[name] - x).norm() / (x.norm() + _FLOOR * x.numel() ** 0.5))
            for name, x in expected.items()
        )


def batches_of(kind: Kind, steps: int, batch: int) -> list[Batch]:
    """Return the global batches of a run's first steps.

    Raises ValueError where a complete epoch does not have every sample once.
    """
    num_samples, read = kind.samples(kind.overrides)
    order = indices_from(0, num_samples, steps * batch, SEED, True)
    for start in range(0, len(order) - num_samples + 1, num_samples):
        if (np.sort(order[start : start + num_samples]) != np.arange(num_samples)).any():
            raise ValueError(f"the order from {start} on has not every sample once")
    # Random parts of a sample, such as the masked tokens, depend on the sample's place in the run.
    bits = random_bits(stream_key("draws", SEED), np.arange(steps * batch))
    draws = (bits >> np.uint64(1)).astype(np.int64)
    cuts = range(0, steps * batch, batch)
    return [_tensors(read, order[at : at + batch], draws[at : at + batch]) for at in cuts]


def _tensors(read: Callable[[Numbers, Numbers], dict], numbers: Numbers, draws: Numbers) -> Batch:
    return {name: torch.from_numpy(x) for name, x in read(numbers, draws).items()}
