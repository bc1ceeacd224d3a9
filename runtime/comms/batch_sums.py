"""Sums over the batch of which every copy makes a part: what a model makes of all samples at once.

The fractions of a batch's tokens that go to every expert are one, where a loss balances experts.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.comms.layout_collectives import all_reduced, linear


@dataclass(frozen=True)
class BatchShare:
    """The copies that share a batch, and what `part` of its samples is mine."""

    group: dist.ProcessGroup
    part: float


def batch_sum(x: Tensor, degree: int, mine: BatchShare) -> Tensor:
    """Return what `x` is of the whole batch, given what it is of my samples: n^degree times the sum
    over copies of theirs, each over its n_r^degree, where n counts samples (0: a sum; -1: a mean).

    Whole numbers are added as such, and have no gradient. All copies call it in the same order;
    the gradient is the sum of theirs, as each of them makes its loss of the sum.
    """
    if not x.is_floating_point():
        assert degree == 0, "a mean of whole numbers is none"
        return all_reduced(x, mine.group)
    weight = mine.part**-degree
    weighted = partial(_weighted, weight=weight, group=mine.group)
    return linear(x, weighted, partial(_shared_out, weight=weight, group=mine.group))


def _weighted(x: Tensor, weight: float, group: dist.ProcessGroup) -> Tensor:
    return all_reduced(x * weight, group)


def _shared_out(gradient: Tensor, weight: float, group: dist.ProcessGroup) -> Tensor:
    return all_reduced(gradient, group) * weight
