"""Round weights otherwise, to measure what rounding does to a model.

Where a model is not smooth (a ReLU at 0, a choice of experts), a rounding may decide a whole
gradient. How much two right computations can differ then depends on the model and its batch. It is
measured by computing the same with other roundings (Monte Carlo arithmetic: D. S. Parker, "Monte
Carlo Arithmetic", UCLA, 1997, with the noise on the weights instead of every operation).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Largest relative noise on a weight: a multiple of the largest relative error of a rounding. What
# fp32 decides by rounding is rare: a few of millions of ReLUs. Noise of several units finds, in a
# few runs, those that another order of a sum could decide; in 16 bits there are always many.
UNITS = {"fp32": 8.0 * 2.0**-24, "bf16": 2.0 * 2.0**-8, "fp16": 2.0 * 2.0**-11}


class RoundedWeights:
    """Relative noise on `parameters`, drawn anew for each `moved`, in the units of `precision`.

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
        kept = [p.detach().clone() for p in self._parameters]
        try:
            for parameter in self._parameters:
                noise = torch.rand(parameter.shape, generator=self._generator) * 2 - 1
                parameter.mul_(1 + self._unit * noise.to(parameter.device))
            with torch.enable_grad():
                yield
        finally:
            for parameter, value in zip(self._parameters, kept, strict=True):
                parameter.copy_(value)
