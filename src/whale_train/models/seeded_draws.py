"""Draws of random numbers that are part of what a model computes, told from those that are not.

Dropout draws from torch's default generator, and any numbers will do: every copy draws its own. A
forward that seeds a generator, or holds one that its constructor seeded, wants certain numbers: the
first row of them belongs to the first sample of the batch, and no copy and no graph knows which.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# A seed that no forward gives by itself.
_PRIVATE_SEED = 0x5EED_0F_7E57


class OwnSeed:
    """Seed of torch's default generator when a forward began; `is_seeded` compares with it."""

    def __init__(self) -> None:
        self._seed = torch.initial_seed()

    def is_seeded(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call with `kwargs` would draw from a seeded or a held generator.

        That is a generator other than torch's default one, or the default one after the forward has
        seeded it.
        """
        return kwargs.get("generator") is not None or torch.initial_seed() != self._seed


def seed_privately(seed: int) -> None:
    """Seed torch's default generator by `seed`, as neither a forward nor `private_seed` does."""
    torch.manual_seed(_PRIVATE_SEED + 1 + seed)


@contextmanager
def private_seed() -> Iterator[None]:
    """Seed torch's default generator inside, as no forward does, and restore it afterwards."""
    before = torch.get_rng_state()
    torch.manual_seed(_PRIVATE_SEED)
    try:
        yield
    finally:
        torch.set_rng_state(before)
