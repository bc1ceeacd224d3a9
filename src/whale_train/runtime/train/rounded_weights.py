"""Perturb weights, to measure the effect of rounding on a model.

Where a model is not smooth (a ReLU at 0, a choice of experts), one rounding may decide a whole
gradient. The possible difference of two right computations then depends on the model and its batch.
It is measured by repeating the computation with other roundings (Monte Carlo arithmetic: D. S.
Parker, "Monte Carlo Arithmetic", UCLA, 1997, with the noise on the weights instead of every
operation).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# The largest relative noise on a weight: a multiple of the largest relative error of a rounding.
# Decisions by rounding are rare in fp32: a few of millions of ReLUs. Noise of several units finds,
# in a few runs, the decisions that another order of a sum could change. In 16 bits there are always
# many.
UNITS = {
    "fp32": 8.0 * 2.0**-24,
    "bf16": 2.0 * 2.0**-8,
    "fp16": 2.0 * 2.0**-11,
    "fp8": 2.0 * 2.0**-4,
}


class RoundedWeights:
    """Relative noise on `parameters`, drawn anew for each call of `moved`, in the units of
    `precision`.

    `seed` seeds the noise.
    """

    def __init__(self, parameters: Iterable[Tensor], precision: str, seed: int) -> None:
        self._parameters = [p for p in parameters if p.is_floating_point()]
        self._unit = UNITS[precision]
        self._generator = torch.Generator().manual_seed(seed)

    @contextmanager
    @torch.no_grad()
    def moved(self) -> Iterator[None]:
        """Add noise to the weights inside the context, and restore them after it."""
        originals = [p.detach().clone() for p in self._parameters]
        try:
            for parameter in self._parameters:
                noise = torch.rand(parameter.shape, generator=self._generator) * 2 - 1
                parameter.mul_(1 + self._unit * noise.to(parameter.device))
            with torch.enable_grad():
                yield
        finally:
            for parameter, value in zip(self._parameters, originals, strict=True):
                parameter.copy_(value)
