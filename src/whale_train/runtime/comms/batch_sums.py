"""Sums over the global batch to which every copy contributes the part of its own samples.

A model needs such a sum where it computes one figure of all samples, such as the fractions of a
batch's tokens that go to each expert, in a loss that balances experts.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.comms.layout_collectives import all_reduced, apply_linear_map


@dataclass(frozen=True)
class BatchShare:
    """One rank's share of a batch.

    group: the copies that share the batch.
    part: the fraction of the batch's samples that this rank has.
    """

    group: dist.ProcessGroup
    part: float


def batch_sum(x: Tensor, degree: int, share: BatchShare) -> Tensor:
    """Return the figure `x` for the whole batch, given `x` for this rank's samples, in the same
    shape.

    The result is n^degree times the sum over copies of their x / n_r^degree, where n is the number
    of the batch's samples and n_r the number of a copy's (degree 0: `x` is a sum; -1: a mean).
    Integers are added unweighted and have no gradient; `degree` must be 0 for them. All copies of
    `share.group` must call it in the same order. The gradient is the sum of the copies' gradients,
    as each copy computes its loss from the sum.
    """
    if not x.is_floating_point():
        assert degree == 0, "a mean of whole numbers is none"
        return all_reduced(x, share.group)
    weight = share.part**-degree
    weighted = partial(_weighted, weight=weight, group=share.group)
    return apply_linear_map(x, weighted, partial(_shared_out, weight=weight, group=share.group))


def _weighted(x: Tensor, weight: float, group: dist.ProcessGroup) -> Tensor:
    return all_reduced(x * weight, group)


def _shared_out(gradient: Tensor, weight: float, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's gradient: the sum of all copies' gradients, times this rank's weight."""
    return all_reduced(gradient, group) * weight
