"""Seed the global generators of random numbers, and leave them as they were."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def seed_generators(draw: int) -> None:
    """Seed Python's, NumPy's and torch's global generators by the draw of a sample."""
    random.seed(draw)
    np.random.seed(draw % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(draw % 2**63)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the states of the global generators as they are, whatever is drawn in the context."""
    states = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None and of_torch is not None:
            torch.set_rng_state(of_torch)
