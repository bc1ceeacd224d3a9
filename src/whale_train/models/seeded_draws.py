"""Tell random numbers that are part of what a model computes from random numbers that are not.

Dropout draws from torch's default generator, and any numbers will do: every replica draws its own.
A forward that seeds a generator, or holds a generator that its constructor seeded, needs certain
numbers. The first row of them belongs to the first sample of the batch, and neither a replica nor a
graph knows which sample that is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# A seed that no forward is expected to use.
_PRIVATE_SEED = 0x5EED_0F_7E57


class OwnSeed:
    """The seed of torch's default generator at the beginning of a forward, for comparison by
    `is_seeded`."""

    def __init__(self) -> None:
        self._seed = torch.initial_seed()

    def is_seeded(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call with `kwargs` would draw from a seeded or a held generator.

        That is a generator other than torch's default one, or the default one after the forward has
        seeded it.
        """
        return kwargs.get("generator") is not None or torch.initial_seed() != self._seed


def seed_privately(seed: int) -> None:
    """Seed torch's default generator with a seed that follows from `seed`, and that neither a
    forward nor `private_seed` uses."""
    torch.manual_seed(_PRIVATE_SEED + 1 + seed)


@contextmanager
def private_seed() -> Iterator[None]:
    """Seed torch's default generator in the context with a seed that no forward uses, and restore
    its state afterwards."""
    before = torch.get_rng_state()
    torch.manual_seed(_PRIVATE_SEED)
    try:
        yield
    finally:
        torch.set_rng_state(before)
